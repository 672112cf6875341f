"""Submission: a prompt that was submitted, and all that has come of it so far. Host only."""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from photon_jax.errors import CheckpointError, PhotonError, naming_prompt
from photon_jax.outputs import (
    CompletionOutput,
    FinishReason,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
    TokenDelta,
    TokenLogprobs,
)
from photon_jax.request import Request, SamplingParams
from photon_jax.text.stream import TextStream

_NUM_KINDS = 3  # of log-probabilities of a token
_FLOAT_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt as token ids, with the text that they were made of, if any.

    Attributes:
      score_start: where a continuation begins that is to be scored; None to score all tokens after the first.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    score_start: int | None = None


class SampleEnd(NamedTuple):
    """How a sample ended.

    Attributes:
      ended_at: seconds of `time.perf_counter`.
      num_tokens: of the whole sample.
      has_stop_id: whether the last token is the id that stopped it.
      has_whole_text: whether text that was held back is to be let out; an abort from outside leaves it.
    """

    ended_at: float
    num_tokens: int
    finish_reason: str
    stop_reason: int | str | None
    has_stop_id: bool = False
    has_whole_text: bool = True


class Reading(NamedTuple):
    """A sample as far as it had come when it was read."""

    num_tokens: int
    text: str
    end: SampleEnd | None


class _Rows:
    """Rows as one array that grows: what is there is not copied each time that some are added."""

    def __init__(self, width: int, dtype: type[np.generic]) -> None:
        self._rows = np.zeros((0, width), dtype)
        self.num_rows = 0

    def extend(self, added: np.ndarray) -> None:
        """Adds rows."""
        begin, end = self.num_rows, self.num_rows + len(added)
        if end > len(self._rows):
            rows = np.zeros((max(end, 2 * begin), self._rows.shape[1]), self._rows.dtype)
            rows[:begin] = self._rows[:begin]
            self._rows = rows
        self._rows[begin:end] = added
        self.num_rows = end

    def view(self) -> np.ndarray:
        """Returns all rows so far, not to be written to."""
        view = self._rows[: self.num_rows]
        view.flags.writeable = False
        return view


