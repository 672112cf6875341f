"""Warm-up: compiles step programs ahead, several at a time."""

import concurrent.futures
import os
from collections.abc import Callable, Sequence

from photon_jax.engine.runner import ModelRunner
from photon_jax.step_io import StepLayout


def compile_all(
    runner: ModelRunner,
    layouts: Sequence[StepLayout],
    *,
    on_program: Callable[[int, int], None] = lambda num_done, num_total: None,
) -> None:
    """Compiles the step of each layout; they begin in their order, and may end in another.

    Tracing and lowering hold Python's lock, so they take turns; XLA compiles without it, on as many cores as there are.

    Args:
      on_program: called from this thread before the first and after each, with how many are done, and of how many.
    """
    if any(layout.has_controls for layout in layouts):
        runner.make_control_state()  # before the threads, which would each make one
    with concurrent.futures.ThreadPoolExecutor(max_workers=num_threads(), thread_name_prefix="compile") as pool:
        jobs = [pool.submit(runner.compile, layout) for layout in layouts]
        try:
            on_program(0, len(layouts))
            for num_done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
                job.result()
                on_program(num_done, len(layouts))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def num_threads() -> int:
    """Returns how many programs are compiled at once: as many as there are cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
