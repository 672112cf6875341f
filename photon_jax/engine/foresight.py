"""Foresight: which step programs a batch may need when a request joins it. Host only."""

import dataclasses
from collections.abc import Collection, Sequence

from photon_jax.cache.layout import CacheLayout
from photon_jax.engine.buckets import BucketSpec
from photon_jax.engine.stand_ins import compile_order
from photon_jax.request import Request
from photon_jax.step_io import StepLayout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """What bounds the steps of requests that run together.

    Attributes:
      num_rows: sequences.
      num_tokens: most tokens of a step.
      num_blocks: cache blocks of the longest sequence at its end.
      has_greedy, has_random: whether a request takes the likeliest tokens, and whether one draws them.
      has_scores, has_controls: whether a request asks for them.
      has_top: whether one asks for more than the likeliest token in the places of its output.
      has_prompt_top: whether one asks for the most likely tokens of its prompt.
    """

    num_rows: int
    num_tokens: int
    num_blocks: int
    has_greedy: bool
    has_random: bool
    has_scores: bool
    has_controls: bool
    has_top: bool
    has_prompt_top: bool

    @classmethod
    def of(cls, requests: Sequence[Request], *, num_prompt_tokens: int, cache: CacheLayout) -> "Crowd":
        """Returns the bounds of requests.

        Args:
          num_prompt_tokens: of prompts that are not computed yet.
          cache: where it may not hold all of them to their ends, some may be preempted, and computed again whole.
        """
        lengths = [len(each.prompt_token_ids) + (each.params.max_tokens or 1) for each in requests]
        num_blocks = [cache.blocks_for(length) for length in lengths]
        may_be_preempted = sum(num_blocks) > cache.num_usable_blocks
        return cls(
            num_rows=len(requests),
            num_tokens=(sum(lengths) if may_be_preempted else num_prompt_tokens) + len(requests),
            num_blocks=max(num_blocks),
            has_greedy=any(not each.params.temperature for each in requests),
            has_random=any(each.params.temperature for each in requests),
            has_scores=any(each.wants_scores for each in requests),
            has_controls=any(each.has_controls for each in requests),
            has_top=any(each.wants_top for each in requests),
            has_prompt_top=any(each.params.prompt_logprobs for each in requests),
        )

    def may_need(self, layout: StepLayout, buckets: BucketSpec) -> bool:
        """Returns whether a step of some of them may come in a layout: in its size, or a larger one of its kind."""
        is_rare = layout.has_scores or layout.has_top or layout.has_controls
        sizes, counts = (
            (buckets.rare_rows, buckets.rare_tokens) if is_rare else (buckets.decode_rows, buckets.mixed_tokens)
        )
        # a layout may be of both kinds, where query tiles are alike
        is_decode = layout.num_tokens == layout.num_rows and layout.query_tile == 1
        is_mixed = layout.num_rows == buckets.mixed_rows and layout.query_tile == buckets.tiles.query_tile
        fits_decode = is_decode and layout.num_tokens <= _bucket(sizes, self.num_rows)
        fits_mixed = is_mixed and layout.num_tokens in counts and layout.num_tokens <= _bucket(counts, self.num_tokens)
        has_top = self.has_top or (self.has_prompt_top and fits_mixed)
        is_general = not layout.is_greedy and (is_rare or not buckets.has_greedy_programs)
        fits_sampling = is_general or (self.has_greedy if layout.is_greedy else self.has_random)
        return (
            (fits_decode or fits_mixed)
            and fits_sampling
            and layout.table_width <= _bucket(buckets.table_widths, self.num_blocks)
            and layout.has_scores <= self.has_scores
            and layout.has_top <= has_top
            and layout.has_controls <= self.has_controls
        )


class Foresight:
    """Tells which programs that are not compiled a crowd may need.

    A server asks at each arrival: what was found is kept for crowds that come in the same buckets, until more programs
    are there.
    """

    def __init__(self, buckets: BucketSpec, cache: CacheLayout) -> None:
        """Takes all programs as not compiled."""
        self._buckets, self._cache = buckets, cache
        self._rows = tuple(sorted({*buckets.decode_rows, *buckets.rare_rows}))
        self._tokens = tuple(sorted({*buckets.mixed_tokens, *buckets.rare_tokens}))
        self._num_there = 0
        self._uncompiled = buckets.layouts()
        self._known: dict[Crowd, list[StepLayout]] = {}

    def missing(
        self, requests: Sequence[Request], num_prompt_tokens: int, there: Collection[StepLayout]
    ) -> list[StepLayout]:
        """Returns the layouts without processors that steps of these requests may come in and that are not there.

        They come in the order in which they are to be compiled, see `compile_order`.

        Args:
          num_prompt_tokens: of prompts that are not computed yet.
          there: those that are compiled; they become more, never fewer.
        """
        if len(there) != self._num_there:
            self._num_there = len(there)
            self._uncompiled = [layout for layout in self._uncompiled if layout not in there]
            self._known.clear()
        if not (self._uncompiled and requests):
            return []
        crowd = self._padded(Crowd.of(requests, num_prompt_tokens=num_prompt_tokens, cache=self._cache))
        if crowd not in self._known:
            needed = [layout for layout in self._uncompiled if crowd.may_need(layout, self._buckets)]
            self._known[crowd] = compile_order(needed, list(there))
        return list(self._known[crowd])

    def _padded(self, crowd: Crowd) -> Crowd:
        """Returns the largest crowd that may need no more than this one."""
        return dataclasses.replace(
            crowd,
            num_rows=_bucket(self._rows, crowd.num_rows),
            num_tokens=_bucket(self._tokens, crowd.num_tokens),
            num_blocks=_bucket(self._buckets.table_widths, crowd.num_blocks),
        )


def _bucket(sizes: tuple[int, ...], count: int) -> int:
    return next((size for size in sizes if size >= count), sizes[-1])
