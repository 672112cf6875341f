"""Sampling controls as a caller gives them: what each may be, checked and in one form. Host only."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np

from photon_jax.errors import RequestError, shown

MAX_LOGIT_BIAS = 300
MAX_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_VARIANTS = 2 * MAX_BAD_WORDS  # a string is two token sequences: with and without a space before it
MAX_BAD_WORD_TOKENS = 16
MAX_ID_DIGITS = 10  # of a token id in JSON

ProcessorFn = Callable[..., object]
BadWord = str | tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LogitsProcessor:
    """A pure function that changes the logits before each token, and the state that it begins with.

    The function is part of the compiled step: an engine compiles it when it first meets it, once for each size of
    step, and again for each set of functions that come together in one step. So make it once and use the same object
    for all requests; what differs between requests belongs into `init_state`.

    Attributes:
      fn: `(state, logits, token, position) -> (state, logits)` in JAX, for one sequence: logits f32[V] are the model's
        own; token i32[] is the last one of the sequence so far, of its prompt or of its output; position i32[] is the
        place that the token to sample will have. It runs once for each output token. NaN counts as -inf; where it
        leaves no token that the other controls allow, the token is chosen as if it had changed nothing.
      init_state: PyTree of arrays or numbers, the state before the first output token; each sample of each request
        has its own copy. The state keeps its structure, shapes and dtypes.
    """

    fn: ProcessorFn
    init_state: object = ()

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(getattr(self.fn, "__name__", repr(self.fn)))


class ProcessorFailure(Exception):
    """A processor raised while a step was traced; what it raised is the cause.

    Attributes:
      fn: of the processor.
    """

    def __init__(self, fn: ProcessorFn) -> None:
        super().__init__(fn)
        self.fn = fn


class TokenMatcher(Protocol):
    """Follows one sequence and says which tokens may come next.

    Attributes:
      mask: i32[ceil(V/32)], bit t % 32 of word t // 32 is 1 where token t may come next; never empty while one may.
      is_complete: whether the sequence may end here.
    """

    mask: np.ndarray
    is_complete: bool

    def consume(self, token_id: int) -> bool:
        """Takes the token that came; returns whether another one may follow."""


class TokenGrammar(Protocol):
    """Which token sequences a request may get; its samples share it."""

    def start(self) -> TokenMatcher:
        """Returns a matcher for one sequence."""


class Encoder(Protocol):
    """The part of a tokenizer that bad words need."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text."""


