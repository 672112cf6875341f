"""Late programs: step programs that were not compiled ahead are compiled beside the steps that run, not between."""

import concurrent.futures
from collections.abc import Callable, Sequence

from photon_jax.client.submission import Submission
from photon_jax.engine.engine import Engine
from photon_jax.engine.warmup import num_threads
from photon_jax.step_io import StepLayout


class LatePrograms:
    """Compiles in threads of its own, on all cores at once, what those need that run together.

    Meanwhile their steps come in larger programs that are there; whoever needs something that none of these has waits.
    """

    def __init__(self, engine: Engine, on_program: Callable[[], None]) -> None:
        """Compiles nothing yet.

        Args:
          on_program: called after each program, in the thread that compiled it.
        """
        self._engine = engine
        self._on_program = on_program
        self._num_threads = num_threads()
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads, "photon-compile")
        self._compiling: set[StepLayout] = set()
        self._failed: set[StepLayout] = set()  # left to the steps that need them, which will fail too, and tell of it

    def can_run(self, submissions: Sequence[Submission]) -> bool:
        """Returns whether no step of these waits for a program; what they may need is compiled from now on.

        Call it again after each program, for those that are there then, as it begins no more of them than there are
        cores. Callers take turns.

        One that begins alone makes nobody wait, and needs fewer programs than it may need: it comes to its end sooner
        when they are compiled as its steps meet them.

        Args:
          submissions: all that are queued, and maybe more.
        """
        begins_alone = len(submissions) == 1 and submissions[0].num_output_tokens == 0
        samples = [] if begins_alone else [sample for each in submissions for sample in each.samples]
        new = [sample.request for sample in samples if sample.num_tokens == 0]
        missing = self._engine.missing_programs(
            [sample.request for sample in samples], sum(len(request.prompt_token_ids) for request in new)
        )
        missing = [layout for layout in missing if layout not in self._failed]
        is_ready = self._engine.announce_programs(missing)
        left = [layout for layout in missing if layout not in self._compiling]
        for layout in left[: self._num_threads - len(self._compiling)]:
            self._compiling.add(layout)
            self._pool.submit(self._compile, layout)
        return is_ready

    def _compile(self, layout: StepLayout) -> None:
        is_done = False
        try:
            self._engine.compile_program(layout)
            is_done = True
        finally:
            if not is_done:
                self._failed.add(layout)
            self._compiling.discard(layout)
            self._on_program()

    def close(self) -> None:
        """Ends the threads when the programs that are compiled are done; what is left is dropped."""
        self._pool.shutdown(cancel_futures=True)
        self._engine.announce_programs([])
