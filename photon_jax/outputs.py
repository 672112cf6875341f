"""What comes back: token deltas from the engine, outputs for the caller. Host only."""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np

from photon_jax.request import SamplingParams


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's own tokens, one entry for each token that is scored.

    Attributes:
      logprobs: f32[n], of the model's own distribution, given the tokens before.
      is_greedy: bool[n], whether the token was the argmax (ties: the lowest id).
      top_ids: i32[n k], the k most likely tokens in its place, the likeliest first (ties: the lowest id first).
      top_logprobs: f32[n k], theirs.
    """

    logprobs: np.ndarray
    is_greedy: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class TokenDelta(NamedTuple):
    """What one step, or several in one dispatch, added to a request.

    Attributes:
      new_token_ids: one id of each step; empty on an abort and for a score request.
      logprobs: f32[len(new_token_ids) 3]: raw, after temperature, of the sampling distribution.
      top_ids, top_logprobs: i32 and f32[len(new_token_ids) k], when the request asks for the k most likely tokens.
      scores: of the prompt's tokens, with the first new token, or when a score request finishes.
      num_cached_tokens: prompt tokens that the prefix cache held when the request was first admitted.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: np.ndarray
    finish_reason: FinishReason | None
    stop_token_id: int | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    scores: PromptLogprobs | None = None
    num_cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the sampled tokens, one per output token; the arrays of an output are read-only.

    Attributes:
      raw: f32[n], of the model's own distribution, softmax(logits).
      tempered: f32[n], after the temperature, softmax(logits / temperature); equals raw for greedy requests.
      sampling: f32[n], of the distribution that was sampled: after processor, penalties, bias, masks, temperature,
        top_k, top_p and min_p; 0 for greedy requests.
      top_ids: i32[n k], the k most likely tokens in each place, the likeliest first (ties: the lowest id first).
      top_logprobs: f32[n k], theirs, of the kind that logprobs_kind names; -inf for tokens that it rules out.
    """

    raw: np.ndarray
    tempered: np.ndarray
    sampling: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
      finish_reason: "stop", "length" or "abort"; None while it streams.
      stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence id or another reason.
      cumulative_logprob: sum of the raw log-probabilities.
      weights_version: of the weights that made all its tokens, see `LLM.update_params`; None before the first.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None
    cumulative_logprob: float
    finish_reason: str | None
    stop_reason: int | str | None
    weights_version: int | None = None


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
      prompt_logprobs: of the prompt's tokens after the first; None when not asked for, or not computed yet.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    sampling_params: SamplingParams
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: PromptLogprobs | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOutput:
    """Log-probabilities of a continuation given its prompt, or of a prompt's own tokens after the first.

    Attributes:
      prompt_token_ids: the prompt; without a continuation the scored tokens are its own.
      token_ids: the tokens that were scored.
      logprobs: f32[len(token_ids)], raw log-probability of each, given the tokens before.
      is_greedy: bool[len(token_ids)], whether it was the argmax (ties: the lowest id).
      weights_version: of the weights that scored them, see `LLM.update_params`.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    is_greedy: np.ndarray
    weights_version: int | None = None

    @property
    def sum(self) -> float:
        """Log-probability of all scored tokens together, added in float64."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def is_all_greedy(self) -> bool:
        """Whether greedy decoding gives exactly the scored tokens."""
        return bool(self.is_greedy.all())
