"""Detokenizer: token ids to text as they come, never a part of a character. Host only."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from photon_jax.text.pieces import strip_start


class TokenTexts(Protocol):
    """What the detokenizer asks of a tokenizer."""

    @property
    def num_stripped(self) -> int:
        """How many spaces at the start of a decoded text are cut, at most."""

    def joined_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> bytes:
        """Returns the bytes that the tokens add to the text, special ones left out where they are skipped."""


class Detokenizer:
    """The text of one sequence as it grows.

    The pieces that `push` and the one `flush` return, joined, are what the tokenizer's `decode` returns for all the
    ids at once. Each call costs as much as its own tokens, whatever came before.
    """

    def __init__(self, tokenizer: TokenTexts, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._num_stripped = tokenizer.num_stripped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the characters that the tokens complete; the bytes of an incomplete one wait for the next token."""
        added = self._tokenizer.joined_bytes(token_ids, skip_special_tokens=self._skip_special_tokens)
        return self._strip(self._utf8.decode(added))

    def save(self) -> tuple[int, tuple[bytes, int]]:
        """Returns what `restore` takes to go back here."""
        return self._num_stripped, self._utf8.getstate()

    def restore(self, saved: tuple[int, tuple[bytes, int]]) -> None:
        """Forgets what was pushed since."""
        self._num_stripped, state = saved
        self._utf8.setstate(state)

    def flush(self) -> str:
        """Returns what the end of the sequence adds: U+FFFD for an incomplete character; empty from then on."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._num_stripped:
            text, self._num_stripped = strip_start(text, self._num_stripped)
        return text
