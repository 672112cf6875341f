"""Detokenizer: token ids to text one token at a time, never a part of a character. Host only."""

import codecs
from typing import Protocol

from photon_jax.text.pieces import strip_start


class TokenTexts(Protocol):
    """What the detokenizer asks of a tokenizer."""

    @property
    def num_stripped(self) -> int:
        """How many spaces at the start of a decoded text are cut, at most."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the text; none for an id without a token."""

    def is_special(self, token_id: int) -> bool:
        """Returns whether the token is left out of the text when special tokens are skipped."""


class Detokenizer:
    """The text of one sequence as it grows.

    The pieces that `push` and the one `flush` return, joined, are what the tokenizer's `decode` returns for all the
    ids at once. Each call costs as much as its own token, whatever came before.
    """

    def __init__(self, tokenizer: TokenTexts, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._num_stripped = tokenizer.num_stripped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Returns the characters that the token completes; the bytes of an incomplete one wait for the next token."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._strip(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """Returns what the end of the sequence adds: U+FFFD for an incomplete character; empty from then on."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._num_stripped:
            text, self._num_stripped = strip_start(text, self._num_stripped)
        return text
