"""Several decode steps in one dispatch give what as many dispatches give, row by row, and rows that end are masked."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.cache.kv_cache import init_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig
from photon_jax.engine.step import StepConfig, init_batch_state, jit_step
from photon_jax.step_io import TOP_WIDTH, StepLayout, host_views, input_fields, output_fields, packed_size

NUM_STEPS = 4
ONE = StepLayout(num_tokens=4, num_rows=4, table_width=32, query_tile=1, row_tile=4)
SEVERAL = dataclasses.replace(ONE, num_steps=NUM_STEPS)
BLOCK_SIZE = 2
CONFIG = StepConfig(
    model=tiny_config(), kernels=KernelConfig(linear="reference", attention="reference"), max_model_len=64
)
ROWS = 3  # the fourth is padding
SAMPLED = ("token_ids", "logprobs", "top_ids", "top_logprobs")
TEMPERATURES = (0.0, 0.9, 1.3)


def start():
    cache = init_kv_cache(CONFIG.model, CacheLayout(num_blocks=14, block_size=BLOCK_SIZE))
    return cache, init_batch_state(4)


def make_buffer(layout, position, *, continues, num_steps=(NUM_STEPS,) * ROWS, stop_ids=(), num_masked=0):
    """Returns the packed inputs of rows whose next token has a position; row r has blocks 1 + 4 r and on."""
    fields = input_fields(layout)
    buffer = np.zeros(packed_size(fields), np.int32)
    views = host_views(buffer, fields)
    rows = np.arange(ROWS)
    views["token_ids"][:ROWS] = 50 + rows
    views["positions"][:ROWS] = position
    views["block_tables"][:ROWS, :4] = 1 + 4 * rows[:, None] + np.arange(4)
    views["slot_mapping"][:ROWS] = views["block_tables"][rows, position // BLOCK_SIZE] * BLOCK_SIZE
    views["slot_mapping"][:ROWS] += position % BLOCK_SIZE
    views["item_rows"][:ROWS] = views["item_starts"][:ROWS] = views["logits_indices"][:ROWS] = rows
    views["item_lens"][:ROWS] = 1
    views["state_slots"][:ROWS] = rows + 1
    views["continues"][:ROWS] = continues
    views["sample_positions"][:ROWS] = position + 1
    views["temperature"][:ROWS], views["top_p"][:] = TEMPERATURES, 1.0
    views["seeds"][:ROWS, 0] = rows
    views["num_stop_ids"][:ROWS] = len(stop_ids)
    views["stop_ids"][:ROWS, : len(stop_ids)] = stop_ids
    if layout.num_steps > 1:
        views["num_steps"][:ROWS], views["num_masked_steps"][:ROWS] = num_steps, num_masked
    else:
        views["masks_stops"][:ROWS] = num_masked > 0
    views["counts"][:] = (ROWS, ROWS, ROWS, 0)
    return jnp.asarray(buffer)


def run(layout, cache, state, buffer):
    outputs, cache, state, _ = jit_step(tiny_params(), cache, state, buffer, layout=layout, config=CONFIG)
    fields = output_fields(layout)
    views = [host_views(part, fields) for part in np.split(np.asarray(outputs), layout.num_steps)]
    return [[view[name][:ROWS] for name in SAMPLED] for view in views], cache, state


def one_by_one(layout=ONE, **fields):
    """Returns each array of SAMPLED, [steps rows *], then cache and state after single steps."""
    results, (cache, state) = [], start()
    for index in range(NUM_STEPS):
        masked = max(fields.get("num_masked", 0) - index, 0)
        buffer = make_buffer(layout, 1 + index, continues=int(index > 0), **(fields | {"num_masked": masked}))
        (result,), cache, state = run(layout, cache, state, buffer)
        results.append(result)
    return *map(np.array, zip(*results, strict=True)), cache, state


def at_once(layout=SEVERAL, **fields):
    results, cache, state = run(layout, *start(), make_buffer(layout, 1, continues=0, **fields))
    return *map(np.array, zip(*results, strict=True)), cache, state


def keys(cache):
    return np.asarray(cache.k[:, 1:])  # the null block holds anything


@pytest.mark.parametrize("has_top", [False, True])
def test_steps_at_once_give_the_bits_of_steps_one_by_one(has_top):
    one, several = (dataclasses.replace(layout, has_top=has_top) for layout in (ONE, SEVERAL))
    expected, found = one_by_one(one), at_once(several)
    for name, ours, theirs in zip(SAMPLED, found, expected, strict=False):
        assert ours.tobytes() == theirs.tobytes(), name
    assert (
        found[2].shape == (NUM_STEPS, ROWS, TOP_WIDTH if has_top else 1) and (found[2][..., 0] == found[0])[:, 0].all()
    )
    assert keys(found[-2]).tobytes() == keys(expected[-2]).tobytes()
    np.testing.assert_array_equal(found[-1].last_token[1:4], expected[-1].last_token[1:4])


@pytest.mark.parametrize("num_steps", [(1, 2, 4), (4, 1, 3)])
def test_rows_have_as_many_steps_as_they_are_given(num_steps):
    expected, found = one_by_one(), at_once(num_steps=num_steps)
    for row, count in enumerate(num_steps):
        np.testing.assert_array_equal(found[0][:count, row], expected[0][:count, row])
        assert found[-1].last_token[row + 1] == expected[0][count - 1, row]
        written = np.flatnonzero(
            np.any(np.asarray(found[-2].k)[0, 1 + 4 * row : 5 + 4 * row] != 0, axis=(1, 3)).ravel()
        )
        assert written.tolist() == list(range(1, 1 + count)), f"row {row} wrote {written}"


def test_a_row_that_samples_a_stop_id_does_no_more():
    expected = one_by_one()
    stop = int(expected[0][1, 1])
    assert stop not in expected[0][:1, 1] and stop not in expected[0][:, 0]
    found = at_once(stop_ids=(stop,))
    np.testing.assert_array_equal(found[0][:2, 1], expected[0][:2, 1])
    np.testing.assert_array_equal(found[0][:, 0], expected[0][:, 0])
    assert found[-1].last_token[2] == stop
    written = np.flatnonzero(np.any(np.asarray(found[-2].k)[0, 5:9] != 0, axis=(1, 3)).ravel())
    assert written.tolist() == [1, 2], "nothing is stored of the stop id"


@pytest.mark.parametrize("num_masked", [1, 2, 4])
def test_stop_ids_are_masked_in_the_first_steps(num_masked):
    stops = tuple({int(token) for token in one_by_one()[0][:2].ravel()})
    expected, found = one_by_one(stop_ids=stops, num_masked=num_masked), at_once(stop_ids=stops, num_masked=num_masked)
    np.testing.assert_array_equal(found[0][:num_masked], expected[0][:num_masked])
    assert not np.isin(found[0][:num_masked], stops).any()
