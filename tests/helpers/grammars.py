"""Random JSON schemas, and random walks through a grammar without a model."""

import random
from collections.abc import Iterable

import numpy as np

from photon_jax.controls import TokenMatcher

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
WORDS = ("name", "age", "city", "id", "tags", "score", "isOpen", "näme", "first name", "größe")


def mask_ids(mask: np.ndarray) -> set[int]:
    """Returns the token ids whose bits are 1."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def mask_of(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns i32[ceil(V/32)] with the bits of the ids, written with Python's integers."""
    number = sum(1 << token_id for token_id in set(ids))
    return np.frombuffer(number.to_bytes(4 * -(-vocab_size // 32), "little"), np.int32)


def walk(
    matcher: TokenMatcher, rng: random.Random, *, stop_ids: Iterable[int] = (), max_tokens: int = 400
) -> tuple[list[int], bool]:
    """Returns tokens drawn evenly from the masks, without a stop id at their end, and whether the text is complete."""
    ids: list[int] = []
    for _ in range(max_tokens):
        token_id = rng.choice(sorted(mask_ids(matcher.mask)))
        if token_id in stop_ids:
            return ids, matcher.is_complete
        ids.append(token_id)
        if not matcher.consume(token_id):
            return ids, matcher.is_complete
    return ids, False


def random_schema(rng: random.Random, *, depth: int = 3, is_bounded: bool = True) -> dict[str, object]:
    """Returns a JSON schema of an object; bounded ones have no text or list of any length."""
    schema = _object(rng, depth, is_bounded)
    if rng.random() < 0.3:
        properties = schema["properties"]
        assert isinstance(properties, dict)
        schema["$defs"] = {"part": _object(rng, 1, is_bounded)}
        properties["part"] = {"$ref": "#/$defs/part"}
    return schema


def _object(rng: random.Random, depth: int, is_bounded: bool) -> dict[str, object]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1, is_bounded) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int, is_bounded: bool) -> dict[str, object]:
    kinds = [_text, _text, _integer, _number, _choice, lambda *_: {"type": rng.choice(["boolean", "null"])}]
    if depth > 0:
        kinds += [_list, _object, _either]
    return rng.choice(kinds)(rng, depth, is_bounded)


def _text(rng: random.Random, depth: int, is_bounded: bool) -> dict[str, object]:
    limits: dict[str, object] = {"maxLength": rng.randint(1, 12)}
    forms = [limits, {"pattern": "^[A-Z][a-z]{1,6}$"}, {"format": rng.choice(["date", "uuid", "ipv4"])}]
    return {"type": "string"} | (rng.choice(forms) if is_bounded or rng.random() < 0.5 else {})


def _integer(rng: random.Random, depth: int, is_bounded: bool) -> dict[str, object]:
    low = rng.randint(-200, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random, depth: int, is_bounded: bool) -> dict[str, object]:
    return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.randint(1, 90)}


def _choice(rng: random.Random, depth: int, is_bounded: bool) -> dict[str, object]:
    values = ["red", "grün", 'a "b" \\c', "", 3, -1.5, True, None]
    return {"enum": rng.sample(values, rng.randint(1, 4))} if rng.random() < 0.8 else {"const": rng.choice(values)}


def _list(rng: random.Random, depth: int, is_bounded: bool) -> dict[str, object]:
    least = rng.randint(0, 2)
    limits = {"minItems": least, "maxItems": least + rng.randint(0, 2)}
    items = _value(rng, depth - 1, is_bounded)
    return {"type": "array", "items": items} | (limits if is_bounded or rng.random() < 0.5 else {})


def _either(rng: random.Random, depth: int, is_bounded: bool) -> dict[str, object]:
    return {"anyOf": [_value(rng, depth - 1, is_bounded) for _ in range(2)]}
