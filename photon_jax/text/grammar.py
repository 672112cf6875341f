"""Grammars: which tokens may come next so that the text gets the form that was asked for. Host only.

llguidance compiles the forms and walks through them, byte by byte: https://github.com/guidance-ai/llguidance
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Protocol

import llguidance
import numpy as np

from photon_jax.errors import RequestError
from photon_jax.structured_outputs import StructuredOutputs

NUM_COMPILED = 64  # forms that are kept compiled
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}  # not more in one place, or it may never end
_NO_TOKEN = "it leaves no token to begin a text with"
_MAX_FORCED_CHARS = 256
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)  # or an error would print its whole state, which takes long


class Vocabulary(Protocol):
    """The part of a tokenizer that grammars need."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the text; none for an id without a token."""

    def is_special(self, token_id: int) -> bool:
        """Returns whether the token is no part of the text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text."""


class Grammars:
    """Compiles structured outputs for one tokenizer, and keeps what it compiled; threads may share it."""

    def __init__(self, tokenizer: Vocabulary, *, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        """Prepares nothing yet: the first grammar does.

        Args:
          vocab_size: tokens that the model's logits are of.
          eos_token_ids: ids that end a sequence; they are no text, whatever the tokenizer says.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._compiled = functools.lru_cache(maxsize=NUM_COMPILED)(self._compile)

    def grammar(
        self,
        wanted: StructuredOutputs,
        *,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        banned_ids: Sequence[int] = (),
    ) -> "Grammar":
        """Returns the grammar of one request.

        Args:
          stop_ids: ids that end the sequence; besides where the form has them, they may come where the text may end.
          min_tokens: tokens before which they may not come.
          banned_ids: ids that may come only where nothing else may.

        Raises:
          RequestError: the form is not valid, too large, or leaves no token to begin with.
        """
        grammar = Grammar(
            state=self._compiled(wanted),
            tokens=_bits(range(self._vocab_size), self._vocab_size),
            stops=_bits(stop_ids, self._vocab_size),
            banned=_bits(banned_ids, self._vocab_size),
            min_tokens=min_tokens,
            num_words=self._vocab_size // 32 + 1,
        )
        if not grammar.start().is_open:
            raise _refusal(wanted, _NO_TOKEN)
        return grammar

    @functools.cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(_Words(self._tokenizer, self._vocab_size, self._eos_token_ids))  # type: ignore[arg-type]

    def _compile(self, wanted: StructuredOutputs) -> llguidance.LLMatcher:
        """Returns the state before the first token, which is never changed, only copied."""
        try:
            text = _grammar_text(wanted)
        except ValueError as error:
            raise _refusal(wanted, str(error)) from error
        state = llguidance.LLMatcher(self._tokens, text, log_level=0, limits=_LIMITS)
        state.compute_bitmask()  # copies have what it found out: all that is forced at the beginning
        if state.is_error():
            raise _refusal(wanted, state.get_error())
        return state


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Grammar:
    """A compiled form, with what else rules tokens out; the samples of one request share it.

    Attributes:
      state: before the first token.
      tokens: i32[ceil(V/32)], bit t % 32 of word t // 32 is 1 for each token t of the model, 0 past the last one.
      stops: i32[ceil(V/32)], likewise for the ids that end the sequence.
      banned: i32[ceil(V/32)], likewise for those that may come only where nothing else may.
      min_tokens: tokens before which stop ids may not come.
      num_words: of llguidance's masks, which have a bit for its own end of the text.
    """

    state: llguidance.LLMatcher
    tokens: np.ndarray
    stops: np.ndarray
    banned: np.ndarray
    min_tokens: int
    num_words: int

    def start(self) -> "GrammarMatcher":
        """Returns a matcher for one sequence."""
        return GrammarMatcher(self)


class GrammarMatcher:
    """Follows one sequence through its grammar.

    Attributes:
      mask: i32[ceil(V/32)], bit t % 32 of word t // 32 is 1 where token t may come next.
      is_open: whether a token may come next.
      is_complete: whether the text may end here.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._state = grammar.state.deep_copy()
        self._words = np.zeros(grammar.num_words, np.int32)
        self._num_tokens = 0
        self._look()

    def consume(self, token_id: int) -> bool:
        """Takes the next token, which the mask allows; returns whether another one may follow."""
        self._num_tokens += 1
        self._state.consume_token(token_id)
        self._look()
        return self.is_open

    def _look(self) -> None:
        """Finds out what may come next; a text to which nothing can be added is open to no stop id either."""
        grammar, state = self._grammar, self._state
        state.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        has_failed = state.is_error()  # no token fits, or a limit was met
        self.is_complete: bool = not has_failed and state.is_accepting()
        mask: np.ndarray = self._words[: len(grammar.tokens)] & grammar.tokens
        is_early = self._num_tokens < grammar.min_tokens
        if is_early:
            mask &= ~grammar.stops
        self.is_open: bool = not has_failed and bool(mask.any())
        if self.is_complete and not is_early:
            mask |= grammar.stops
        wanted = mask & ~grammar.banned
        self.mask: np.ndarray = wanted if wanted.any() else mask


class _Words:
    """The vocabulary in the form that LLTokenizer reads, with one more id for llguidance's own end of the text.

    So an end-of-sequence id is a special token like others: it comes where a grammar names it, or where we allow it.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.eos_token_id = vocab_size
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)] + [b""]
        special = {token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id)} | set(eos_token_ids)
        self.special_token_ids = [*sorted(special), vocab_size]
        self._tokenizer = tokenizer
        self._ids = {word: index for index, word in enumerate(self.tokens) if word and index not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens that make up exactly this text; llguidance forces them where only this text fits.

        They are the usual ones, unless those begin with a space that the text doesn't have, or hold a special token.
        """
        text = text[:_MAX_FORCED_CHARS]  # llguidance takes the first token and asks again, however much it forces
        ids, data = self._tokenizer.encode(text, add_special_tokens=False), text.encode()
        words = [self.tokens[token_id] if token_id < self.eos_token_id else b"" for token_id in ids]
        is_text = all(word in self._ids for word in words)
        return ids if is_text and b"".join(words) == data else self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        while data:
            sizes = range(min(len(data), self._longest), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                break  # bytes that no token has: the mask will be empty there
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def _bits(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns i32[ceil(V/32)], a set of token ids as bits."""
    words = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    words[np.asarray(tuple(token_ids), np.int64)] = True
    return np.packbits(words, bitorder="little").view(np.int32)


def _grammar_text(wanted: StructuredOutputs) -> str:
    """Returns a form as llguidance takes it.

    Raises:
      ValueError: it is not valid; not all that is wrong shows here.
    """
    if wanted.json is not None or wanted.json_object:
        schema = json.loads(str(wanted.json)) if wanted.json is not None else {"type": "object"}
        return llguidance.LLMatcher.grammar_from_json_schema({"x-guidance": JSON_OPTIONS} | schema)
    if wanted.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return "start: " + " | ".join(map(lark_string, wanted.choice))
    assert wanted.grammar is not None, "structured outputs without a form"
    return llguidance.grammar_from("grammar", wanted.grammar)


def lark_string(text: str) -> str:
    """Returns a text as a literal of a Lark grammar."""
    return json.dumps(text)


def _refusal(wanted: StructuredOutputs, reason: str) -> RequestError:
    reason = _NO_TOKEN if reason.startswith("NoExtensionBias") else reason.removesuffix("<non-verbose/>").strip()
    return RequestError(f"{wanted.kind} is not valid, or beyond what can be compiled: {reason[:1000]}")
