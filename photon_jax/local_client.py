"""Local client: submits prompts to an engine in this process and turns its token deltas into request outputs."""

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from photon_jax.controls import bad_word_ids, check_a_token_is_left
from photon_jax.engine.controls import check_processor
from photon_jax.engine.engine import Engine
from photon_jax.errors import RequestError, naming_prompt
from photon_jax.models.params import Params
from photon_jax.request import (
    MAX_STOP_IDS,
    CompletionOutput,
    FinishReason,
    PromptLogprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
    TokenDelta,
    TokenLogprobs,
)
from photon_jax.text.stream import TextStream
from photon_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt as token ids, with the text that they were made of, if any.

    Attributes:
      score_start: where a continuation begins that is to be scored; None to score all tokens after the first.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    score_start: int | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Sample:
    """One sequence of a submission as far as it has come."""

    request: Request
    stream: TextStream
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    top_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    top_logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: PromptLogprobs | None = None
    num_preemptions: int = 0
    weights_version: int | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Submission:
    """A prompt that was submitted: its samples, and when what happened (seconds of `time.perf_counter`)."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    samples: list[_Sample]
    submitted_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    num_cached_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all samples so far."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def output(self) -> RequestOutput:
        """Returns what has come so far."""
        now = self.ended_at or time.perf_counter()
        first = self.first_token_at
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=tuple(self._completion(index, sample) for index, sample in enumerate(self.samples)),
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

    def _completion(self, index: int, sample: _Sample) -> CompletionOutput:
        table = _stack(sample.logprobs, (len(sample.token_ids), 3), np.float32)
        num_top = self.params.logprobs or 0
        logprobs = TokenLogprobs(
            raw=table[:, 0],
            tempered=table[:, 1],
            sampling=table[:, 2],
            top_ids=_stack(sample.top_ids, (len(table), num_top), np.int32),
            top_logprobs=_stack(sample.top_logprobs, (len(table), num_top), np.float32),
        )
        return CompletionOutput(
            index=index,
            text=sample.stream.text,
            token_ids=tuple(sample.token_ids),
            logprobs=None if self.params.logprobs is None else logprobs,
            cumulative_logprob=float(table[:, 0].sum(dtype=np.float64)),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            weights_version=sample.weights_version,
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


def _stack(parts: list[np.ndarray], shape: tuple[int, int], dtype: type[np.generic]) -> np.ndarray:
    """Returns the parts below each other; there may be none."""
    return np.concatenate([np.zeros((0, shape[1]), dtype), *parts]).reshape(shape)


class LocalClient:
    """Submits prompts and runs the engine's steps; several callers, also in threads, each get their own results."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        sampling_defaults: Mapping[str, object] | None = None,
        seed_words: Sequence[int] = (0,),
    ) -> None:
        """Prepares a client.

        Args:
          tokenizer: None serves token ids without text.
          eos_token_ids: ids that end a sequence unless its params ignore them.
          sampling_defaults: of a generation_config, for params that are not given.
          seed_words: of the key from which requests without a seed draw theirs.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        defaults = sampling_defaults or {}
        self._sampling_defaults = {name: value for name, value in defaults.items() if value is not None}
        self._seed_words = tuple(seed_words)
        self._indices = itertools.count()
        self._lock = threading.RLock()
        # A thread that steps in a loop takes the lock again at once, and one that waits for it may wait long: who
        # wants a turn holds this meanwhile, and a step begins only when nobody does.
        self._turn = threading.Lock()
        self._update = threading.Lock()  # one update of the weights at a time
        self._live: dict[str, tuple[Submission, _Sample]] = {}  # by request id

    def submit_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        score: bool,
        owners: Sequence[int] | None = None,
    ) -> list[Submission]:
        """Puts all prompts in the engine's queue, or none.

        Args:
          owners: which of the caller's prompts each comes from, where it is not the one at its own place.

        Raises:
          RequestError: one can never be served; the message says which.
          CapacityError: the queue is full.
        """
        submissions: list[Submission] = []
        try:
            owners = range(len(prompts)) if owners is None else owners
            num_owners = len(set(owners))
            for owner, prompt, each in zip(owners, prompts, params, strict=True):
                with naming_prompt(owner, num_owners):
                    submissions.append(self._submit(prompt, each, score))
        except BaseException:
            self.abort_all(submissions)
            raise
        return submissions

    def _submit(self, prompt: Prompt, params: SamplingParams, score: bool) -> Submission:
        self._check_ids("prompt_token_ids", prompt.token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        scheduler = self._engine.scheduler
        resolved = params.resolve(self._sampling_defaults)
        if resolved.max_tokens is None:
            room = max(scheduler.max_new_tokens(len(prompt.token_ids)), 1, params.min_tokens)
            resolved = dataclasses.replace(resolved, max_tokens=room)
        index = next(self._indices)
        requests = self._make_requests(index, prompt, resolved, score)
        samples = [_Sample(request, TextStream(self._tokenizer, resolved)) for request in requests]
        submission = Submission(f"request-{index}", prompt, resolved, samples, time.perf_counter())
        try:
            with self._lock:
                for sample in samples:
                    scheduler.add(sample.request)
                    self._live[sample.request.request_id] = (submission, sample)
        except BaseException:
            self.abort_all([submission])
            raise
        return submission

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        wrong = next((i for i in ids if not 0 <= i < self._vocab_size), None)
        if wrong is not None:
            raise RequestError(f"{name} holds {wrong}; the model's ids are 0 to {self._vocab_size - 1}")

    def _make_requests(self, index: int, prompt: Prompt, params: SamplingParams, score: bool) -> list[Request]:
        stop_ids = dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)))
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(stop_ids)} stop ids, the model's own included; at most {MAX_STOP_IDS} can be watched, give fewer"
            )
        if params.seed is None:
            words = np.random.SeedSequence([*self._seed_words, index]).generate_state(2)
        else:
            seed = int(params.seed)
            words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
        bad_words = () if score else self._check_controls(params, tuple(stop_ids))
        unscored = dataclasses.replace(params, prompt_logprobs=None)  # one sample scores the prompt for all
        return [
            Request(
                request_id=f"request-{index}-{sample_index}",
                prompt_token_ids=prompt.token_ids,
                params=params if sample_index == 0 else unscored,
                stop_token_ids=tuple(stop_ids),
                seed=(int(words[0]), int(words[1])),
                sample_index=sample_index,
                score=score,
                bad_word_ids=bad_words,
                score_start=prompt.score_start or 1,
            )
            for sample_index in range(params.n)
        ]

    def _check_controls(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences that the bad words stand for."""
        bad_words = bad_word_ids(params.bad_words, self._tokenizer)
        self._check_ids("logit_bias", tuple(params.logit_bias or ()))
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("bad_words", [token_id for word in bad_words for token_id in word])
        if bad_words or params.allowed_token_ids is not None:
            masked = stop_ids if params.min_tokens else ()
            check_a_token_is_left(params.allowed_token_ids, bad_words, masked, self._vocab_size)
        if params.processor is not None:
            check_processor(params.processor, self._vocab_size)
        return bad_words

    def run(self, submissions: Sequence[Submission], on_step: Callable[[], None] | None = None) -> None:
        """Steps the engine until all submissions are finished; on any error or interrupt they are aborted."""
        left = collections.deque(submissions)
        try:
            while left:
                if left[0].is_finished:
                    left.popleft()
                    continue
                self.step()
                if on_step is not None:
                    on_step()
        finally:
            self.abort_all(submissions)

    def iterate(self, submission: Submission) -> Generator[RequestOutput, None, None]:
        """Yields what has come so far whenever tokens came, last the finished output; aborts when it is closed."""
        outputs = self._iterate(submission)
        next(outputs)  # it is inside its `try` now: closing or dropping it aborts, even before its first output
        return outputs

    def _iterate(self, submission: Submission) -> Generator[RequestOutput, None, None]:
        num_seen = 0
        try:
            yield submission.output()
            is_last = False
            while not is_last:
                # others that take turns step the engine too: tokens, and the end, may be there already
                while submission.num_output_tokens == num_seen and not submission.is_finished:
                    self.step()
                num_seen, is_last = submission.num_output_tokens, submission.is_finished
                yield submission.output()
        finally:
            self.abort_all([submission])

    def abort_all(self, submissions: Sequence[Submission]) -> None:
        """Ends what is unfinished of the submissions; their blocks are free at once."""
        now = time.perf_counter()
        with self._lock:
            for submission, sample in ((each, sample) for each in submissions for sample in each.samples):
                request_id = sample.request.request_id
                if request_id in self._live:
                    self._engine.scheduler.abort(request_id)
                    self._end(submission, sample, FinishReason.ABORT, None, now)

    def close(self) -> None:
        """Ends what is unfinished of all submissions; iterators that are open yield it as their last output."""
        self.abort_all([submission for submission, _ in self._live.values()])

    def update_params(self, params: Params) -> int:
        """Replaces the weights once every sequence that has begun is finished, which this does; returns the version.

        Sequences that have not begun wait until then, also those that are submitted meanwhile. Other threads go on
        taking their turns, and their results.
        """
        scheduler = self._engine.scheduler
        with self._update:
            try:
                scheduler.admits_new = False
                while True:
                    with self._turn, self._lock:
                        if not scheduler.has_begun:
                            self._engine.set_params(params)
                            return self._engine.weights_version
                        self._step()
            finally:
                scheduler.admits_new = True

    def step(self) -> None:
        """Runs one step of the engine and hands out what it made."""
        with self._turn:
            pass
        with self._lock:
            self._step()

    def _step(self) -> None:
        deltas = self._engine.step()
        now = time.perf_counter()
        for item in self._engine.last_plan.scheduled:
            live = self._live.get(item.seq.request_id)
            if live is not None:
                submission, sample = live
                submission.started_at = submission.started_at or now
                sample.num_preemptions = item.seq.num_preemptions
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is not None:
                self._take(delta, *live, now)

    def _take(self, delta: TokenDelta, submission: Submission, sample: _Sample, now: float) -> None:
        sample.weights_version = self._engine.weights_version
        if delta.new_token_ids:
            submission.first_token_at = submission.first_token_at or now
        submission.num_cached_tokens = max(submission.num_cached_tokens, delta.num_cached_tokens)
        ended_by_id = delta.stop_token_id is not None
        text = sample.stream.push(delta.new_token_ids, delta.finish_reason is not None, ended_by_stop_id=ended_by_id)
        num_kept = text.num_tokens - len(sample.token_ids)
        sample.token_ids += delta.new_token_ids[:num_kept]
        sample.logprobs.append(delta.logprobs[:num_kept])
        if delta.top_ids is not None and delta.top_logprobs is not None:
            sample.top_ids.append(delta.top_ids[:num_kept])
            sample.top_logprobs.append(delta.top_logprobs[:num_kept])
        sample.scores = delta.scores or sample.scores
        if text.stop_reason is not None:
            self._engine.scheduler.finish(delta.request_id)
            self._end(submission, sample, FinishReason.STOP, text.stop_reason, now)
        elif delta.finish_reason is not None:
            reason = delta.stop_token_id if delta.stop_token_id in submission.params.stop_token_ids else None
            self._end(submission, sample, delta.finish_reason, reason, now)

    def _end(
        self, submission: Submission, sample: _Sample, reason: FinishReason, stop_reason: int | str | None, now: float
    ) -> None:
        sample.finish_reason, sample.stop_reason = reason.value, stop_reason
        del self._live[sample.request.request_id]
        if submission.is_finished:
            submission.ended_at = now
