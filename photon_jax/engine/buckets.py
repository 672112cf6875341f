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
      num_steps: of a dispatch of plain decode steps, ascending.
    """

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: int
    table_widths: tuple[int, ...]
    tiles: TileChoice
    has_greedy_programs: bool = False
    num_steps: tuple[int, ...] = (1,)

    def choose(self, plan: StepPlan) -> StepLayout:
        """Returns the smallest layout that holds the plan."""
        width = _first_at_least(self.table_widths, max([len(item.seq.block_ids) for item in plan.scheduled]))
        special = [item for item in plan.scheduled if not item.seq.is_plain]
        has_scores, has_top = any(item.scores for item in special), any(item.wants_top for item in special)
        has_controls = any(item.samples and item.seq.request.has_controls for item in special)
        is_random = any(item.seq.request.params.temperature for item in plan.scheduled)
        make = self._decode if _is_decode(plan) else self._mixed
        return dataclasses.replace(
            make(self.choose_tokens(plan), width),
            has_scores=has_scores,
            has_top=has_top,
            has_controls=has_controls,
            num_steps=plan.num_steps,
            is_greedy=self.has_greedy_programs and not (is_random or has_scores or has_top or has_controls),
        )

    def choose_tokens(self, plan: StepPlan) -> int:
        """Returns T of the layout that holds the plan; only its rows are read, so an applied plan will do."""
        if _is_decode(plan):
            return _first_at_least(self.decode_rows, len(plan.scheduled))
        return _first_at_least(self.mixed_tokens, plan.num_tokens)

    def layouts(self) -> list[StepLayout]:
        """Returns every layout that `choose` can give, the plain ones first; processors are added when they are met."""
        decode, mixed = self._sizes()
        with_top = [dataclasses.replace(layout, has_top=True) for layout in mixed + decode]
        with_scores = [
            dataclasses.replace(layout, has_scores=True, has_top=top) for layout in mixed for top in (False, True)
        ]
        with_controls = [
            dataclasses.replace(layout, has_controls=True) for layout in mixed + decode + with_top + with_scores
        ]
        return list(dict.fromkeys(self.plain_layouts() + with_top + with_scores + with_controls))

    def plain_layouts(self) -> list[StepLayout]:
        """Returns the layouts of steps without scores, most likely tokens and controls, largest first."""
        decode, mixed = self._sizes()
        greedy = (True, False) if self.has_greedy_programs else (False,)
        sizes = [dataclasses.replace(layout, num_steps=count) for layout in decode for count in self.num_steps] + mixed
        layouts = [dataclasses.replace(layout, is_greedy=each) for layout in sizes for each in greedy]
        return list(dict.fromkeys(layouts))[::-1]  # a mixed size that is a decode size too has the latter's place

    def smallest_decode_layouts(self) -> list[StepLayout]:
        """Returns the plain layouts of the fewest rows, for each number of steps."""
        smallest = self.plain_layouts()[-1]
        return [dataclasses.replace(smallest, num_steps=count) for count in self.num_steps]

    def _sizes(self) -> tuple[list[StepLayout], list[StepLayout]]:
        """Returns the sizes of decode steps and of mixed ones, smallest first."""
        decode = [self._decode(*sizes) for sizes in itertools.product(self.decode_rows, self.table_widths)]
        mixed = [self._mixed(*sizes) for sizes in itertools.product(self.mixed_tokens, self.table_widths)]
        return decode, mixed

    def _decode(self, num_rows: int, width: int) -> StepLayout:
        return StepLayout(
            num_tokens=num_rows,
            num_rows=num_rows,
            table_width=width,
            query_tile=1,
            row_tile=self.tiles.row_tile(num_rows),
        )

    def _mixed(self, num_tokens: int, width: int) -> StepLayout:
        return StepLayout(
            num_tokens=num_tokens,
            num_rows=self.mixed_rows,
            table_width=width,
            query_tile=self.tiles.query_tile,
            row_tile=self.tiles.row_tile(num_tokens),
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
        num_steps=_num_steps(config),
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
        num_steps=_num_steps(config),
    )


def _num_steps(config: SchedulerConfig) -> tuple[int, ...]:
    return tuple(sorted({1, config.max_steps_per_dispatch or 1}))


def _has_scores(plan: StepPlan) -> bool:
    return any(item.scores for item in plan.scheduled if not item.seq.is_plain)


def _is_decode(plan: StepPlan) -> bool:
    """Returns whether a layout of one token a row will do; those have no programs with scores, which are rare there."""
    return plan.is_decode and not _has_scores(plan)


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
