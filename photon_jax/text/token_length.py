"""How much text a token can stand for, from the rules of a tokenizer. Host only."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import models

MAX_COMPOSED = 4  # characters that Unicode's composed forms make one of, at most (UAX #15): U+1F82 is the longest
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Punctuation")  # pre-tokenizers that drop no character


def max_token_chars(backend: tokenizers.Tokenizer) -> int | None:
    """Returns the most characters of a text that one token can stand for; None where some may stand for none at all.

    A text of more characters than so many for each of n tokens has more than n tokens, whatever they are. That is only
    certain of byte pairs over all bytes, where nothing drops characters: neither a normalizer, nor a pre-tokenizer that
    drops spaces, nor an added token that strips those beside it, nor a truncation.
    """
    covers_all = isinstance(backend.model, models.BPE) and (backend.model.byte_fallback or _has_bytes(backend))
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    factor = _shrinks(_state(backend.normalizer))
    is_sure = covers_all and not strips and backend.truncation is None and _keeps(_state(backend.pre_tokenizer))
    if not is_sure or factor is None:
        return None
    return factor * max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)


def _state(part: Any) -> Mapping[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _has_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Returns whether each byte has a token, in the alphabet that byte-level vocabularies write them in."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return "ByteLevel" in str(_state(backend.pre_tokenizer)) and all(
        backend.token_to_id(char) is not None for char in alphabet
    )


def _keeps(part: Mapping[str, Any] | None) -> bool:
    """Returns whether a pre-tokenizer keeps every character."""
    if part is None:
        return True
    if part["type"] == "Sequence":
        return all(_keeps(each) for each in part["pretokenizers"])
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    return part["type"] in _KEEPING and part.get("behavior") != "Removed"


def _shrinks(part: Mapping[str, Any] | None) -> int | None:
    """Returns how many characters a normalizer can make one of; None where it may drop them."""
    if part is None or part["type"] in ("Prepend", "NFD", "NFKD"):
        return 1
    if part["type"] in ("NFC", "NFKC"):
        return MAX_COMPOSED
    if part["type"] == "Replace" and "String" in part["pattern"] and part["content"]:
        return max(1, len(part["pattern"]["String"]))
    if part["type"] != "Sequence":
        return None
    factor = 1
    for each in part["normalizers"]:
        inner = _shrinks(each)
        if inner is None:
            return None
        factor *= inner
    return factor
