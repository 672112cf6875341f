"""AsyncLLM: serves an LLM to asyncio. One thread steps the engine; results come back in the caller's event loop."""

import asyncio
import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable

from photon_jax.client.garbage import old_objects_left_alone
from photon_jax.client.interrupts import HeldInterrupts
from photon_jax.client.late_programs import LatePrograms
from photon_jax.client.stats import EngineStats, read_stats
from photon_jax.client.submission import Prompt, Submission
from photon_jax.client.updates import StreamUpdate, UpdateReader
from photon_jax.errors import CapacityError, ConfigError, EngineDeadError, RequestError
from photon_jax.llm import LLM
from photon_jax.outputs import RequestOutput, ScoreOutput
from photon_jax.request import SamplingParams

DRAIN_POLL_S = 0.02
_SCORE_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


class _Live:
    """A request between its submission and its end, and the event loop that waits for it.

    Attributes:
      news: done in the event loop when there is something to read.
      is_told: whether the event loop was told, or soon will be, that there is news since it last looked.
      is_streamed: whether each step is news, or the end alone.
      is_left: whether nobody wants the result any longer.
    """

    def __init__(self, submission: Submission, is_streamed: bool) -> None:
        self.submission = submission
        self.is_streamed = is_streamed
        self.loop = asyncio.get_running_loop()
        self.news = self.loop.create_future()  # an Event would make a system call for each wait
        self.is_told = self.is_left = False

    async def wait(self) -> None:
        """Waits for news; the event loop is told again when there is more after that. One task at a time may wait."""
        await self.news
        self.news, self.is_told = self.loop.create_future(), False


