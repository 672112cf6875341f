"""Submission: a prompt that was submitted, and all that has come of it so far. Host only."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from photon_jax.outputs import (
    CompletionOutput,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
    TokenLogprobs,
)
from photon_jax.request import Request, SamplingParams
from photon_jax.text.stream import TextStream


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt as token ids, with the text that they were made of, if any.

    Attributes:
      score_start: where a continuation begins that is to be scored; None to score all tokens after the first.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    score_start: int | None = None


class SamplePart(NamedTuple):
    """What one step added to a sample; the last part alone has a finish_reason."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: np.ndarray  # f32[n 3]  raw, after temperature, of the sampling distribution
    top_ids: np.ndarray | None  # i32[n k]
    top_logprobs: np.ndarray | None  # f32[n k]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Rows:
    """Rows as one array that grows: what is there is not copied each time that some are added."""

    def __init__(self, width: int, dtype: type[np.generic]) -> None:
        self._rows = np.zeros((0, width), dtype)
        self._num_rows = 0

    def extend(self, parts: Sequence[np.ndarray | None]) -> np.ndarray:
        """Adds the rows of the parts; returns all rows so far, not to be written to."""
        added = [part for part in parts if part is not None]
        begin, end = self._num_rows, self._num_rows + sum(map(len, added))
        if end > len(self._rows):
            rows = np.zeros((max(end, 2 * begin), self._rows.shape[1]), self._rows.dtype)
            rows[:begin] = self._rows[:begin]
            self._rows = rows
        if added:
            np.concatenate(added, out=self._rows[begin:end])
        self._num_rows = end
        view = self._rows[:end]
        view.flags.writeable = False
        return view


class _Joined:
    """The parts of a sample put together, as far as it was asked for them."""

    def __init__(self, num_top: int) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self._num_parts = 0
        self._logprobs = _Rows(3, np.float32)
        self._top_ids, self._top_logprobs = _Rows(num_top, np.int32), _Rows(num_top, np.float32)

    def extend(self, parts: list[SamplePart]) -> TokenLogprobs:
        """Adds the parts that are new in the list of all; returns the log-probabilities so far."""
        new = parts[self._num_parts :]
        self._num_parts += len(new)
        for part in new:
            self.token_ids += part.token_ids
        self.text += "".join([part.text for part in new])
        return as_token_logprobs(
            self._logprobs.extend([part.logprobs for part in new]),
            self._top_ids.extend([part.top_ids for part in new]),
            self._top_logprobs.extend([part.top_logprobs for part in new]),
        )


def as_token_logprobs(
    table: np.ndarray,  # f32[n 3]
    top_ids: np.ndarray,  # i32[n k], or without rows where k is 0
    top_logprobs: np.ndarray,  # f32[n k], likewise
) -> TokenLogprobs:
    """Returns the log-probabilities of n tokens by kind."""
    shape = (len(table), top_ids.shape[1])
    return TokenLogprobs(
        raw=table[:, 0],
        tempered=table[:, 1],
        sampling=table[:, 2],
        top_ids=top_ids.reshape(shape),
        top_logprobs=top_logprobs.reshape(shape),
    )


@dataclasses.dataclass(eq=False, slots=True)
class Sample:
    """One sequence of a submission as far as it has come.

    Attributes:
      parts: what came, step by step. It is only ever appended to, by whoever runs the steps, so other threads may read
        it meanwhile.
      num_tokens: of all parts together.
      last_token_at: when the last token came, seconds of `time.perf_counter`.
      finish_reason: set after the last part was appended.
    """

    request: Request
    stream: TextStream
    parts: list[SamplePart] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    last_token_at: float | None = None
    finish_reason: str | None = None
    scores: PromptLogprobs | None = None
    num_preemptions: int = 0
    weights_version: int | None = None
    _joined: _Joined = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._joined = _Joined(self.request.params.logprobs or 0)

    def append(self, part: SamplePart) -> None:
        """Adds what a step brought."""
        self.parts.append(part)
        self.num_tokens += len(part.token_ids)
        self.finish_reason = part.finish_reason

    def completion(self) -> CompletionOutput:
        """Returns what has come so far; one thread at a time may ask."""
        parts = list(self.parts)
        logprobs = self._joined.extend(parts)
        return CompletionOutput(
            index=self.request.sample_index,
            text=self._joined.text,
            token_ids=tuple(self._joined.token_ids),
            logprobs=None if self.request.params.logprobs is None else logprobs,
            cumulative_logprob=float(logprobs.raw.sum(dtype=np.float64)),
            finish_reason=parts[-1].finish_reason if parts else None,
            stop_reason=parts[-1].stop_reason if parts else None,
            weights_version=self.weights_version,
        )


@dataclasses.dataclass(eq=False, slots=True)
class Submission:
    """A prompt that was submitted: its samples, and when what happened (seconds of `time.perf_counter`).

    Attributes:
      ended_at: when the last sample ended that has ended so far.
      num_computed_tokens: the prompt's tokens that are computed, or will be by steps on their way.
      on_change: called whenever more of it is there, in the thread that runs the step.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    samples: list[Sample]
    submitted_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    on_change: Callable[[], None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all samples so far."""
        return sum(sample.num_tokens for sample in self.samples)

    def note_progress(self, num_computed_tokens: int) -> None:
        """Takes note of how many tokens of a sample are computed, its prompt and its output."""
        num_computed_tokens = min(num_computed_tokens, len(self.prompt.token_ids))
        if num_computed_tokens > self.num_computed_tokens:
            self.num_computed_tokens = num_computed_tokens
            self.note_change()

    def note_change(self) -> None:
        """Tells whoever wants to know that more is there."""
        if self.on_change is not None:
            self.on_change()

    def output(self) -> RequestOutput:
        """Returns what has come so far; one thread at a time may ask."""
        now = self.ended_at if self.ended_at is not None and self.is_finished else time.perf_counter()
        first = self.first_token_at
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=tuple([sample.completion() for sample in self.samples]),
            sampling_params=self.params,
            num_cached_tokens=self.num_cached_tokens,
            metrics=RequestMetrics(
                queue_s=(self.started_at or now) - self.submitted_at,
                time_to_first_token_s=None if first is None else first - self.submitted_at,
                total_s=now - self.submitted_at,
                num_preemptions=sum(sample.num_preemptions for sample in self.samples),
            ),
            prompt_logprobs=self.samples[0].scores,
        )

    def score_output(self) -> ScoreOutput:
        """Returns the scores of a finished score submission."""
        scores, ids, start = self.samples[0].scores, self.prompt.token_ids, self.prompt.score_start
        assert scores is not None, f"{self.request_id} has no scores"
        return ScoreOutput(
            prompt_token_ids=ids[:start],
            token_ids=ids[1 if start is None else start :],
            logprobs=scores.logprobs,
            is_greedy=scores.is_greedy,
            weights_version=self.samples[0].weights_version,
        )
