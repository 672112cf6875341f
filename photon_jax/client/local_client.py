"""Local client: submits prompts to an engine in this process and turns its token deltas into request outputs."""

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from photon_jax.client.garbage import old_objects_left_alone
from photon_jax.client.interrupts import HeldInterrupts
from photon_jax.client.submission import Prompt, Sample, Submission
from photon_jax.controls import bad_word_ids, check_a_token_is_left
from photon_jax.engine.engine import Engine
from photon_jax.engine.faults import StepFault
from photon_jax.engine.processors import check_processor
from photon_jax.errors import EngineDeadError, RequestError, naming_prompt, shown
from photon_jax.histogram import SECONDS, Histogram
from photon_jax.models.params import Params
from photon_jax.outputs import RequestOutput, TokenDelta
from photon_jax.request import MAX_STOP_IDS, Request, SamplingParams
from photon_jax.text.stream import TextStream
from photon_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from photon_jax.text.grammar import Grammar, Grammars


class LocalClient:
    """Submits prompts and runs the engine's steps; several callers, also in threads, each get their own results.

    Attributes:
      engine: its scheduler's books are written under a lock of the client: others only read them.
      num_prompt_tokens: of the prompts whose computation began.
      num_output_tokens: that were given out.
      token_gaps: seconds between the tokens of a sequence.
    """

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
        self.engine = engine
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.token_gaps = Histogram(SECONDS)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars: Grammars | None = None
        if tokenizer is not None:
            from photon_jax.text import grammar

            self._grammars = grammar.Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        defaults = sampling_defaults or {}
        self._sampling_defaults = {name: value for name, value in defaults.items() if value is not None}
        self._seed_words = tuple(seed_words)
        self._indices = itertools.count()
        self._lock = threading.RLock()
        # A thread that steps in a loop takes the lock again at once: who wants a turn holds this meanwhile, and a step
        # begins only when nobody does.
        self._turn = threading.Lock()
        self._update = threading.Lock()  # one update of the weights at a time
        self._live: dict[str, tuple[Submission, Sample]] = {}  # by request id
        self._is_closed = False

    def submit_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        score: bool,
        owners: Sequence[int] | None = None,
        into: list[Submission] | None = None,
        starts: bool = False,
    ) -> list[Submission]:
        """Puts all prompts in the engine's queue; where one is refused, those before it are ended.

        Args:
          starts: runs a step whenever tokens for one came together, but for the last: the device needn't wait for all.
          owners: which of the caller's prompts each comes from, where it is not the one at its own place.
          into: an empty list that gets the submissions, for one who aborts them even after an interrupt.

        Raises:
          RequestError: one can never be served; the message says which.
          CapacityError: the queue is full.
        """
        submissions: list[Submission] = [] if into is None else into
        try:
            owners = range(len(prompts)) if owners is None else owners
            num_owners, resolved = len(set(owners)), dict[int, SamplingParams]()
            num_tokens, budget = 0, self.engine.scheduler.limits.config.max_num_batched_tokens
            for owner, prompt, each in zip(owners, prompts, params, strict=True):
                if starts and num_tokens >= budget:
                    self.step()
                    num_tokens = 0
                with naming_prompt(owner, num_owners):
                    if id(each) not in resolved and isinstance(each, SamplingParams):  # many prompts share one object
                        resolved[id(each)] = each.resolve(self._sampling_defaults)
                    submission = self.prepare(prompt, resolved.get(id(each), each), score=score)
                    submission.prompt_index, submission.num_prompts = owner, num_owners
                    with HeldInterrupts():
                        self.enqueue(submission)
                        submissions.append(submission)
                    num_tokens += len(prompt.token_ids)
        except BaseException:
            self.abort_all(submissions)
            raise
        return submissions

    def prepare(
        self, prompt: Prompt, params: SamplingParams, *, score: bool, request_id: str | None = None
    ) -> Submission:
        """Returns a submission that `enqueue` will take; it waits for no step, so that an event loop may call it.

        Args:
          request_id: None counts them.

        Raises:
          RequestError: it can never be served.
        """
        if not isinstance(prompt, Prompt) or not isinstance(prompt.token_ids, tuple):
            raise RequestError(f"a prompt here is a Prompt of a tuple of token ids, got {shown(prompt)}")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {shown(params)}")
        self._check_ids("prompt_token_ids", prompt.token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if prompt.score_start is not None and prompt.score_start not in range(1, len(prompt.token_ids) + 1):
            raise RequestError(
                f"score_start must be from 1 to the prompt's {len(prompt.token_ids)} tokens, got "
                f"{shown(prompt.score_start)}"
            )
        limits = self.engine.scheduler.limits
        resolved = params.resolve(self._sampling_defaults)
        if resolved.max_tokens is None:
            room = max(limits.max_new_tokens(len(prompt.token_ids)), 1, params.min_tokens)
            resolved = dataclasses.replace(resolved, max_tokens=room)
        index = next(self._indices)
        request_id = f"request-{index}" if request_id is None else request_id
        requests = self._make_requests(index, request_id, prompt, resolved, score)
        limits.num_slots(requests[0])
        samples = [Sample(request, TextStream(self._tokenizer, resolved)) for request in requests]
        return Submission(request_id, prompt, resolved, samples, time.perf_counter())

    def enqueue(self, submission: Submission) -> None:
        """Puts all samples of a submission in the engine's queue, or none; it waits for the step that runs.

        Raises:
          RequestError: its id is taken.
          CapacityError: the queue is full.
          EngineDeadError: the client was closed meanwhile.
        """
        with self._lock:
            self._check_open()
            try:
                for sample in submission.samples:
                    self.engine.scheduler.add(sample.request)
                    self._live[sample.request.request_id] = (submission, sample)
            except BaseException:
                for sample in submission.samples:
                    self._take_out(sample)
                raise

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if {*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < self._vocab_size:
            return  # what is found a hundred times faster than which of long prompts' ids is wrong
        wrong = next((i for i in ids if not (isinstance(i, int | np.integer) and 0 <= i < self._vocab_size)), None)
        if wrong is not None:
            raise RequestError(f"{name} holds {shown(wrong)}; the model's ids are 0 to {self._vocab_size - 1}")

    def _make_requests(
        self, index: int, request_id: str, prompt: Prompt, params: SamplingParams, score: bool
    ) -> list[Request]:
        stop_ids = dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)))
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids: {len(stop_ids)} stop ids, the model's own included; at most {MAX_STOP_IDS} can be "
                "watched, give fewer"
            )
        if params.seed is None:
            words = np.random.SeedSequence([*self._seed_words, index]).generate_state(2)
        else:
            seed = int(params.seed)
            words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
        bad_words = () if score else self._check_controls(params, tuple(stop_ids))
        grammar = None if score else self._grammar_of(params, tuple(stop_ids), bad_words)
        unscored = params  # one sample scores the prompt for all
        if params.prompt_logprobs is not None:
            unscored = dataclasses.replace(params, prompt_logprobs=None)
        return [
            Request(
                request_id=f"{request_id}-{sample_index}",
                prompt_token_ids=prompt.token_ids,
                params=params if sample_index == 0 else unscored,
                stop_token_ids=tuple(stop_ids),
                seed=(int(words[0]), int(words[1])),
                sample_index=sample_index,
                score=score,
                bad_word_ids=bad_words,
                grammar=grammar,
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

    def _grammar_of(
        self, params: SamplingParams, stop_ids: tuple[int, ...], bad_words: tuple[tuple[int, ...], ...]
    ) -> "Grammar | None":
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise RequestError("structured_outputs need a tokenizer and the checkpoint has none; leave them out")
        banned = [word[0] for word in bad_words if len(word) == 1]
        return self._grammars.grammar(
            params.structured_outputs, stop_ids=stop_ids, min_tokens=params.min_tokens, banned_ids=banned
        )

    @old_objects_left_alone()
    def run(self, submissions: Sequence[Submission], on_step: Callable[[], None] | None = None) -> None:
        """Steps the engine until all submissions are finished; on any error or interrupt they are aborted."""
        left = collections.deque(submissions)
        try:
            while left:
                if left[0].is_finished:
                    left.popleft().raise_error()
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
                submission.raise_error()
                num_seen, is_last = submission.num_output_tokens, submission.is_finished
                yield submission.output()
        finally:
            self.abort_all([submission])

    def abort_all(self, submissions: Sequence[Submission]) -> None:
        """Ends what is unfinished of the submissions; their blocks are free at once."""
        now = time.perf_counter()
        with HeldInterrupts(), self._lock:
            for submission, sample in ((each, sample) for each in submissions for sample in each.samples):
                if sample.end is None:
                    self._take_out(sample)
                    sample.abort(now)
                    submission.note_change()

    def _take_out(self, sample: Sample) -> None:
        """Ends a sample in the engine; does nothing for one that is not there, though another of its id may be."""
        request_id = sample.request.request_id
        live = self._live.get(request_id)
        if live is not None and live[1] is sample:
            self.engine.scheduler.abort(request_id)
            del self._live[request_id]

    def close(self) -> None:
        """Ends what is unfinished of all submissions, and takes no more; open iterators yield it as their last output.

        It waits for the step that runs in another thread.
        """
        with HeldInterrupts(), self._turn, self._lock:
            self._is_closed = True
            self.abort_all([submission for submission, _ in self._live.values()])

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("this LLM is closed; make a new one")

    def update_params(self, params: Params) -> int:
        """Replaces the weights once every sequence that has begun is finished, which this does; returns the version.

        Sequences that have not begun wait until then, also those that are submitted meanwhile. Other threads go on
        taking their turns, and their results.
        """
        scheduler = self.engine.scheduler
        with self._update:
            try:
                scheduler.admits_new = False
                while True:
                    with HeldInterrupts(), self._turn, self._lock:
                        self._check_open()
                        if not scheduler.has_begun:
                            self.engine.set_params(params)
                            return self.engine.weights_version
                        self._step()
            finally:
                scheduler.admits_new = True

    def step(self) -> None:
        """Runs one step of the engine and hands out what it made."""
        with HeldInterrupts():
            with self._turn:
                pass
            with self._lock:
                self._step()

    def _step(self) -> None:
        try:
            deltas = self.engine.step()
        except StepFault as fault:
            self._give_up(fault)
            return
        now = time.perf_counter()
        for item in self.engine.last_plan.prompt_rows:
            live = self._live.get(item.seq.request_id)
            if live is not None:
                submission, sample = live
                if submission.started_at is None:
                    submission.started_at = now
                    self.num_prompt_tokens += len(submission.prompt.token_ids)
                sample.num_preemptions = item.seq.num_preemptions
                submission.note_progress(item.start + item.num_new_tokens)
        gaps: dict[float, int] = {}  # tokens by the seconds that each took
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is not None:
                self._take(delta, *live, now, gaps)
        for gap, count in gaps.items():
            self.token_gaps.add(gap, count)

    def _give_up(self, fault: StepFault) -> None:
        """Ends the submissions that are to blame for a fault; the others go on."""
        for request_id, (submission, _) in list(self._live.items()):
            error = fault.error_for(request_id)
            if error is not None and submission.error is None:
                submission.error, submission.is_error_of_all = error, fault.messages is None
                self.abort_all([submission])

    def _take(
        self, delta: TokenDelta, submission: Submission, sample: Sample, now: float, gaps: dict[float, int]
    ) -> None:
        if sample.num_tokens == 0:
            self._begin(delta, submission, sample, now)
        num_new = sample.append(delta, now)
        if num_new:
            self.num_output_tokens += num_new
            if sample.last_token_at is not None:
                gap = (now - sample.last_token_at) / num_new
                gaps[gap] = gaps.get(gap, 0) + num_new
            sample.last_token_at = now
        if sample.end is not None:
            if delta.finish_reason is None:  # a stop string, of which the engine knows nothing
                self.engine.scheduler.finish(delta.request_id)
            del self._live[delta.request_id]
        submission.note_change()

    def _begin(self, delta: TokenDelta, submission: Submission, sample: Sample, now: float) -> None:
        """Takes over what comes with the first token of a sample."""
        sample.weights_version = self.engine.weights_version
        sample.scores = delta.scores
        submission.num_cached_tokens = max(submission.num_cached_tokens, delta.num_cached_tokens)
        if delta.new_token_ids and submission.first_token_at is None:
            submission.first_token_at = now
