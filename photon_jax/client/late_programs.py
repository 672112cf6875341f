"""Late programs: step programs that were not compiled ahead are compiled beside the steps that run, not between."""

import concurrent.futures
from collections.abc import Sequence
from typing import Protocol

from photon_jax.client.submission import Submission
from photon_jax.engine.engine import Engine
from photon_jax.step_io import StepLayout


class Queue(Protocol):
    """Queues a request, unless those before it would wait for programs of it, which it returns.

    With `is_sure` it is queued all the same, unless it was before.
    """

    def __call__(self, *, is_sure: bool = False) -> Sequence[StepLayout]:
        """Does it."""


class LatePrograms:
    """Compiles in a thread of its own what requests need that come while others run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "photon-compile")

    def missing(self, submissions: Sequence[Submission]) -> list[StepLayout]:
        """Returns the programs that would be compiled in the middle of these, of which one is not queued yet.

        One that is alone makes nobody wait, and needs fewer programs than it may need: it comes to its end sooner when
        they are compiled as its steps meet them.
        """
        if len(submissions) == 1:
            return []
        samples = [sample for each in submissions for sample in each.samples]
        new = [sample.request for sample in samples if sample.num_tokens == 0]
        return self._engine.missing_programs(
            [sample.request for sample in samples], sum(len(request.prompt_token_ids) for request in new)
        )

    def compile_until(self, queue: "Queue") -> None:
        """Starts to compile what is missing until a request is queued, and returns at once.

        Args:
          queue: called in the compiling thread before each program; and with is_sure at the end, also when compiling
            failed: so will the step that needs the program, and tells of it.
        """

        def work() -> None:
            try:
                while missing := queue():
                    self._engine.compile_program(missing[0])
            finally:
                queue(is_sure=True)

        self._thread.submit(work)

    def close(self) -> None:
        """Ends the thread when the program that is compiled is done; what is left is dropped."""
        self._thread.shutdown(cancel_futures=True)
