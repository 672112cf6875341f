"""Vocabulary pieces to bytes: what one token adds to the text, for the decoders that language models use."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from photon_jax.errors import CheckpointError


@functools.cache
def byte_level_alphabet() -> tuple[str, ...]:
    """Returns the printable character that stands for each byte in a byte-level vocabulary, by byte value.

    Bytes that print as themselves in Latin-1 stand for themselves; the other 68 take the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


@functools.cache
def _byte_of_character() -> Mapping[str, int]:
    return {character: byte for byte, character in enumerate(byte_level_alphabet())}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PieceDecoder:
    """How the pieces of one vocabulary become text.

    The bytes of all pieces are joined, read as UTF-8 with U+FFFD for what is not, and spaces at the very start are
    cut. So a piece's bytes do not depend on its neighbours, and text can be made one token at a time.

    Attributes:
      byte_level: whether each character of a piece stands for one byte.
      byte_fallback: whether a piece such as <0x0A> stands for that byte.
      replacements: strings of a piece and what they become, in order.
      num_stripped: how many spaces at the start of the text, at most, are cut.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped: int = 0

    def to_bytes(self, piece: str) -> bytes:
        """Returns the bytes that the piece adds to the text."""
        if self.byte_level:
            table = _byte_of_character()
            try:
                return bytes([table[character] for character in piece])
            except KeyError:  # an added token, written in plain text
                return piece.encode()
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            digits = piece[3:5]
            if all(digit in "0123456789abcdefABCDEF" for digit in digits):
                return bytes([int(digits, 16)])
        return piece.encode()


class TokenBytes(dict[int, bytes]):
    """What each token adds to the text, by id, found when it is first asked for; nothing for an id without a token."""

    def __init__(
        self,
        decoder: PieceDecoder,
        piece_of: Callable[[int], str | None],
        token_ids: range,
        *,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        """Begins empty.

        Args:
          piece_of: returns the vocabulary's piece of one of the token_ids.
          left_out: ids of tokens that add nothing.
        """
        super().__init__()
        self._decoder = decoder
        self._piece_of = piece_of
        self._token_ids = token_ids
        self._left_out = left_out

    def __missing__(self, token_id: int) -> bytes:
        piece = self._piece_of(token_id) if token_id in self._token_ids else None
        if piece is None or token_id in self._left_out:
            return b""
        return self.setdefault(token_id, self._decoder.to_bytes(piece))


def strip_start(text: str, num_stripped: int) -> tuple[str, int]:
    """Returns the text without its leading spaces, num_stripped at most, and how many may still be cut after it."""
    while num_stripped and text.startswith(" "):
        text, num_stripped = text[1:], num_stripped - 1
    return text, (0 if text else num_stripped)


def read_decoder(spec: Mapping[str, Any] | None) -> PieceDecoder:
    """Returns the decoder that the `decoder` entry of a tokenizer.json describes.

    Raises:
      CheckpointError: it is of a kind whose text can't be made one token at a time.
    """
    steps = [] if spec is None else list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]
    kinds = [str(step["type"]) for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceDecoder(byte_level=True)
    byte_fallback, num_stripped = False, 0
    replacements: list[tuple[str, str]] = []
    for index, (kind, step) in enumerate(zip(kinds, steps, strict=True)):
        fused = "Fuse" in kinds[:index]
        if kind == "Replace" and not (fused or byte_fallback) and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "Strip" and fused and step["content"] == " " and step["stop"] == 0:
            num_stripped = int(step["start"])
        elif kind != "Fuse":
            raise _unsupported(kinds)
    if "Fuse" not in kinds:
        raise _unsupported(kinds)
    return PieceDecoder(byte_fallback=byte_fallback, replacements=tuple(replacements), num_stripped=num_stripped)


def _unsupported(kinds: list[str]) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer's decoder is {' + '.join(kinds) or 'absent'}; supported are ByteLevel, and "
        "Replace + ByteFallback + Fuse + Strip of leading spaces"
    )
