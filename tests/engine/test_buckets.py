"""Buckets cover the scheduler's limits, and the smallest one that holds a plan is chosen."""

import dataclasses
import itertools
import random

import pytest
from helpers.tiny_model import tiny_config

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig, SchedulerConfig, make_engine_config
from photon_jax.engine import buckets as buckets_module
from photon_jax.engine import start
from photon_jax.engine.buckets import BucketSpec, TileChoice, padded_buckets, tiled_buckets
from photon_jax.engine.step import StepConfig
from photon_jax.models.config import QuantizationConfig
from photon_jax.ops import attention
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan
from photon_jax.scheduler.sequence import SequenceState

TILE_CHOICES = (
    TileChoice(),
    TileChoice((2, 8)),
    TileChoice((8, 32), query_tile=16),
    TileChoice((2, 8, 32), query_tile=16),
)
LIMITS = ((1, 1), (1, 7), (2, 512), (7, 7), (8, 8), (9, 20), (31, 33), (32, 64), (33, 100), (64, 512), (200, 2048))
GEOMETRIES = ((1, 40), (4, 300), (16, 2048), (64, 1000), (64, 64), (128, 130))  # block size, max_model_len


def make_plan(counts, *, num_blocks=1, score_row=None, temperature=1.0, logprobs=None):
    rows = []
    for row, count in enumerate(counts):
        request = Request(
            request_id=str(row),
            prompt_token_ids=(1,) * count,
            params=SamplingParams(
                max_tokens=1,
                temperature=temperature,
                logprobs=logprobs if row == 0 else None,
                prompt_logprobs=logprobs if row == score_row else None,
            ),
            score=row == score_row,
        )
        blocks = list(range(1, 1 + num_blocks)) if row == 0 else [1]
        seq = SequenceState(
            request=request, arrival=row, token_ids=[1] * count, max_num_slots=count, max_num_blocks=9, block_ids=blocks
        )
        rows.append(ScheduledSequence(seq, 0, count, 1, seq.admission))
    return StepPlan(tuple(rows))


def every_spec():
    """Yields the buckets of many accepted configurations, with the limits that they must cover."""
    for (seqs, tokens), (block_size, max_len) in itertools.product(LIMITS, GEOMETRIES):
        config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
        layout = CacheLayout(num_blocks=10_000, block_size=block_size)
        for tiles in TILE_CHOICES:
            yield config, layout, max_len, tiled_buckets(config, layout, max_model_len=max_len, tiles=tiles)
        for min_rows in (1, 2):
            yield config, layout, max_len, padded_buckets(config, layout, max_model_len=max_len, min_rows=min_rows)


def test_the_largest_bucket_covers_what_the_scheduler_may_plan():
    for config, layout, max_len, spec in every_spec():
        assert spec.mixed_tokens[-1] >= config.max_num_batched_tokens, spec
        assert spec.decode_rows[-1] >= config.max_num_seqs, spec
        assert spec.mixed_rows >= config.max_num_seqs, spec
        assert spec.table_widths[-1] >= layout.blocks_for(max_len), spec
        for sizes in (spec.decode_rows, spec.mixed_tokens, spec.rare_rows, spec.rare_tokens, spec.table_widths):
            assert sizes == tuple(sorted(set(sizes))), spec
        assert (spec.rare_rows[-1], spec.rare_tokens[-1]) == (spec.decode_rows[-1], spec.mixed_tokens[-1])