class Sample:
    """One sequence of a submission as far as it has come.

    Whoever runs the steps appends to it; one other thread at a time may read it meanwhile. A step leaves it as little
    as can be: numbers are put in tables, and ids into text, when somebody reads them. Stop strings alone have the text
    made by the steps.

    Attributes:
      token_ids: only ever appended to; the first num_tokens count for readers.
      num_tokens: set after its tokens, and their text where the steps make it, are there.
      end: set before num_tokens counts the last token; None until then.
      last_token_at: when the last token came, seconds of `time.perf_counter`.
    """

    __slots__ = (
        *("request", "stream", "token_ids", "num_tokens", "end", "last_token_at"),
        *("scores", "num_preemptions", "weights_version"),
        *("_new_logprobs", "_new_tops", "_logprobs", "_top_ids", "_top_logprobs", "_num_decoded"),
    )

    def __init__(self, request: Request, stream: TextStream) -> None:
        self.request = request
        self.stream = stream
        self.token_ids: list[int] = []
        self.num_tokens = 0
        self.end: SampleEnd | None = None
        self.last_token_at: float | None = None
        self.scores: PromptLogprobs | None = None
        self.num_preemptions = 0
        self.weights_version: int | None = None
        # appended by the steps, taken away by readers
        self._new_logprobs = bytearray()  # f32[n 3]
        self._new_tops: collections.deque[tuple[np.ndarray, np.ndarray]] = collections.deque()
        # of readers
        num_top = request.params.logprobs or 0
        self._logprobs = _Rows(_NUM_KINDS, np.float32)
        self._top_ids, self._top_logprobs = _Rows(num_top, np.int32), _Rows(num_top, np.float32)
        self._num_decoded = 0

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, None until then."""
        return None if self.end is None else self.end.finish_reason

    def append(self, delta: TokenDelta, now: float) -> int:
        """Adds what a step brought, up to a token that completes a stop string; returns how many tokens are kept."""
        token_ids, logprobs, reason = delta.new_token_ids, delta.logprobs, delta.finish_reason
        stop_reason: int | str | None = None
        if self.stream.has_stops:
            has_stop_id = delta.stop_token_id is not None
            text = self.stream.push(token_ids, reason is not None, ended_by_stop_id=has_stop_id)
            if text.stop_reason is not None:
                num_kept = text.num_tokens - self.num_tokens
                token_ids, logprobs = token_ids[:num_kept], logprobs[:num_kept]
                reason, stop_reason = FinishReason.STOP, text.stop_reason
        self.token_ids += token_ids
        self._new_logprobs.extend(logprobs)  # its bytes
        if delta.top_ids is not None and delta.top_logprobs is not None:
            self._new_tops.append((delta.top_ids[: len(token_ids)], delta.top_logprobs[: len(token_ids)]))
        num_tokens = len(self.token_ids)
        if reason is not None:
            if delta.stop_token_id in self.request.params.stop_token_ids:
                stop_reason = stop_reason or delta.stop_token_id
            self.end = SampleEnd(now, num_tokens, reason.value, stop_reason, delta.stop_token_id is not None)
        self.num_tokens = num_tokens
        return len(token_ids)

    def abort(self, now: float) -> None:
        """Ends it where it is."""
        self.end = SampleEnd(now, self.num_tokens, FinishReason.ABORT.value, None, has_whole_text=False)

    def read(self) -> Reading:
        """Returns how far it has come."""
        text, num_tokens, end = self.stream.text, self.num_tokens, self.end  # in this order, see the attributes
        num_tokens = num_tokens if end is None else end.num_tokens
        if self.stream.has_stops:
            text = text if end is None else self.stream.text
        elif num_tokens > self._num_decoded or end is not None:
            new = self.token_ids[self._num_decoded : num_tokens]
            ends_whole, has_stop_id = (False, False) if end is None else (end.has_whole_text, end.has_stop_id)
            self.stream.push(new, ends_whole, ended_by_stop_id=has_stop_id)
            self._num_decoded, text = num_tokens, self.stream.text
        return Reading(num_tokens, text, end)

    def logprobs(self, num_tokens: int) -> TokenLogprobs:
        """Returns the log-probabilities of the first tokens, of which no fewer than at the call before; read-only."""
        self._take_tables(num_tokens)
        table = self._logprobs.view()
        shape = (len(table), self.request.params.logprobs or 0)
        return TokenLogprobs(
            raw=table[:, 0],
            tempered=table[:, 1],
            sampling=table[:, 2],
            top_ids=self._top_ids.view().reshape(shape),
            top_logprobs=self._top_logprobs.view().reshape(shape),
        )

    def _take_tables(self, num_tokens: int) -> None:
        """Moves what the steps left of the first tokens to the tables."""
        num_bytes = (num_tokens - self._logprobs.num_rows) * _NUM_KINDS * _FLOAT_BYTES
        self._logprobs.extend(np.frombuffer(self._new_logprobs[:num_bytes], np.float32).reshape(-1, _NUM_KINDS))
        del self._new_logprobs[:num_bytes]
        while self._new_tops and self._top_ids.num_rows < num_tokens:
            top_ids, top_logprobs = self._new_tops.popleft()
            self._top_ids.extend(top_ids)
            self._top_logprobs.extend(top_logprobs)

    def completion(self) -> CompletionOutput:
        """Returns what has come so far as the caller gets it."""
        reading = self.read()
        end, logprobs = reading.end, self.logprobs(reading.num_tokens)
        return CompletionOutput(
            index=self.request.sample_index,
            text=reading.text,
            token_ids=tuple(self.token_ids[: reading.num_tokens]),
            logprobs=None if self.request.params.logprobs is None else logprobs,
            cumulative_logprob=float(logprobs.raw.sum(dtype=np.float64)),
            finish_reason=None if end is None else end.finish_reason,
            stop_reason=None if end is None else end.stop_reason,
            weights_version=self.weights_version,
        )


@dataclasses.dataclass(eq=False, slots=True)
class Submission:
    """A prompt that was submitted: its samples, and when what happened (seconds of `time.perf_counter`).

    Attributes:
      num_computed_tokens: the prompt's tokens that are computed, or will be by steps on their way.
      on_change: called whenever more of it is there, in the thread that runs the step.
      prompt_index: which prompt of the call it is, of num_prompts.
      error: why it was given up, if it was.
      is_error_of_all: whether the error is no matter of this prompt more than of others.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    samples: list[Sample]
    submitted_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    on_change: Callable[[], None] | None = None
    prompt_index: int = 0
    num_prompts: int = 1
    error: PhotonError | None = None
    is_error_of_all: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.end is not None for sample in self.samples)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all samples so far."""
        return sum([sample.num_tokens for sample in self.samples])

    def note_progress(self, num_computed_tokens: int) -> None:
        """Takes note of how many tokens of a sample are computed, its prompt and its output."""
        num_computed_tokens = min(num_computed_tokens, len(self.prompt.token_ids))
        if num_computed_tokens > self.num_computed_tokens:
            self.num_computed_tokens = num_computed_tokens
            self.note_change()

    def raise_error(self) -> None:
        """Raises why it was given up, if it was; the message says which prompt of several it is about."""
        if self.error is None:
            return
        if isinstance(self.error, CheckpointError) and self.num_prompts > 1 and not self.is_error_of_all:
            raise CheckpointError(f"prompt {self.prompt_index}: {self.error}") from self.error
        with naming_prompt(self.prompt_index, self.num_prompts):
            raise self.error

    def note_change(self) -> None:
        """Tells whoever wants to know that more is there."""
        if self.on_change is not None:
            self.on_change()

    def output(self) -> RequestOutput:
        """Returns what has come so far; one thread at a time may ask."""
        ends = [sample.end.ended_at for sample in self.samples if sample.end is not None]
        now = max(ends) if len(ends) == len(self.samples) else time.perf_counter()
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
