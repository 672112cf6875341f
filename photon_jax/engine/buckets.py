"""Buckets: the padded sizes that steps come in, and the choice of the smallest that holds a plan. Host only."""

import dataclasses
import itertools

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import SchedulerConfig
from photon_jax.scheduler.plan import StepPlan
from photon_jax.step_io import StepLayout

BASE_ROW_TILE = 8
LARGE_QUERY_TILE = 16
CONTEXT_TILE = 64  # the reference attention reads whole tiles of the table


@dataclasses.dataclass(frozen=True, slots=True)
class TileChoice:
    """Tile sizes whose bits agree, so that programs with different ones can serve one request.

    Attributes:
      row_tiles: ascending, BASE_ROW_TILE among them.
      query_tile: of steps that hold a row with several tokens.
    """

    row_tiles: tuple[int, ...] = (BASE_ROW_TILE,)
    query_tile: int = 1

    def row_tile(self, num_rows: int) -> int:
        """Returns the smallest tile that covers `num_rows`, else the largest."""
        return next((tile for tile in self.row_tiles if tile >= num_rows), self.row_tiles[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class BucketSpec:
    """The allowed sizes, ascending; the last of each covers the scheduler's limits.

    Attributes:
      decode_rows: T = B where every row computes one token.
      mixed_tokens: T of other steps, whose B is mixed_rows.
      table_widths: P.
      has_greedy_programs: whether steps that sample nothing randomly have programs of their own.
    """

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: int
    table_widths: tuple[int, ...]
    tiles: TileChoice
    has_greedy_programs: bool = False

    def choose(self, plan: StepPlan) -> StepLayout:
        """Returns the smallest layout that holds the plan."""
        num_rows = len(plan.scheduled)
        width = _first_at_least(self.table_widths, max(len(item.seq.block_ids) for item in plan.scheduled))
        has_scores = any(item.seq.request.score for item in plan.scheduled)
        is_greedy = self.has_greedy_programs and not any(item.seq.request.params.temperature for item in plan.scheduled)
        make = self._decode if plan.num_tokens == num_rows else self._mixed
        return make(self.choose_tokens(plan), width, has_scores, is_greedy)

    def choose_tokens(self, plan: StepPlan) -> int:
        """Returns T of the layout that holds the plan; only its rows are read, so an applied plan will do."""
        if plan.num_tokens == len(plan.scheduled):
            return _first_at_least(self.decode_rows, len(plan.scheduled))
        return _first_at_least(self.mixed_tokens, plan.num_tokens)

    def layouts(self, *, has_scores: bool) -> list[StepLayout]:
        """Returns every layout that `choose` can give, largest first."""
        greedy = (True, False) if self.has_greedy_programs else (False,)
        decode = itertools.product(self.decode_rows, self.table_widths, (has_scores,), greedy)
        mixed = itertools.product(self.mixed_tokens, self.table_widths, (has_scores,), greedy)
        layouts = [self._decode(*sizes) for sizes in decode] + [self._mixed(*sizes) for sizes in mixed]
        return list(dict.fromkeys(layouts))[::-1]

    def _decode(self, num_rows: int, width: int, has_scores: bool, is_greedy: bool) -> StepLayout:
        return StepLayout(
            num_tokens=num_rows,
            num_rows=num_rows,
            table_width=width,
            query_tile=1,
            row_tile=self.tiles.row_tile(num_rows),
            has_scores=has_scores,
            is_greedy=is_greedy,
        )

    def _mixed(self, num_tokens: int, width: int, has_scores: bool, is_greedy: bool) -> StepLayout:
        return StepLayout(
            num_tokens=num_tokens,
            num_rows=self.mixed_rows,
            table_width=width,
            query_tile=self.tiles.query_tile,
            row_tile=self.tiles.row_tile(num_tokens),
            has_scores=has_scores,
            is_greedy=is_greedy,
        )


def tiled_buckets(config: SchedulerConfig, layout: CacheLayout, *, max_model_len: int, tiles: TileChoice) -> BucketSpec:
    """Returns buckets for the reference ops, which compute only the tiles in use: few sizes suffice."""
    step = tiles.row_tiles[-1]
    rows, tokens = _round_up(config.max_num_seqs, step), _round_up(config.max_num_batched_tokens, step)
    decode_rows = {tile for tile in tiles.row_tiles if tile < config.max_num_seqs} | {
        tiles.row_tile(config.max_num_seqs) if config.max_num_seqs <= step else rows
    }
    return BucketSpec(
        decode_rows=tuple(sorted(decode_rows)),
        mixed_tokens=tuple(sorted({step, tokens})),
        mixed_rows=rows,
        table_widths=(_table_width(layout, max_model_len),),
        tiles=tiles,
    )


def padded_buckets(config: SchedulerConfig, layout: CacheLayout, *, max_model_len: int) -> BucketSpec:
    """Returns buckets for ops that compute the padding too: rows in steps of two, the rest in steps of four."""
    return BucketSpec(
        decode_rows=_ladder(1, config.max_num_seqs, 2),
        mixed_tokens=_ladder(32, config.max_num_batched_tokens, 4),
        mixed_rows=config.max_num_seqs,
        table_widths=_ladder(max(8, CONTEXT_TILE // layout.block_size), _table_width(layout, max_model_len), 4),
        tiles=TileChoice(query_tile=LARGE_QUERY_TILE),
        has_greedy_programs=True,
    )


def _table_width(layout: CacheLayout, max_model_len: int) -> int:
    return _round_up(layout.blocks_for(max_model_len), max(1, CONTEXT_TILE // layout.block_size))


def _ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Returns first, factor * first, ... below last, and last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _first_at_least(sizes: tuple[int, ...], value: int) -> int:
    assert value <= sizes[-1], f"{value} is beyond the largest bucket, {sizes[-1]}"
    return next(size for size in sizes if size >= value)