def test_plans_at_every_limit_have_a_layout_that_holds_them():
    for config, layout, max_len, spec in every_spec():
        rng = random.Random(str(spec))
        everything = set(spec.layouts())
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        shares = [[tokens - seqs + 1, *[1] * (seqs - 1)], [1] * seqs, [1], [tokens]]
        for _ in range(4):
            counts = [1] * rng.randint(1, seqs)
            counts[-1] += rng.randint(0, tokens - len(counts))
            shares.append(counts)
        for counts in shares:
            num_blocks = rng.randint(1, layout.blocks_for(max_len))
            score_row, logprobs = rng.choice([None, 0]), rng.choice([None, 0, 1, 20])
            chosen = spec.choose(make_plan(counts, num_blocks=num_blocks, score_row=score_row, logprobs=logprobs))
            assert chosen.has_scores == (score_row == 0 and counts[0] > 1)
            assert chosen.has_top == ((logprobs or 0) > (score_row is None or counts[0] == 1))
            assert chosen in everything, chosen
            assert chosen.num_tokens >= sum(counts)
            assert chosen.num_rows >= len(counts)
            assert chosen.table_width >= num_blocks
            assert chosen.num_items >= sum(-(-count // chosen.query_tile) for count in counts)


def test_layouts_are_those_that_can_be_chosen_each_once():
    for _, _, _, spec in every_spec():
        layouts = spec.plain_layouts()
        sizes = {(rows, rows, 1) for rows in spec.decode_rows}
        sizes |= {(tokens, spec.mixed_rows, spec.tiles.query_tile) for tokens in spec.mixed_tokens}
        kinds = (False, True) if spec.has_greedy_programs else (False,)
        found = [(lay.num_tokens, lay.num_rows, lay.query_tile, lay.table_width, lay.is_greedy) for lay in layouts]
        wanted = [(*size, *rest) for size in sizes for rest in itertools.product(spec.table_widths, kinds)]
        assert sorted(found) == sorted(wanted), spec
        assert layouts[0].num_tokens == spec.mixed_tokens[-1]  # the largest is compiled first
        assert layouts[0].table_width == spec.table_widths[-1]
        assert spec.layouts()[: len(layouts)] == layouts
        assert len(set(spec.layouts())) == len(spec.layouts())


def test_steps_with_scores_have_programs_of_mixed_steps_only():
    for _, _, _, spec in every_spec():
        kinds = {(lay.num_tokens, lay.num_rows, lay.has_top) for lay in spec.layouts() if lay.has_scores}
        assert kinds == {(tokens, spec.mixed_rows, top) for tokens in spec.rare_tokens for top in (False, True)}
        has_any = [lay for lay in spec.layouts() if lay.has_scores or (lay.has_top and lay.num_steps == 1)]
        assert not any(lay.is_greedy for lay in has_any)


def test_several_steps_with_most_likely_tokens_have_greedy_programs_alone():
    limits = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=64, max_steps_per_dispatch=4)
    spec = padded_buckets(limits, CacheLayout(num_blocks=99, block_size=64), max_model_len=256)
    plan = make_plan([1, 1], temperature=0.0, logprobs=2)
    several = spec.choose(dataclasses.replace(plan, num_steps=4))
    assert several.has_top and several.is_greedy and several.num_steps == 4 and several.num_rows == 8
    found = [lay for lay in spec.layouts() if lay.has_top and lay.num_steps > 1]
    assert several in found and {lay.num_rows for lay in found} == set(spec.rare_rows)
    assert all(lay.is_greedy and not (lay.has_scores or lay.has_controls) for lay in found)
    assert not spec.choose(plan).is_greedy


def test_tokens_and_rows_fill_whole_row_tiles():
    for _, _, _, spec in every_spec():
        if spec.tiles.query_tile == buckets_module.LARGE_QUERY_TILE and len(spec.tiles.row_tiles) == 1:
            continue  # padded buckets: their ops know no row tiles
        for layout in spec.layouts():
            assert layout.num_tokens % layout.row_tile == 0, layout
            assert layout.num_rows % min(layout.row_tile, layout.num_rows) == 0, layout


def test_tables_hold_whole_context_tiles_of_the_reference_attention():
    assert buckets_module.CONTEXT_TILE == attention.CONTEXT_TILE
    for _, layout, _, spec in every_spec():
        tile_blocks = max(1, attention.CONTEXT_TILE // layout.block_size)
        assert all(width % tile_blocks == 0 for width in spec.table_widths), (layout, spec.table_widths)


SPEC = BucketSpec(
    decode_rows=(2, 8, 32),
    mixed_tokens=(32, 512),
    rare_rows=(8, 32),
    rare_tokens=(512,),
    mixed_rows=32,
    table_widths=(4, 16),
    tiles=TILE_CHOICES[-1],
)


@pytest.mark.parametrize(
    ("counts", "num_blocks", "expected"),
    [
        # T, B, P, query tile, row tile
        ([1], 1, (2, 2, 4, 1, 2)),
        ([1, 1], 4, (2, 2, 4, 1, 2)),
        ([1, 1, 1], 5, (8, 8, 16, 1, 8)),
        ([1] * 9, 1, (32, 32, 4, 1, 32)),
        ([2], 1, (32, 32, 4, 16, 32)),
        ([1] * 15 + [17], 1, (32, 32, 4, 16, 32)),
        ([1, 32], 16, (512, 32, 16, 16, 32)),
    ],
)
def test_the_smallest_sizes_are_chosen(counts, num_blocks, expected):
    layout = SPEC.choose(make_plan(counts, num_blocks=num_blocks))
    fields = (layout.num_tokens, layout.num_rows, layout.table_width, layout.query_tile, layout.row_tile)
    assert fields == expected


@pytest.mark.parametrize(("counts", "plain", "rare"), [([1], 2, 8), ([1] * 9, 32, 32), ([2], 32, 512)])
def test_steps_of_a_rare_kind_come_in_fewer_sizes(counts, plain, rare):
    assert SPEC.choose(make_plan(counts)).num_tokens == plain
    assert SPEC.choose(make_plan(counts, logprobs=1)).num_tokens == plain
    assert SPEC.choose(make_plan(counts, logprobs=2)).num_tokens == rare


def test_mixed_steps_of_padded_buckets_grow_by_half_at_most_and_long_ones_by_a_quarter():
    for tokens in (300, 512, 8192, 10_000):
        limits = SchedulerConfig(max_num_batched_tokens=tokens)
        spec = padded_buckets(limits, CacheLayout(num_blocks=99, block_size=64), max_model_len=256)
        sizes = [size for size in spec.mixed_tokens if size >= 256]
        most = {size: 1.25 if size >= 1024 else 1.5 for size in sizes}
        assert all(small < large <= most[small] * small for small, large in itertools.pairwise(sizes)), sizes


def test_padded_steps_without_random_rows_have_programs_of_their_own():
    config, layout = (
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        CacheLayout(num_blocks=9, block_size=64),
    )
    padded = padded_buckets(config, layout, max_model_len=256)
    tiled = tiled_buckets(config, layout, max_model_len=256, tiles=TileChoice())
    assert padded.choose(make_plan((1, 1), temperature=0.0)).is_greedy
    assert not padded.choose(make_plan((1, 1), temperature=0.5)).is_greedy
    assert not tiled.choose(make_plan((1, 1), temperature=0.0)).is_greedy


@pytest.mark.parametrize(
    ("linear", "is_int8", "expected"),
    [("triton", False, 2), ("triton", True, 1), ("xla", False, 1), ("uniform", True, 2)],
)
def test_a_gpu_computes_two_rows_for_one_where_weights_are_dense_or_bits_must_not_change(linear, is_int8, expected):
    model = tiny_config(quantization=QuantizationConfig(group_size=32) if is_int8 else None)
    kernels = KernelConfig(linear=linear, invariant=linear == "uniform")
    config = StepConfig(model=model, kernels=kernels, max_model_len=256)
    planned = start._plan_for(CacheLayout(num_blocks=9, block_size=64), config, make_engine_config(None), None)
    assert planned.buckets.choose(make_plan((1,))).num_tokens == expected


def test_a_plan_beyond_the_largest_bucket_is_a_bug_that_says_so():
    with pytest.raises(AssertionError, match="33 is beyond the largest bucket, 32"):
        SPEC.choose(make_plan([1] * 33))


@pytest.mark.parametrize(
    ("num_rows", "expected"), [(1, 2), (2, 2), (3, 8), (8, 8), (9, 32), (32, 32), (33, 32), (1000, 32)]
)
def test_row_tile_is_the_smallest_that_covers_the_rows_else_the_largest(num_rows, expected):
    assert TileChoice((2, 8, 32)).row_tile(num_rows) == expected


@pytest.mark.parametrize("counts", [[1, 1], [3, 1]])
def test_steps_that_sample_under_controls_have_programs_of_their_own(counts):
    for *_, spec in every_spec():
        if spec.decode_rows[-1] < len(counts) or spec.mixed_tokens[-1] < sum(counts):
            continue
        plan = make_plan(counts, temperature=0.0)
        request = dataclasses.replace(plan.scheduled[0].seq.request, params=SamplingParams(presence_penalty=0.5))
        seq = SequenceState(
            request=request, arrival=0, token_ids=[1] * 3, max_num_slots=3, max_num_blocks=9, block_ids=[1]
        )
        samples, chunk = ((plan.scheduled[0]._replace(seq=seq, num_sampled=count)) for count in (1, 0))
        chosen = spec.choose(StepPlan((samples, plan.scheduled[1])))
        assert chosen.has_controls and not chosen.is_greedy and chosen in spec.layouts()
        assert not spec.choose(StepPlan((chunk, plan.scheduled[1]))).has_controls
