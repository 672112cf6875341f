"""Buckets: the padded sizes that steps come in, and the choice of the smallest that holds a plan. Host only."""

import dataclasses
import itertools

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import SchedulerConfig
from photon_jax.scheduler.plan import StepPlan
from photon_jax.step_io import StepLayout

BASE_ROW_TILE = 8
LARGE_QUERY_TILE = 16
FILLED_FROM = 1024  # tokens of a mixed step: with fewer, padding costs less than a step for the rest of a prompt
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
      rare_rows, rare_tokens: those of the two that steps with scores, top or controls come in.
      table_widths: P.
      has_greedy_programs: whether steps that sample nothing randomly have programs of their own.
      num_steps: of a dispatch of decode steps, plain ones or greedy ones with top, ascending.
      filled_tokens: those of mixed_tokens that steps are to fill where enough requests wait, ascending.
    """

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    rare_rows: tuple[int, ...]
    rare_tokens: tuple[int, ...]
    mixed_rows: int
    table_widths: tuple[int, ...]
    tiles: TileChoice
    has_greedy_programs: bool = False
    num_steps: tuple[int, ...] = (1,)
    filled_tokens: tuple[int, ...] = ()

    def choose(self, plan: StepPlan) -> StepLayout:
        """Returns the smallest layout that holds the plan."""
        width = _first_at_least(self.table_widths, max([len(item.seq.block_ids) for item in plan.scheduled]))
        special = [item for item in plan.scheduled if not item.seq.is_plain]
        has_scores, has_top = any(item.scores for item in special), any(item.wants_top for item in special)
        has_controls = any(item.samples and item.seq.request.has_controls for item in special)
        is_rare = has_scores or has_top or has_controls
        is_random = any(item.seq.is_random for item in plan.scheduled)
        if plan.is_decode and not has_scores:  # decode steps with scores are too rare for programs of their own
            rows = _first_at_least(self.rare_rows if is_rare else self.decode_rows, len(plan.scheduled))
            layout = self._decode(rows, width)
        else:
            tokens = _first_at_least(self.rare_tokens if is_rare else self.mixed_tokens, plan.num_tokens)
            layout = self._mixed(tokens, width)
        return dataclasses.replace(
            layout,
            has_scores=has_scores,
            has_top=has_top,
            has_controls=has_controls,
            num_steps=plan.num_steps,
            is_greedy=self.has_greedy_programs and not is_random and (not is_rare or plan.num_steps > 1),
        )

    def layouts(self) -> list[StepLayout]:
        """Returns every layout that `choose` can give, the plain ones first; processors are added when they are met."""
        decode, mixed = self._sizes(self.rare_rows, self.rare_tokens)
        with_top = [dataclasses.replace(layout, has_top=True) for layout in mixed + decode]
        several_with_top = [  # of greedy rows alone: the scheduler takes single steps with random ones
            dataclasses.replace(layout, has_top=True, num_steps=count, is_greedy=self.has_greedy_programs)
            for layout in decode
            for count in self.num_steps
            if count > 1
        ]
        with_scores = [
            dataclasses.replace(layout, has_scores=True, has_top=top) for layout in mixed for top in (False, True)
        ]
        with_controls = [
            dataclasses.replace(layout, has_controls=True) for layout in mixed + decode + with_top + with_scores
        ]
        return list(dict.fromkeys(self.plain_layouts() + with_top + several_with_top + with_scores + with_controls))

    def plain_layouts(self) -> list[StepLayout]:
        """Returns the layouts of steps without scores, top and controls, largest first."""
        decode, mixed = self._sizes(self.decode_rows, self.mixed_tokens)
        greedy = (True, False) if self.has_greedy_programs else (False,)
        sizes = [dataclasses.replace(layout, num_steps=count) for layout in decode for count in self.num_steps] + mixed
        layouts = [dataclasses.replace(layout, is_greedy=each) for layout in sizes for each in greedy]
        return list(dict.fromkeys(layouts))[::-1]  # a mixed size that is a decode size too has the latter's place

    def largest_layouts(self, *, has_rare: bool) -> list[StepLayout]:
        """Returns the layouts of the steps that need the most memory beside the cache, by kind.

        Args:
          has_rare: whether those with scores, top and controls are among them.
        """
        plain = self.plain_layouts()
        decodes = [layout for layout in plain if layout.query_tile == 1]
        decode = max(decodes, key=lambda layout: (layout.num_tokens, layout.num_steps))
        rare = [dataclasses.replace(plain[0], is_greedy=False, has_scores=True, has_top=True, has_controls=True)]
        return list(dict.fromkeys([plain[0], decode, *(rare if has_rare else [])]))

    def smallest_decode_layouts(self) -> list[StepLayout]:
        """Returns the plain layouts of the fewest rows, for each number of steps and with and without random rows."""
        plain = self.plain_layouts()
        sizes = (plain[-1].num_tokens, plain[-1].num_rows, plain[-1].table_width)
        return [layout for layout in plain if (layout.num_tokens, layout.num_rows, layout.table_width) == sizes]

    def _sizes(self, rows: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[list[StepLayout], list[StepLayout]]:
        """Returns the sizes of decode steps and of mixed ones, smallest first."""
        decode = [self._decode(*sizes) for sizes in itertools.product(rows, self.table_widths)]
        mixed = [self._mixed(*sizes) for sizes in itertools.product(tokens, self.table_widths)]
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
    all_rows, all_tokens = tuple(sorted(decode_rows)), tuple(sorted({step, tokens}))
    return BucketSpec(
        decode_rows=all_rows,
        mixed_tokens=all_tokens,
        rare_rows=all_rows,
        rare_tokens=all_tokens,
        mixed_rows=rows,
        table_widths=(_table_width(layout, max_model_len),),
        tiles=tiles,
        num_steps=_num_steps(config),
    )


def padded_buckets(
    config: SchedulerConfig, layout: CacheLayout, *, max_model_len: int, min_rows: int = 1
) -> BucketSpec:
    """Returns buckets for ops that compute the padding too: fine where steps are common or long, else coarse.

    Args:
      min_rows: of the smallest decode step.
    """
    rows = max(config.max_num_seqs, min_rows)
    tokens = max(config.max_num_batched_tokens, rows)
    mixed_tokens = _mixed_ladder(tokens)
    return BucketSpec(
        decode_rows=_decode_ladder(min_rows, rows),
        mixed_tokens=mixed_tokens,
        rare_rows=_ladder(8, rows, 8) if rows > 8 else (rows,),
        rare_tokens=_ladder(128, tokens, 4),
        mixed_rows=rows,
        table_widths=_ladder(max(8, CONTEXT_TILE // layout.block_size), _table_width(layout, max_model_len), 4),
        tiles=TileChoice(query_tile=LARGE_QUERY_TILE),
        has_greedy_programs=True,
        num_steps=_num_steps(config),
        filled_tokens=tuple(size for size in mixed_tokens if size >= FILLED_FROM),
    )


def _num_steps(config: SchedulerConfig) -> tuple[int, ...]:
    return tuple(sorted({1, config.max_steps_per_dispatch or 1}))


def _table_width(layout: CacheLayout, max_model_len: int) -> int:
    return _round_up(layout.blocks_for(max_model_len), max(1, CONTEXT_TILE // layout.block_size))


def _ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Returns first, factor * first, ... below last, and last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def _decode_ladder(first: int, last: int) -> tuple[int, ...]:
    """Returns the powers of two, and from 128 on 3/2 of each too, between `first` and `last`.

    With so many rows a step takes as long as it has rows. As a crowd of 2,000 thins out, the places between cost 2 % of
    all its time.
    """
    powers = _ladder(first, last, 2)
    halves = {size * 3 // 2 for size in powers if size >= 128}
    return tuple(sorted({*powers, *(size for size in halves if size < last)}))


def _mixed_ladder(last: int) -> tuple[int, ...]:
    """Returns 32, 128, 256, from there on 3/2 and 4/3 of the one before in turn, beyond 1,024 four sizes to a doubling,
    up to `last`.

    Of the tokens of chats that come faster than they are served (lognormal lengths, 256 to 1,024 sequences) 11 to 15 %
    are padding with two sizes to a doubling; it would be half with steps of four, and a quarter with steps of two. Four
    sizes where steps are long halve what long ones pad.
    """
    powers = _ladder(256, last, 2)
    quarters = {size * part // 4 for size in powers if size >= 1024 for part in (5, 7)}
    sizes = {32, 128, *powers, *(size * 3 // 2 for size in powers), *quarters}
    return (*sorted(size for size in sizes if size < last), last)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _first_at_least(sizes: tuple[int, ...], value: int) -> int:
    assert value <= sizes[-1], f"{value} is beyond the largest bucket, {sizes[-1]}"
    return next(size for size in sizes if size >= value)
