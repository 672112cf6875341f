"""Writes a tokenizer's parts as the files of a checkpoint folder, which `read_tokenizer_folder` reads back."""

import json

from photon_jax.text.tokenizer_files import TOKENIZER_FILE
from photon_jax.text.tokenizer_parts import TokenizerParts


def tokenizer_files(parts: TokenizerParts) -> dict[str, bytes]:
    """Returns name -> content of tokenizer.json and tokenizer_config.json."""
    templates = parts.chat_templates
    config: dict[str, object] = dict(parts.special_tokens)
    if parts.add_bos is not None:
        config["add_bos_token"] = parts.add_bos
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return {
        TOKENIZER_FILE: parts.backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }
