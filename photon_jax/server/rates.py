"""Rates: what an engine did in the last seconds, from totals that are looked at now and then."""

import collections
import time
from collections.abc import Callable
from typing import NamedTuple

from photon_jax.client.stats import EngineStats

WINDOW_S = 3.0
SAMPLE_S = 0.1  # at most so often


class _Totals(NamedTuple):
    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int


class RecentRates(NamedTuple):
    """Per second, over the last `window_s` seconds."""

    window_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    steps_per_s: float


class Rates:
    """Remembers totals for as long as they are needed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: collections.deque[_Totals] = collections.deque()

    def look(self, stats: EngineStats) -> RecentRates:
        """Takes note of the totals of this moment; returns the rates up to it."""
        now = _Totals(self._clock(), stats.num_prompt_tokens, stats.num_output_tokens, stats.num_steps)
        samples = self._samples
        # one sample from before the window begins it; what is older tells of another time
        while samples and now.at - samples[0].at > WINDOW_S + 2 * SAMPLE_S:
            samples.popleft()
        first = samples[0] if samples else now
        if not samples or now.at - samples[-1].at >= SAMPLE_S:
            samples.append(now)
        span = now.at - first.at
        done = [after - before for before, after in zip(first[1:], now[1:], strict=True)]
        return RecentRates(round(span, 3), *(round(count / span, 2) if span else 0.0 for count in done))
