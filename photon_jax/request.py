"""What a caller asks: sampling parameters and requests. Host only."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

from photon_jax.controls import (
    BadWord,
    LogitsProcessor,
    ProcessorFn,
    TokenGrammar,
    as_allowed_token_ids,
    as_bad_words,
    as_logit_bias,
    as_logits_processor,
    is_int,
    is_number,
)
from photon_jax.errors import RequestError, shown
from photon_jax.structured_outputs import StructuredOutputs, as_structured_outputs

MAX_STOP_IDS = 32
MAX_STOP_STRINGS = 64
MAX_SAMPLES = 256
MAX_LOGPROBS = 20
MIN_TEMPERATURE = 2.0**-126  # the least normal number of float32; a device may take smaller ones for 0
MIN_REPETITION_PENALTY = 1e-6  # a logit divided by much less is beyond float32
CODE_FIELDS = frozenset({"logits_processor"})  # of SamplingParams: no flag and no file can give them

LogprobsKind = Literal["raw", "tempered", "sampling"]


_NEUTRAL: dict[str, object] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    A field left at None takes the checkpoint's generation_config value (when the engine reads it), else the neutral
    default; the values used come back on the RequestOutput.

    A step changes the logits in this order: logits_processor; repetition_penalty; frequency_penalty and
    presence_penalty; logit_bias; bad_words, allowed_token_ids and structured_outputs, whose tokens are ruled out
    whatever their bias; stop ids before min_tokens; temperature; top_k, of the rest top_p, of the rest min_p. Greedy
    decoding takes the best token before the temperature. Which tokens count for a penalty depends on the request's own
    prompt and output alone, not on how they were computed: in chunks, again after a preemption, or not at all for the
    prefix cache.

    Attributes:
      n: samples to draw of the prompt; sample i has its own noise. With the prefix cache they share its full blocks.
      temperature: logits are divided by it; 0 is greedy. Default 1.
      top_p: keep the fewest most likely tokens whose probability together reaches it, in (0, 1]. Default 1.
      top_k: keep the k most likely tokens (ties with the k-th are kept); 0 keeps all. Default 0.
      min_p: keep tokens at least this likely relative to the likeliest, in [0, 1]. Default 0.
      repetition_penalty: of tokens that the prompt or the output holds, positive logits are divided by it and negative
        ones multiplied (Keskar et al., 2019: "CTRL"), in [1e-6, 1e6]; above 1 discourages them. Default 1.
      presence_penalty: taken from the logit of each token that the output holds, in [-2, 2]. Default 0.
      frequency_penalty: taken from a token's logit once for each time that the output holds it, in [-2, 2]. Default 0.
      logit_bias: token id -> number in [-100, 100] added to its logit, 300 at most.
      allowed_token_ids: the only ids that may be sampled; None allows all. Stop ids that are not among them never come.
      bad_words: strings, or lists of up to 16 token ids, that the output must not hold, 64 at most. A string stands
        for its tokens with and without a space before it. Of several tokens the last one is ruled out where the output
        ends with those before it; where that would leave no token at all, it is allowed.
      logits_processor: a function `(state, logits, token, position) -> (state, logits)`, or a LogitsProcessor that
        holds one with its first state.
      structured_outputs: the form that the text must have, see StructuredOutputs, or its fields as a dictionary; not
        together with allowed_token_ids. It comes before min_tokens and bad_words: where the form leaves only bad
        words, they are allowed, and where nothing can follow, the answer ends.
      max_tokens: output tokens at most. Default: the rest of the context.
      min_tokens: stop ids are masked and stop strings ignored before this many output tokens.
      stop: strings that end the output when they appear in its text; a string or several.
      stop_token_ids: ids that end the output, besides the model's own end-of-sequence ids.
      ignore_eos: whether the model's end-of-sequence ids are ordinary tokens; stop_token_ids still end it.
      include_stop_str_in_output: whether the stop string stays at the end of the text.
      skip_special_tokens: whether special tokens are left out of the text.
      seed: same prompt, same seed, same tokens, in any company; None draws one from the engine's key and the request.
      logprobs: None for no log-probabilities, 0 for those of the sampled tokens, k for those of the k most likely
        tokens at each place as well, 20 at most.
      prompt_logprobs: the same for the prompt's own tokens after the first; always of the model's own distribution.
      logprobs_kind: the distribution whose most likely tokens `logprobs` gives; see TokenLogprobs.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[BadWord, ...] | list[BadWord] = ()
    logits_processor: LogitsProcessor | ProcessorFn | None = None
    structured_outputs: StructuredOutputs | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_kind: LogprobsKind = "raw"

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        stop = _as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        for name in ("n", "min_tokens"):
            if getattr(self, name) is None:
                raise RequestError(f"{name} must be an integer, got None; leave it out for its default")
        if len(stop) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop must be at most {MAX_STOP_STRINGS} non-empty strings, got {shown(self.stop)}")
        self._check_int("n", 1, MAX_SAMPLES)
        self._check_int("top_k", 0, 2**31 - 1)
        self._check_int("max_tokens", 1, 2**31 - 1)
        self._check_int("min_tokens", 0, 2**31 - 1)
        self._check_int("seed", -(2**63), 2**64 - 1)
        self._check_int("logprobs", 0, MAX_LOGPROBS)
        self._check_int("prompt_logprobs", 0, MAX_LOGPROBS)
        if not isinstance(self.logprobs_kind, str) or self.logprobs_kind not in get_args(LogprobsKind):
            raise RequestError(
                f"logprobs_kind must be one of {', '.join(get_args(LogprobsKind))}, got {shown(self.logprobs_kind)}"
            )
        self._check_float("temperature", 0.0, 1e6)
        if self.temperature is not None and 0.0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0, which is greedy, or at least {MIN_TEMPERATURE:.2g}, got {self.temperature!r}"
            )
        self._check_float("top_p", 0.0, 1.0)
        self._check_float("min_p", 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0, got 0; for greedy decoding set temperature=0")
        self._check_controls()
        if not all(is_int(t) and t >= 0 for t in self.stop_token_ids):
            raise RequestError(f"stop_token_ids must be token ids of at least 0, got {shown(self.stop_token_ids)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); lower it")

    def _check_controls(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) is None:
                raise RequestError(f"{name} must be a number, got None; leave it out for its default")
            self._check_float(name, -2.0, 2.0)
        self._check_float("repetition_penalty", 0.0, 1e6)
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty must be above 0, got 0; 1 leaves repetitions alone")
        self._check_float("repetition_penalty", MIN_REPETITION_PENALTY, 1e6)
        object.__setattr__(self, "logit_bias", as_logit_bias(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", as_allowed_token_ids(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", as_bad_words(self.bad_words))
        object.__setattr__(self, "logits_processor", as_logits_processor(self.logits_processor))
        object.__setattr__(self, "structured_outputs", as_structured_outputs(self.structured_outputs))
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            raise RequestError("structured_outputs and allowed_token_ids can't be combined; leave one of them out")

    @property
    def processor(self) -> LogitsProcessor | None:
        """The logits_processor with its first state."""
        assert self.logits_processor is None or isinstance(self.logits_processor, LogitsProcessor)
        return self.logits_processor

    def _check_int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is not None and not (is_int(value) and low <= value <= high):
            raise RequestError(f"{name} must be an integer in [{low}, {high}], got {shown(value)}")

    def _check_float(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not (is_number(value) and low <= value <= high):  # which NaN and infinities fail too
            raise RequestError(f"{name} must be a finite number in [{low}, {high}], got {shown(value)}")

    def resolve(self, defaults: Mapping[str, object]) -> "SamplingParams":
        """Returns the params with each None sampling field taken from `defaults`, else its neutral value.

        Args:
          defaults: values of temperature, top_p, top_k, min_p and repetition_penalty that a generation_config gave;
            others are ignored.
        """
        filled = {
            name: defaults.get(name, neutral) for name, neutral in _NEUTRAL.items() if getattr(self, name) is None
        }
        return dataclasses.replace(self, **filled) if filled else self  # type: ignore[arg-type]


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    """Returns the items of a list of stops; None is none of them."""
    if value is None:
        return ()
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError as error:  # an array without dimensions has __iter__ too, and refuses here
        raise RequestError(f"{name} must be a list, got {shown(value)}") from error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence for the engine to run; the engine sees token ids, never text.

    Attributes:
      request_id: unique among the engine's live requests.
      prompt_token_ids: at least one id.
      params: resolved, with max_tokens set.
      stop_token_ids: every id that ends the sequence: the user's, and the model's unless ignore_eos.
      seed: two 32-bit words of the seed in use.
      sample_index: which of the n samples of its prompt this is.
      score: whether log-probabilities of the prompt's own tokens are all that is asked for (max_tokens is ignored).
      bad_word_ids: the token sequences that its bad_words stand for.
      grammar: what its structured_outputs were compiled to.
      score_start: the first of the prompt's tokens that is scored, where any are; those before it are its context.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    seed: tuple[int, int] = (0, 0)
    sample_index: int = 0
    score: bool = False
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: TokenGrammar | None = None
    score_start: int = 1

    @property
    def has_controls(self) -> bool:
        """Whether its logits are changed before they are sampled, by more than temperature and filters."""
        params = self.params
        changes = (params.presence_penalty, params.frequency_penalty, params.logit_bias, params.logits_processor)
        is_masked = params.allowed_token_ids is not None or bool(self.bad_word_ids) or self.grammar is not None
        return not self.score and (any(changes) or is_masked or params.repetition_penalty not in (None, 1.0))

    @property
    def wants_top(self) -> bool:
        """Whether more than the likeliest token is asked for in the places of its output."""
        return (self.params.logprobs or 0) > 1

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of the prompt's own tokens are asked for, alone or beside an output."""
        return self.score or self.params.prompt_logprobs is not None

    @property
    def score_positions(self) -> range:
        """Positions at which the prompt's next token is scored."""
        return range(self.score_start - 1, len(self.prompt_token_ids) - 1) if self.wants_scores else range(0)
