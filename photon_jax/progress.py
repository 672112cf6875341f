"""Progress bars on standard error."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from tqdm import tqdm

from photon_jax.local_client import Submission

REFRESH_S = 0.1


@contextlib.contextmanager
def loading_bar(enabled: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Shows the bytes of a checkpoint that were read; yields what to call after each tensor."""
    with tqdm(desc="loading", unit="B", unit_scale=True, unit_divisor=1024, disable=not enabled) as bar:

        def on_tensor(_: str, num_done: int, num_total: int) -> None:
            bar.total = num_total
            bar.update(num_done - bar.n)

        yield on_tensor


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
def count_bar(what: str, total: int, enabled: bool) -> Iterator[Callable[[], None]]:
    """Shows how many of `total` things are done; yields what to call after each."""
    with tqdm(desc=what, total=total, disable=not enabled) as bar:

        def on_one() -> None:
            bar.update(1)

        yield on_one