def is_int(value: object) -> bool:
    """Returns whether a value is an integer, of Python's or of NumPy's; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Returns whether a value is an integer or a float, NaN and infinities included."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_token_id(value: object) -> bool:
    return is_int(value) and value >= 0  # type: ignore[operator]


def as_logit_bias(value: object) -> dict[int, float] | None:
    """Returns logit_bias as a dictionary of its own, None when it is empty.

    Raises:
      RequestError: it is no mapping of at most 300 token ids to numbers in [-100, 100].
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {shown(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias holds {len(value)} token ids, at most {MAX_LOGIT_BIAS} are allowed; give fewer")
    for token_id, bias in value.items():
        if not _is_token_id(token_id):
            raise RequestError(f"logit_bias must have token ids of at least 0 as its keys, got {shown(token_id)}")
        if not (is_number(bias) and -MAX_BIAS <= bias <= MAX_BIAS):
            raise RequestError(
                f"logit_bias of token {token_id} must be a number in [{-MAX_BIAS:g}, {MAX_BIAS:g}], got {shown(bias)}; "
                "to leave tokens out use allowed_token_ids or bad_words"
            )
    return {int(token_id): float(bias) for token_id, bias in value.items()} or None


def logit_bias_from_json(value: object) -> object:
    """Returns a logit_bias read from JSON, whose keys are strings, with integers as keys; others are left alone."""
    if not isinstance(value, Mapping):
        return value
    return {int(key) if _is_id_text(key) else key: bias for key, bias in value.items()}


def _is_id_text(key: object) -> bool:
    """Returns whether a key is an integer in plain digits, not so many that Python would refuse to read them."""
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS


def _is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Returns whether a value can be gone through; an array without dimensions can't, and has __iter__ all the same."""
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def as_allowed_token_ids(value: object) -> tuple[int, ...] | None:
    """Returns allowed_token_ids in ascending order, each once.

    Raises:
      RequestError: it is no list of token ids, or an empty one.
    """
    if value is None:
        return None
    if isinstance(value, str) or not _is_iterable(value):
        raise RequestError(f"allowed_token_ids must be a list of token ids, got {shown(value)}")
    ids = tuple(value)
    wrong = [token_id for token_id in ids if not _is_token_id(token_id)]
    if wrong:
        raise RequestError(f"allowed_token_ids must be token ids of at least 0, got {shown(wrong[0])}")
    if not ids:
        raise RequestError("allowed_token_ids is empty, so no token could be sampled; leave it out to allow all")
    return tuple(sorted({int(token_id) for token_id in ids}))


def as_bad_words(value: object) -> tuple[BadWord, ...]:
    """Returns bad_words as strings and tuples of token ids.

    Raises:
      RequestError: it is no list of at most 64 non-empty strings and lists of 1 to 16 token ids.
    """
    if value is None:
        return ()
    if isinstance(value, str) or not _is_iterable(value):
        raise RequestError(f"bad_words must be a list of strings or of lists of token ids, got {shown(value)}")
    words = tuple(value)
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words holds {len(words)} words, at most {MAX_BAD_WORDS} are allowed; give fewer")
    return tuple(_as_bad_word(word) for word in words)


def _as_bad_word(word: object) -> BadWord:
    if isinstance(word, str):
        if not word.strip():
            raise RequestError(f"bad_words holds {shown(word)}, which has no character to look for; leave it out")
        return word
    ids = tuple(word) if _is_iterable(word) else ()
    if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS or not all(_is_token_id(token_id) for token_id in ids):
        raise RequestError(
            f"bad_words holds {shown(word)}; each must be a non-empty string or a list of 1 to {MAX_BAD_WORD_TOKENS} "
            "token ids of at least 0"
        )
    return tuple(int(token_id) for token_id in ids)


def as_logits_processor(value: object) -> LogitsProcessor | None:
    """Returns a logits_processor given as a function, or as one with its first state.

    Raises:
      RequestError: it is neither.
    """
    if value is None or (isinstance(value, LogitsProcessor) and _is_function(value.fn)):
        return value
    if _is_function(value):
        return LogitsProcessor(value)  # type: ignore[arg-type]
    raise RequestError(
        "logits_processor must be a hashable function (state, logits, token, position) -> (state, logits) or a "
        f"LogitsProcessor, got {shown(value)}"
    )


def _is_function(value: object) -> bool:
    return callable(value) and isinstance(value, Hashable)


def bad_word_ids(bad_words: Sequence[BadWord], tokenizer: Encoder | None) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences of bad words: of a string those with and without a space before it.

    Raises:
      RequestError: a string can't be tokenized, or has too many tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        if not isinstance(word, str):
            found[word] = None
            continue
        if tokenizer is None:
            raise RequestError(f"bad_words holds the string {word!r}, but there is no tokenizer; give its token ids")
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words: the bad word {word!r} is {len(ids)} tokens long, between 1 and {MAX_BAD_WORD_TOKENS} "
                    "are allowed; give a part of it"
                )
            found[ids] = None
    return tuple(found)


def check_a_token_is_left(
    allowed_token_ids: Sequence[int] | None,
    bad_words: Sequence[tuple[int, ...]],
    masked_stop_ids: Sequence[int],
    vocab_size: int,
) -> None:
    """Raises RequestError where the controls of a request rule every token out.

    Args:
      bad_words: token sequences; those of one token are never allowed.
      masked_stop_ids: ids that min_tokens rules out at first.
    """
    allowed = set(range(vocab_size) if allowed_token_ids is None else allowed_token_ids)
    allowed -= {word[0] for word in bad_words if len(word) == 1}
    if not allowed:
        raise RequestError("bad_words rule out each of allowed_token_ids, so no token could be sampled; allow more")
    if not allowed - set(masked_stop_ids):
        raise RequestError(
            "of allowed_token_ids only stop ids are left, which min_tokens rules out at first; allow more or lower it"
        )
