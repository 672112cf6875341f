"""The tokens and log-probabilities of a request depend on the request alone, bit by bit."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.invariance import BLOCK_SIZE, Tally, World, run_schedule, without_extras

from photon_jax.cache import prefix_cache
from photon_jax.engine import controls, input_builder, runner
from photon_jax.engine.step import step
from photon_jax.models import decoder
from photon_jax.scheduler.scheduler import Scheduler

NUM_SCHEDULES = 300


@pytest.fixture(scope="module")
def world():
    return World()


def plain_requests(world):
    """Returns the requests without what takes programs of its own, which all have to be compiled."""
    return [without_extras(request) for request in world.requests]


def test_requests_do_not_depend_on_their_company(world):
    tally = Tally()
    for seed in range(NUM_SCHEDULES):
        run_schedule(world, seed, tally)
    assert tally.schedules == NUM_SCHEDULES
    assert tally.with_preemption >= 0.6 * NUM_SCHEDULES, tally
    assert tally.with_chunks >= 0.5 * NUM_SCHEDULES, tally
    assert tally.with_prefix_hits >= 0.5 * NUM_SCHEDULES, tally
    assert len(tally.token_buckets) >= 3, tally
    assert tally.aborts >= 0.3 * NUM_SCHEDULES, tally
    assert tally.with_overlap >= 0.4 * NUM_SCHEDULES, tally


def test_requests_do_not_depend_on_how_many_steps_a_dispatch_runs(world):
    """Several steps run only where all requests are plain."""
    plain, tally = world.with_requests(plain_requests(world)), Tally()
    for seed in range(100):
        run_schedule(plain, seed, tally)
    assert tally.with_multi_steps >= 35 and tally.with_overlap >= 35, tally
    assert tally.with_preemption >= 50 and tally.with_prefix_hits >= 50 and tally.aborts >= 30, tally


def expect_red(world, num_schedules=60):
    with pytest.raises(AssertionError, match=r"bit by bit|is not"):
        for seed in range(num_schedules):
            run_schedule(world, seed, Tally())


def test_noise_keyed_by_row_turns_it_red(world, monkeypatch):
    fill_rows = input_builder.InputBuilder._fill_rows

    def keyed_by_row(self, views, slots, *facts):
        fill_rows(self, views, slots, *facts)
        views["sample_positions"][: len(slots)] = np.arange(len(slots))

    monkeypatch.setattr(input_builder.InputBuilder, "_fill_rows", keyed_by_row)
    expect_red(world)


def test_resuming_one_token_late_turns_it_red(world, monkeypatch):
    admit = Scheduler._admit

    def admit_late(self, seq, reserve):
        admitted = admit(self, seq, reserve)
        if admitted and seq.num_preemptions and seq.num_uncomputed_tokens > 1:
            seq.num_computed_tokens += 1
        return admitted

    monkeypatch.setattr(Scheduler, "_admit", admit_late)
    expect_red(world)


def test_block_digests_without_their_parent_turn_it_red(world, monkeypatch):
    digest = prefix_cache._digest
    monkeypatch.setattr(prefix_cache, "_digest", lambda data: digest(data[-8 * BLOCK_SIZE :]))
    expect_red(world)


def test_a_stale_token_on_the_device_turns_it_red(world, monkeypatch):
    def always_continues(self, slots, starts, counts, admissions):
        return counts == 1

    monkeypatch.setattr(input_builder.InputBuilder, "_continues", always_continues)
    expect_red(world)


def test_stop_ids_masked_one_token_too_long_turns_it_red(world, monkeypatch):
    fill_rows = input_builder.InputBuilder._fill_rows

    def masks_in_company(self, views, slots, *facts):
        fill_rows(self, views, slots, *facts)
        views["masks_stops"][1 : len(slots)] = 1

    monkeypatch.setattr(input_builder.InputBuilder, "_fill_rows", masks_in_company)
    expect_red(world, num_schedules=300)


def test_counting_only_the_prompt_after_a_preemption_turns_it_red(world, monkeypatch):
    control_row = controls._control_row

    def forget_output(seq, vocab_size):
        return control_row(dataclasses.replace(seq, token_ids=list(seq.request.prompt_token_ids)), vocab_size)

    monkeypatch.setattr(controls, "_control_row", forget_output)
    expect_red(world)


def test_whole_arrays_and_plain_sums_instead_of_tiles_turn_it_red(world, monkeypatch):
    """The same step with no tiles, and sums in the compiler's own order: what tiles and ordered sums are there for."""
    for module in ("stream", "rope", "sampling"):
        monkeypatch.setattr(f"photon_jax.ops.{module}.map_rows", lambda fn, _, *arrays: fn(*arrays))
    for module in ("attention", "norm", "sampling"):
        monkeypatch.setattr(f"photon_jax.ops.{module}.ordered_sum", lambda x, **_: x.sum(axis=-1))

    def plain_step(*args, **kwargs):
        return step(*args, **kwargs)

    def plain_layer(*args, **kwargs):
        return layer(*args, **kwargs)

    layer = decoder._paged_layer.__wrapped__
    fresh = jax.jit(plain_layer, static_argnames=("config", "kernels", "query_tile"))  # the other one is traced
    monkeypatch.setattr(decoder, "_paged_layer", fresh)
    plain_jit = jax.jit(plain_step, static_argnames=("layout", "config"), donate_argnums=(1, 2))
    monkeypatch.setattr(runner, "jit_step", plain_jit)
    plain = world.with_requests(plain_requests(world))
    plain.buckets = dataclasses.replace(world.buckets, decode_rows=(8,), mixed_tokens=(64,))  # all have to be compiled
    plain.most_steps = (1,)
    expect_red(plain, num_schedules=40)
