"""Checks of a request body before it is parsed: what is no plain JSON, or has no bounds, is refused."""

import re

import numpy as np

MAX_DEPTH = 128
MAX_VALUES = 1_000_000
MAX_NUMBER_LENGTH = 64

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_LONG_NUMBER = re.compile(rb"(?<![0-9.eE+-])[0-9.eE+-]{%d}" % (MAX_NUMBER_LENGTH + 1))
_NO_NUMBER = re.compile(rb"NaN|Infinity")
_NOT_BRACKETS = bytes(range(256)).translate(None, b"[]{}")


def check_json(body: bytes) -> None:
    """Raises ValueError for a body that no JSON parser should be given; one that passes may still be no JSON.

    Python's parser takes NaN and other encodings than UTF-8, recurses, and makes 20 times the body's memory of it when
    that is a list of empty lists. The time taken here is linear in the length.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from error
    too_many = f"the body holds more than {MAX_VALUES:,} values"
    if body.count(b'"') > 2 * MAX_VALUES:
        raise ValueError(too_many)
    bare = _STRING.sub(b"", body)
    num_opens = bare.count(b"[") + bare.count(b"{")
    if bare.count(b",") + num_opens > MAX_VALUES:
        raise ValueError(too_many)
    if _NO_NUMBER.search(bare):
        raise ValueError("the body is not JSON: it holds NaN or Infinity")
    if _LONG_NUMBER.search(bare):
        raise ValueError(f"the body holds a number of more than {MAX_NUMBER_LENGTH} characters")
    if num_opens > MAX_DEPTH and _depth(bare) > MAX_DEPTH:
        raise ValueError(f"the body nests more than {MAX_DEPTH} lists and objects into each other")


def _depth(bare: bytes) -> int:
    """Returns how many lists and objects nest into each other, in JSON without its strings."""
    brackets = np.frombuffer(bare.translate(None, _NOT_BRACKETS), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.cumsum(np.where(opens, 1, -1)).max())
