"""Larger programs stand in for those that are compiled, and the order of compiling gives most soonest."""

import dataclasses

import pytest

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import SchedulerConfig
from photon_jax.engine.buckets import TileChoice, padded_buckets, tiled_buckets
from photon_jax.engine.stand_ins import are_enough, compile_order, find_stand_in, stands_in

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_steps_per_dispatch=4)
CACHE = CacheLayout(num_blocks=100, block_size=4)
PADDED = padded_buckets(CONFIG, CACHE, max_model_len=200)
TILED = tiled_buckets(CONFIG, CACHE, max_model_len=200, tiles=TileChoice((2, 8), query_tile=16))


@pytest.mark.parametrize("buckets", [PADDED, TILED], ids=["padded", "tiled"])
def test_the_largest_step_stands_in_for_all_of_its_kind_and_nothing_smaller_for_it(buckets):
    largest, *others = buckets.plain_layouts()
    single = [layout for layout in others if layout.num_steps == 1]
    assert single and all(stands_in(largest, layout) for layout in single)
    assert not any(stands_in(layout, largest) for layout in others if layout.num_tokens < largest.num_tokens)
    assert not any(stands_in(largest, layout) for layout in others if layout.num_steps > 1)
    rare = dataclasses.replace(largest, has_scores=True, has_top=True, has_controls=True)
    assert all(stands_in(rare, layout) for layout in buckets.layouts() if layout.num_steps == 1)
    for name in ("has_scores", "has_top", "has_controls"):
        assert not stands_in(largest, dataclasses.replace(largest, **{name: True}))


def test_a_greedy_program_stands_in_for_no_random_step_and_a_decode_step_for_no_prompt():
    largest = PADDED.plain_layouts()[0]
    assert not largest.is_greedy and stands_in(largest, dataclasses.replace(largest, is_greedy=True))
    assert not stands_in(dataclasses.replace(largest, is_greedy=True), largest)
    decode = max(PADDED.smallest_decode_layouts() + PADDED.plain_layouts(), key=lambda each: each.query_tile == 1)
    mixed = dataclasses.replace(largest, num_tokens=decode.num_tokens, num_rows=decode.num_rows, table_width=1)
    assert not stands_in(dataclasses.replace(decode, is_greedy=False), mixed)


def test_the_program_of_least_work_is_taken():
    there = PADDED.plain_layouts()
    wanted = dataclasses.replace(there[-1], num_steps=1)
    left = [layout for layout in there if layout != wanted and layout.num_steps == 1]
    found = find_stand_in(wanted, left)
    assert found is not None and found.num_tokens == min(each.num_tokens for each in left if stands_in(each, wanted))
    assert find_stand_in(wanted, []) is None


def test_what_stands_in_for_most_comes_first_then_decode_steps_the_largest_first():
    missing = [layout for layout in PADDED.layouts() if not (layout.has_scores or layout.has_controls)]
    plain = [layout for layout in missing if not layout.has_top]
    assert not are_enough([], plain)
    order = compile_order(missing, plain[:1])
    assert sorted(order, key=str) == sorted(missing, key=str)
    assert order[0].has_top and order[0].num_tokens == 64, "nothing is there for those with the most likely tokens"
    assert are_enough([plain[0], order[0]], missing)
    rest = [layout for layout in order[1:] if not layout.has_top]
    decode = [layout.num_tokens for layout in rest if layout.query_tile == 1]
    assert [layout.num_tokens for layout in rest[: len(decode)]] == decode == sorted(decode, reverse=True)
    assert not any(layout.has_top for layout in order[1 : len(rest) + 1])
    assert rest[0].num_steps == 4, "most steps come so"
