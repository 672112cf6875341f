"""What is told while requests run: bars on standard error, and each request that finishes."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

from photon_jax.client.submission import Submission
from photon_jax.errors import RequestError

REFRESH_S = 0.1
OnProgress = Callable[[str, int, int], None]  # what is done ("loading" bytes, "compiling" programs), how much, of what
_Output = TypeVar("_Output")


@contextlib.contextmanager
def loading_bar(progress: bool | OnProgress) -> Iterator[Callable[[str, int, int], None]]:
    """Shows or tells the bytes of a checkpoint that were read; yields what to call after each tensor."""
    with tqdm(desc="loading", unit="B", unit_scale=True, unit_divisor=1024, disable=progress is not True) as bar:

        def on_tensor(_: str, num_done: int, num_total: int) -> None:
            bar.total = num_total
            bar.update(num_done - bar.n)
            if callable(progress):
                progress("loading", num_done, num_total)

        yield on_tensor


def check_bar(progress: object) -> None:
    """Raises RequestError for what does not say whether to show a bar."""
    if not isinstance(progress, bool):
        raise RequestError(f"progress must be True or False, got {progress!r:.100}")


def on_submission(
    on_output: Callable[[int, _Output], None] | None, make: Callable[[Submission], _Output]
) -> Callable[[int, Submission], None] | None:
    """Returns a caller's `on_output` as a function of the submission that its output is made of.

    Raises:
      RequestError: it can't be called.
    """
    if on_output is None:
        return None
    if not callable(on_output):
        raise RequestError(f"on_output must be a function (place, output), got {on_output!r:.100}; None for none")
    return lambda index, submission: on_output(index, make(submission))


@contextlib.contextmanager
def request_bar(submissions: Sequence[Submission], enabled: bool) -> Iterator[Callable[[], None]]:
    """Shows finished requests and output tokens per second; yields what to call after each step."""
    begin = shown_at = time.perf_counter()
    with tqdm(total=len(submissions), unit="request", disable=not enabled) as bar:

        def on_step() -> None:
            nonlocal shown_at
            if time.perf_counter() - shown_at >= REFRESH_S:
                show()
                shown_at = time.perf_counter()

        def show() -> None:
            num_finished = sum(submission.is_finished for submission in submissions)
            num_tokens = sum(submission.num_output_tokens for submission in submissions)
            bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - begin):.1f} tokens/s", refresh=False)
            bar.update(num_finished - bar.n)

        yield on_step if enabled else _do_nothing
        show()


def _do_nothing() -> None:
    pass


@contextlib.contextmanager
def compile_bar(progress: bool | OnProgress) -> Iterator[Callable[[int, int], None]]:
    """Shows or tells how many programs are compiled; yields what to call with how many are done, of how many."""
    with tqdm(desc="compiling", unit="program", disable=progress is not True) as bar:

        def on_program(num_done: int, num_total: int) -> None:
            bar.total = num_total
            bar.update(num_done - bar.n)
            if callable(progress):
                progress("compiling", num_done, num_total)

        yield on_program


@contextlib.contextmanager
def when_finished(
    submissions: Sequence[Submission],
    on_finished: Callable[[int, Submission], None] | None,
    on_step: Callable[[], None],
) -> Iterator[Callable[[], None]]:
    """Yields what to call after each step, which calls `on_step`, and `on_finished` once for each finished submission.

    Requests start in their order, so a step looks only at those before the first that has not started.
    """
    waiting = collections.deque(enumerate(submissions))
    running: list[tuple[int, Submission]] = []

    def tell() -> None:
        nonlocal running
        on_step()
        while waiting and waiting[0][1].started_at is not None:
            running.append(waiting.popleft())
        ended = [pair for pair in running if pair[1].is_finished]
        running = [pair for pair in running if not pair[1].is_finished]
        for index, submission in ended:
            on_finished(index, submission)  # type: ignore[misc]  # only called where it is there

    if on_finished is None:
        yield on_step
    else:
        yield tell
        tell()  # another thread may have stepped last


@contextlib.contextmanager
def count_bar(what: str, total: int, enabled: bool) -> Iterator[Callable[[], None]]:
    """Shows how many of `total` things are done; yields what to call after each."""
    with tqdm(desc=what, total=total, disable=not enabled) as bar:

        def on_one() -> None:
            bar.update(1)

        yield on_one
