"""What a caller asks and what comes back: sampling parameters, requests, outputs. Host only."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping

import numpy as np

from photon_jax.errors import RequestError

MAX_STOP_IDS = 32
MAX_STOP_STRINGS = 64
MAX_SAMPLES = 256


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


_NEUTRAL: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    A field left at None takes the checkpoint's generation_config value (when the engine reads it), else the neutral
    default; the values used come back on the RequestOutput.

    Attributes:
      n: samples to draw of the prompt; sample i has its own noise.
      temperature: logits are divided by it; 0 is greedy. Default 1.
      top_p: keep the fewest most likely tokens whose probability together reaches it, in (0, 1]. Default 1.
      top_k: keep the k most likely tokens (ties with the k-th are kept); 0 keeps all. Default 0.
      min_p: keep tokens at least this likely relative to the likeliest, in [0, 1]. Default 0.
      max_tokens: output tokens at most. Default: the rest of the context.
      min_tokens: stop ids are masked and stop strings ignored before this many output tokens.
      stop: strings that end the output when they appear in its text; a string or several.
      stop_token_ids: ids that end the output, besides the model's own end-of-sequence ids.
      ignore_eos: whether the model's end-of-sequence ids are ordinary tokens; stop_token_ids still end it.
      include_stop_str_in_output: whether the stop string stays at the end of the text.
      skip_special_tokens: whether special tokens are left out of the text.
      seed: same prompt, same seed, same tokens, in any company; None draws one from the engine's key and the request.
      logprobs: None for no log-probabilities, 0 for those of the sampled tokens.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = _as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        for name in ("n", "min_tokens"):
            if getattr(self, name) is None:
                raise RequestError(f"{name} must be an integer, got None; leave it out for its default")
        if len(stop) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop must be at most {MAX_STOP_STRINGS} non-empty strings, got {self.stop!r}")
        self._check_int("n", 1, MAX_SAMPLES)
        self._check_int("top_k", 0, 2**31 - 1)
        self._check_int("max_tokens", 1, 2**31 - 1)
        self._check_int("min_tokens", 0, 2**31 - 1)
        self._check_int("seed", -(2**63), 2**64 - 1)
        self._check_int("logprobs", 0, 0)
        self._check_float("temperature", 0.0, 1e6)
        self._check_float("top_p", 0.0, 1.0)
        self._check_float("min_p", 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0, got 0; for greedy decoding set temperature=0")
        if not all(_is_int(t) and t >= 0 for t in self.stop_token_ids):
            raise RequestError(f"stop_token_ids must be token ids of at least 0, got {self.stop_token_ids!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}); lower it")

    def _check_int(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is not None and not (_is_int(value) and low <= value <= high):
            raise RequestError(f"{name} must be an integer in [{low}, {high}], got {value!r}")

    def _check_float(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is None:
            return
        is_number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
        if not (is_number and low <= value <= high):  # which NaN and infinities fail too
            raise RequestError(f"{name} must be a finite number in [{low}, {high}], got {value!r}")

    def resolve(self, defaults: Mapping[str, object]) -> "SamplingParams":
        """Returns the params with each None sampling field taken from `defaults`, else its neutral value.

        Args:
          defaults: values of temperature, top_p, top_k, min_p that a generation_config gave; others are ignored.
        """
        filled = {
            name: defaults.get(name, neutral) for name, neutral in _NEUTRAL.items() if getattr(self, name) is None
        }
        return dataclasses.replace(self, **filled)  # type: ignore[arg-type]


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    """Returns the items of a list of stops; None is none of them."""
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list, got {value!r}")
    return tuple(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


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
      score: whether log-probabilities of the prompt's own tokens are asked for (max_tokens is then 1 and ignored).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    seed: tuple[int, int] = (0, 0)
    sample_index: int = 0
    score: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenDelta:
    """What one step added to a request.

    Attributes:
      new_token_ids: at most one id a step for now; empty on an abort and for a score request.
      logprobs: f32[len(new_token_ids) 3]: raw, after temperature, of the sampling distribution.
      prompt_logprobs: f32[num_prompt - 1] and bool[num_prompt - 1] is-greedy, when a score request finishes.
      num_cached_tokens: prompt tokens that the prefix cache held when the request was first admitted.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: np.ndarray
    finish_reason: FinishReason | None
    stop_token_id: int | None = None
    prompt_logprobs: np.ndarray | None = None
    prompt_is_greedy: np.ndarray | None = None
    num_cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the sampled tokens, one per output token.

    Attributes:
      raw: f32[n], of the model's own distribution, softmax(logits).
      tempered: f32[n], after the temperature, softmax(logits / temperature); equals raw for greedy requests.
      sampling: f32[n], of the distribution that was sampled: after stop-id masking, temperature, top_k, top_p and
        min_p; 0 for greedy requests.
    """

    raw: np.ndarray
    tempered: np.ndarray
    sampling: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
      finish_reason: "stop", "length" or "abort"; None while it streams.
      stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence id or another reason.
      cumulative_logprob: sum of the raw log-probabilities.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None
    cumulative_logprob: float
    finish_reason: str | None
    stop_reason: int | str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Times of one request, seconds.

    Attributes:
      queue_s: from submission to the first step that computed it.
      time_to_first_token_s: from submission.
      total_s: from submission to its end.
      num_preemptions: times its blocks were taken away.
    """

    queue_s: float
    time_to_first_token_s: float | None
    total_s: float
    num_preemptions: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What came of one prompt.

    Attributes:
      prompt: the text given, None when ids were.
      sampling_params: the values used, defaults resolved.
      num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    sampling_params: SamplingParams
    num_cached_tokens: int
    metrics: RequestMetrics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOutput:
    """Log-probabilities of a prompt's own tokens.

    Attributes:
      logprobs: f32[len(prompt_token_ids) - 1], raw log-probability of each token after the first, given those before.
      is_greedy: bool[len(prompt_token_ids) - 1], whether that token was the argmax (ties: the lowest id).
    """

    prompt_token_ids: tuple[int, ...]
    logprobs: np.ndarray
    is_greedy: np.ndarray
