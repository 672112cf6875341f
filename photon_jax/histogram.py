"""Histogram: how many values fell between which bounds. Host only."""

import bisect

# Seconds, from a token of a small model on a GPU to a request that waited for the better part of an hour.
SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
COUNTS = tuple(float(2**power) for power in range(16))


class Histogram:
    """Counts of values; one thread at a time may add, any may read, which waits for nothing.

    Attributes:
      bounds: upper bounds of the buckets, each included in its bucket; a last bucket has none.
      counts: values in each bucket, one more than there are bounds.
      total: sum of all values.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Counts a value, `count` times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.total += value * count
