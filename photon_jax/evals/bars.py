"""A progress bar of an evaluation: requests, tokens per second, and the step shapes that were compiled."""

import time
from types import TracebackType

from tqdm import tqdm

from photon_jax.llm import LLM


class EvalBar:
    """A bar on standard error, open inside a `with`; `add` after each finished request."""

    def __init__(self, what: str, num_requests: int, is_hidden: bool, llm: LLM) -> None:
        self._llm = llm
        self._num_tokens = 0
        self._begin = time.perf_counter()
        self._bar = tqdm(desc=what, total=num_requests, disable=is_hidden)

    def add(self, num_tokens: int) -> None:
        """Counts a finished request of so many tokens."""
        self._num_tokens += num_tokens
        if self._bar.update(1):  # it was drawn
            speed = self._num_tokens / (time.perf_counter() - self._begin)
            self._bar.set_postfix_str(f"{speed:.0f} tokens/s, {self._llm.metrics().num_compiles} step shapes")

    def __enter__(self) -> "EvalBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
