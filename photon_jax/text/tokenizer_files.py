"""Reads a tokenizer from a checkpoint folder in the Hugging Face layout."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from photon_jax.errors import CheckpointError
from photon_jax.text.tokenizer_parts import TokenizerParts, TokenizersFault, mark_special

_logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
_TOKEN_NAMES = ("bos_token", "eos_token", "eot_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_tokenizer_folder(folder: Path) -> TokenizerParts:
    """Returns the parts of the tokenizer in the folder.

    tokenizer.json is needed; tokenizer_config.json, special_tokens_map.json and the chat template files are read where
    they exist.

    Raises:
      CheckpointError: tokenizer.json is missing, or a file can't be understood.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; save the tokenizer in the fast format, which writes {TOKENIZER_FILE}, into that folder"
        )
    with TokenizersFault(str(path)):
        backend = tokenizers.Tokenizer.from_str(_read_text(path))
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    fallback = _read_json(folder / "special_tokens_map.json")
    _add_declared_tokens(backend, config, folder)
    tokens, others = _special_tokens({**fallback, **{key: value for key, value in config.items() if value is not None}})
    for name in ("bos_token", "eos_token"):
        if name in tokens and backend.token_to_id(tokens[name]) is None:
            _logger.warning("%s %r of %s is not in the vocabulary and is ignored", name, tokens[name], folder)
            del tokens[name]
    ends = [tokens[name] for name in ("eos_token", "eot_token") if name in tokens]
    mark_special(backend, [*(tokens[name] for name in ("bos_token",) if name in tokens), *ends, *others])
    end_ids = (backend.token_to_id(text) for text in ends)
    return TokenizerParts(
        backend=backend,
        special_tokens=tokens,
        bos_token_id=backend.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None,
        eos_token_ids=tuple(dict.fromkeys(end for end in end_ids if end is not None)),
        add_bos=_add_bos(config),
        chat_templates=_chat_templates(folder, config),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}; fetch the file again") from error
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in the file, empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:  # no JSON, a number of too many digits, or nested too deep
        raise CheckpointError(f"{path} is not valid JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _token_text(name: str, value: object) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise CheckpointError(
            f"{name} of the tokenizer's configuration must be a string or hold one, got {value!r:.100}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{name} of the tokenizer's configuration is no Unicode text: {text!r:.100}") from error
    return text


def _add_bos(config: Mapping[str, Any]) -> bool | None:
    value = config.get("add_bos_token")
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"add_bos_token of tokenizer_config.json must be true or false, got {value!r:.100}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Returns the special tokens that have a name, and the text of those without."""
    tokens = {name: _token_text(name, config[name]) for name in _TOKEN_NAMES if config.get(name) is not None}
    others: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or ()
        if isinstance(value, Mapping):
            named = {str(name): _token_text(str(name), token) for name, token in value.items()}
            tokens = {**named, **tokens}
            others.extend(named.values())
        elif isinstance(value, list | tuple):
            others.extend(_token_text(key, token) for token in value)
        else:
            raise CheckpointError(
                f"{key} of the tokenizer's configuration must be a list or an object, got {value!r:.100}"
            )
    return tokens, others


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Adds the tokens that tokenizer_config.json lists and tokenizer.json lacks."""
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, Mapping) or not all(key.isdecimal() and len(key) < 10 for key in declared):
        raise CheckpointError(
            f"added_tokens_decoder of tokenizer_config.json must map token ids to tokens, got {declared!r:.100}"
        )
    for key in sorted(declared, key=int):
        entry, token_id = declared[key], int(key)
        if not isinstance(entry, Mapping):
            raise CheckpointError(
                f"added_tokens_decoder[{key}] of tokenizer_config.json must be an object, got {entry!r:.100}"
            )
        text = _token_text(f"added_tokens_decoder[{key}]", entry)
        if backend.token_to_id(text) is None:
            options = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            backend.add_tokens([tokenizers.AddedToken(text, special=bool(entry.get("special", False)), **options)])
        if backend.token_to_id(text) != token_id:
            raise CheckpointError(
                f"token {text!r} has id {token_id} in tokenizer_config.json but {backend.token_to_id(text)} by "
                f"{TOKENIZER_FILE} in {folder}; the two files belong to different tokenizers"
            )


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    value: object = config.get("chat_template")
    if value is None:
        value = _read_json(folder / "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list) and all(_is_named_template(entry) for entry in value):
        templates.update((entry["name"], entry["template"]) for entry in value)
    elif value is not None:
        raise CheckpointError(
            f"the chat template in {folder} must be a string or a list of name and template, got {type(value).__name__}"
        )
    if path.is_file():
        templates["default"] = _read_text(path)
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = _read_text(extra)
    return templates


def _is_named_template(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