class RequestStream:
    """The updates of one request, for `async for`; leaving it in any way before its end aborts the request.

    Attributes:
      request_id: of the request.
    """

    _is_closed = True  # until it is whole

    def __init__(self, owner: "AsyncLLM", live: _Live) -> None:
        self.request_id = live.submission.request_id
        self._owner = owner
        self._live = live
        self._reader = UpdateReader(live.submission)
        self._is_closed = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> StreamUpdate:
        """Returns what came since the last update, waiting for it if need be; cancelling the wait aborts the request.

        To wait for a limited time, wrap it in a task, and wait for that with `asyncio.wait`, which does not cancel.

        Raises:
          EngineDeadError: the engine failed.
          CapacityError, RequestError: the engine refused the request after all.
        """
        try:
            while not self._is_closed and not self._reader.is_done:
                await self._live.wait()
                update = self._reader.take()
                self._live.submission.raise_error()  # looked at last: the abort that comes with it isn't the reason
                if update is not None:
                    return update
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    def output(self) -> RequestOutput:
        """Returns all that has come so far, read or not."""
        return self._live.submission.output()

    def close(self) -> None:
        """Aborts the request unless it is finished; there are no more updates."""
        if not self._is_closed:
            self._is_closed = True
            self._owner._leave(self._live)

    async def aclose(self) -> None:
        """Does the same as `close`."""
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncLLM:
    """Serves an LLM to asyncio: one thread steps the engine while there is work, and sleeps while there is none.

    All methods may be called from any event loop, `close` and `stats` from anywhere. Calls of the LLM's own methods in
    other threads take their turns beside it. A request is checked where it is submitted, and waits in an inbox until
    the step that runs is over, so an event loop never waits for the engine.

    Example:
      async with AsyncLLM(llm) as engine:
          prompt = Prompt(token_ids=tuple(llm.tokenizer.encode_chat(messages)))
          async for update in engine.stream(prompt, SamplingParams(max_tokens=100)):
              print(update.deltas[0].text if update.deltas else "", end="")

    Attributes:
      llm: what is served.
      max_model_len: the longest request that can be served, prompt and output together.
      error: what ended the thread; None while it lives.
      on_finish: called in a request's event loop with what came of it when it has ended, whoever reads it.
    """

    def __init__(
        self, llm: LLM, *, max_queue: int | None = None, on_finish: Callable[[RequestOutput], None] | None = None
    ) -> None:
        """Starts the thread.

        Args:
          max_queue: sequences that may wait beyond those that may run; None: as many as SchedulerConfig.max_waiting.
        """
        if max_queue is not None and (isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 0):
            raise ConfigError(f"max_queue must be an integer of at least 0, or None, got {max_queue!r}")
        self.llm = llm
        self._client = llm.client
        limits = self._client.engine.scheduler.limits
        self.max_model_len = limits.max_new_tokens(0)
        self.error: BaseException | None = None
        self.on_finish = on_finish
        most = limits.config.max_waiting
        self._max_live = most if max_queue is None else min(limits.config.max_num_seqs + max_queue, most)
        # One lock for the five below; nobody holds it for longer than a few lines. A stream that is dropped takes it
        # wherever Python collects garbage, also inside of such lines: it can be taken again by who has it.
        self._condition = threading.Condition(threading.RLock())
        self._inbox: list[_Live] = []  # to be put in the engine's queue, or, once left, to be aborted
        self._compiling: set[_Live] = set()  # to come into the inbox when programs that they need are there
        self._live: dict[str, _Live] = {}  # by request id
        self._is_draining = self._is_closed = False
        self._touched: collections.deque[_Live] = collections.deque()  # by a step, maybe one of another thread
        self._programs = LatePrograms(self._client.engine, self._look_again)
        self._thread = threading.Thread(target=self._serve, name="photon-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestStream:
        """Submits a request at once; returns its updates as they come.

        Args:
          request_id: its own among live requests; None counts them.

        Raises:
          RequestError: it can never be served, or its id is taken.
          CapacityError: the queue is full, or the engine drains.
          EngineDeadError: the engine failed or is closed.
        """
        stream = RequestStream(self, self._prepare(prompt, params, request_id, is_streamed=True))
        self._submit(stream._live)  # an interrupt drops the stream, which aborts the request
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """Returns the finished output; cancelling the wait aborts the request. Raises as `stream` and its updates."""
        live = self._prepare(prompt, params, request_id, is_streamed=False)
        await self._finished(live)
        return live.submission.output()

    async def score(self, prompt: Prompt) -> ScoreOutput:
        """Returns log-probabilities of the prompt's tokens from its score_start on; raises as `generate`."""
        live = self._prepare(prompt, _SCORE_PARAMS, None, score=True, is_streamed=False)
        await self._finished(live)
        if live.submission.samples[0].scores is None:
            raise EngineDeadError("the engine was closed before it had scored the prompt")
        return live.submission.score_output()

    def stats(self) -> EngineStats:
        """Returns what the engine does at the moment; it waits for nothing."""
        with self._condition:
            is_ready = not (self._is_draining or self._is_closed) and self.error is None
            coming = [*self._inbox, *self._compiling]
        num_coming = sum(len(live.submission.samples) for live in coming if not live.is_left)
        return read_stats(self._client, is_ready=is_ready, num_coming=num_coming)

    async def drain(self, timeout_s: float) -> bool:
        """Takes no more requests and waits for the live ones; what is left after `timeout_s` seconds is aborted.

        Returns whether all were finished in time.
        """
        self._is_draining = True
        deadline = time.monotonic() + timeout_s
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        with self._condition:
            left = list(self._live.values())
        for live in left:
            self._leave(live)
        while self._live:  # until the step that runs is over
            await asyncio.sleep(DRAIN_POLL_S)
        return not left and self.error is None

    def close(self) -> None:
        """Aborts all requests and ends the thread, which may take as long as a step; the LLM stays open."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._programs.close()

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, name: str | None, *, is_streamed: bool, score: bool = False
    ) -> _Live:
        params = SamplingParams() if params is None else params
        submission = self._client.prepare(prompt, params, score=score, request_id=name)
        live = _Live(submission, is_streamed)
        submission.on_change = functools.partial(self._touched.append, live)
        return live

    def _submit(self, live: _Live) -> None:
        with HeldInterrupts(), self._condition:
            self._check_takes(live.submission)
            self._live[live.submission.request_id] = live
            self._queue(live)

    def _queue(self, live: _Live) -> None:
        """Puts a new request into the inbox, or has it wait for programs that steps of it can't do without."""
        queued = [each.submission for each in self._live.values() if each is live or each not in self._compiling]
        if self._programs.can_run(queued):
            self._compiling.discard(live)
            self._inbox.append(live)
            self._condition.notify()
        else:
            self._compiling.add(live)

    def _look_again(self) -> None:
        """Queues whom a program that was compiled lets in, and has the next one compiled."""
        with self._condition:
            lives = [] if self._is_closed else list(self._live.values())
            waiting = [live for live in lives if live in self._compiling and not live.is_left]
            for live in waiting:
                self._queue(live)
            if not waiting:
                self._programs.can_run([live.submission for live in lives if live not in self._compiling])

    def _check_takes(self, submission: Submission) -> None:
        """Raises unless a new submission is taken."""
        num_new = len(submission.samples)
        if self.error is not None:
            raise self._death()
        if self._is_closed:
            raise EngineDeadError("this AsyncLLM is closed; make a new one")
        if self._is_draining:
            raise CapacityError("the engine finishes what it has and takes no more requests; try another one")
        if submission.request_id in self._live:
            raise RequestError(
                f"request {submission.request_id!r} is still being served; give each live request an id of its own"
            )
        if num_new > self._max_live:
            raise RequestError(f"n asks for {num_new} samples; the engine takes {self._max_live} sequences at most")
        num_live = sum(len(live.submission.samples) for live in self._live.values())
        if num_live + num_new > self._max_live:
            raise CapacityError(
                f"the queue is full: {num_live} sequences run or wait, {self._max_live} may; try again later or raise "
                "max_queue"
            )

    def _death(self) -> EngineDeadError:
        death = EngineDeadError(f"the engine failed and serves no more: {self.error!r}; start it again")
        death.__cause__ = self.error
        return death

    async def _finished(self, live: _Live) -> None:
        """Submits a request and waits for its end; leaving the wait aborts it."""
        self._submit(live)
        try:
            while not (live.submission.is_finished or live.submission.error):
                await live.wait()
            live.submission.raise_error()
        finally:
            self._leave(live)

    def _leave(self, live: _Live) -> None:
        """Has a request aborted unless it has ended."""
        if self._live.get(live.submission.request_id) is live:
            with HeldInterrupts(), self._condition:
                if not live.is_left:  # it may have ended meanwhile, which aborts nothing
                    live.is_left = True
                    self._inbox.append(live)
                    self._condition.notify()

    # in the engine's thread from here on

    @old_objects_left_alone()
    def _serve(self) -> None:
        try:
            while self._take_inbox():
                self._client.step()
                self._tell()
            self._client.abort_all([live.submission for live in self._live.values()])
            self._tell()
        except BaseException as error:
            self._die(error)

    def _take_inbox(self) -> bool:
        """Sleeps while all there is waits for programs; takes over what came; returns False once all is to end."""
        with self._condition:
            while not (self._inbox or len(self._live) > len(self._compiling) or self._is_closed):
                self._condition.wait()
            if self._is_closed:
                return False
            inbox, self._inbox = self._inbox, []
        for live in inbox:
            if live.is_left:
                self._client.abort_all([live.submission])
                continue
            try:
                self._client.enqueue(live.submission)
            except (RequestError, CapacityError) as error:  # a caller beside this one has taken the id or the place
                live.submission.error = error
                self._touched.append(live)
        return True

    def _tell(self) -> None:
        """Tells the event loops, each once, which of their requests have news."""
        told: dict[asyncio.AbstractEventLoop, tuple[list[_Live], list[_Live]]] = {}
        while self._touched:
            live = self._touched.popleft()
            is_over = live.submission.error is not None or live.submission.is_finished
            news, ended = told.setdefault(live.loop, ([], []))
            if (live.is_streamed or is_over) and not live.is_told:
                live.is_told = True
                news.append(live)
            if is_over and self._forget(live) and live.submission.error is None:
                ended.append(live)
        for loop, (news, ended) in told.items():
            if news or ended:
                self._call_in(loop, news, ended)

    def _call_in(self, loop: asyncio.AbstractEventLoop, news: list[_Live], ended: list[_Live]) -> None:
        try:
            loop.call_soon_threadsafe(self._wake, news, ended)
        except RuntimeError:  # the loop is closed: nobody waits any longer
            self._client.abort_all([live.submission for live in news])

    def _wake(self, news: list[_Live], ended: list[_Live]) -> None:
        """Runs in the event loop of the requests."""
        for live in news:
            if not live.news.done():
                live.news.set_result(None)
        for live in ended:
            live.loop.call_soon(self._finish, live.submission)  # after those that were woken

    def _finish(self, submission: Submission) -> None:
        if self.on_finish is not None:
            self.on_finish(submission.output())

    def _forget(self, live: _Live) -> bool:
        """Drops a request that has ended; returns False if that was done before."""
        with self._condition:
            is_there = self._live.get(live.submission.request_id) is live
            if is_there:
                del self._live[live.submission.request_id]
                self._compiling.discard(live)
                live.submission.on_change = None
            return is_there

    def _die(self, error: BaseException) -> None:
        """Gives the error to all who wait, and to all who come."""
        logging.error("the engine's thread ends, no request is served any longer", exc_info=error)
        with self._condition:
            self.error, lives = error, list(self._live.values())
            for each in (self._live, self._inbox, self._compiling):
                each.clear()
        for live in lives:
            live.submission.error = self._death()
        with contextlib.suppress(Exception):  # the books may be what failed
            self._client.abort_all([live.submission for live in lives])
        for live in lives:
            self._call_in(live.loop, [live], [])
