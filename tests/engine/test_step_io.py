"""One packed buffer: what the host writes through its views is what the device unpacks, and back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from photon_jax.engine.step import unpack
from photon_jax.request import MAX_STOP_IDS
from photon_jax.step_io import (
    STOP_IDS_WIDTH,
    TOP_WIDTH,
    StepInputs,
    StepLayout,
    StepOutputs,
    host_views,
    input_fields,
    output_fields,
    packed_size,
)

LAYOUT = StepLayout(
    num_tokens=24,
    num_rows=5,
    table_width=3,
    query_tile=16,
    row_tile=8,
    has_scores=True,
    has_top=True,
    has_controls=True,
)


def fill(views, seed=0):
    """Writes random bits of every kind: negative integers, fractions, unsigned numbers above 2**31."""
    rng = np.random.default_rng(seed)
    for view in views.values():
        bits = rng.integers(0, 1 << 32, view.shape, np.uint32)
        view[...] = rng.standard_normal(view.shape) if view.dtype == np.float32 else bits.view(view.dtype)


@pytest.mark.parametrize("has_scores", [False, True])
def test_inputs_come_out_as_they_went_in(has_scores):
    layout = dataclasses.replace(LAYOUT, has_scores=has_scores)
    fields = input_fields(layout)
    buffer = np.zeros(packed_size(fields), np.int32)
    views = host_views(buffer, fields)
    fill(views)
    unpacked = jax.jit(unpack, static_argnames="layout")(jnp.asarray(buffer), layout=layout)
    assert isinstance(unpacked, StepInputs)
    assert tuple(views) == StepInputs._fields
    for name, view in views.items():
        array = np.asarray(getattr(unpacked, name))
        assert (array.dtype, array.shape) == (view.dtype, view.shape), name
        np.testing.assert_array_equal(array, view, err_msg=name)


def test_views_share_the_buffer_and_cover_it_without_overlap():
    for fields in (input_fields(LAYOUT), output_fields(LAYOUT)):
        buffer = np.zeros(packed_size(fields), np.int32)
        for number, view in enumerate(host_views(buffer, fields).values(), start=1):
            assert np.shares_memory(view, buffer) or not view.size
            view.view(np.int32)[...] += number  # a second visit would give a sum
        expected = np.repeat(np.arange(1, len(fields) + 1), [field.size for field in fields])
        np.testing.assert_array_equal(buffer, expected)


def test_fields_have_the_shapes_of_the_layout():
    shapes = {field.name: (field.shape, field.dtype) for field in input_fields(LAYOUT)}
    assert shapes["token_ids"] == shapes["score_indices"] == shapes["target_ids"] == ((24,), np.int32)
    assert shapes["item_rows"] == ((LAYOUT.num_items,), np.int32)
    assert shapes["block_tables"] == ((5, 3), np.int32)
    assert shapes["temperature"] == shapes["top_p"] == shapes["min_p"] == ((5,), np.float32)
    assert shapes["seeds"] == ((5, 2), np.uint32)
    assert shapes["prompt_digests"] == ((5,), np.uint32)
    assert shapes["stop_ids"] == ((5, STOP_IDS_WIDTH), np.int32)
    assert shapes["counts"] == ((4,), np.int32)
    assert STOP_IDS_WIDTH >= MAX_STOP_IDS


def test_scores_and_most_likely_tokens_but_one_take_room_only_where_a_layout_has_them():
    plain = dataclasses.replace(LAYOUT, has_scores=False, has_top=False)
    assert packed_size(input_fields(LAYOUT)) - packed_size(input_fields(plain)) == 2 * 24
    names = {
        (False, False): ["token_ids", "logprobs", "top_ids", "top_logprobs"],
        (True, False): ["token_ids", "logprobs", "top_ids", "top_logprobs", "score_logprobs", "score_is_greedy"],
        (False, True): ["token_ids", "logprobs", "top_ids", "top_logprobs"],
        (True, True): list(StepOutputs._fields),
    }
    for (has_scores, has_top), expected in names.items():
        fields = output_fields(dataclasses.replace(LAYOUT, has_scores=has_scores, has_top=has_top))
        assert [field.name for field in fields] == expected
    shapes = {field.name: field.shape for field in output_fields(plain)}
    assert shapes["top_ids"] == shapes["top_logprobs"] == (5, 1)
    shapes = {field.name: field.shape for field in output_fields(LAYOUT)}
    assert shapes["top_ids"] == shapes["top_logprobs"] == (5, TOP_WIDTH)
    assert shapes["score_top_ids"] == shapes["score_top_logprobs"] == (24, TOP_WIDTH)


@pytest.mark.parametrize("query_tile", [1, 4, 16])
def test_items_suffice_for_the_worst_split_of_tokens_over_rows(query_tile):
    layout = dataclasses.replace(LAYOUT, query_tile=query_tile)
    # one token more than whole tiles, in as many rows as there are
    worst = 0
    for num_rows in range(1, layout.num_rows + 1):
        for first in range(1, layout.num_tokens - num_rows + 2):
            counts = [1] * (num_rows - 1) + [first]
            spread = [(layout.num_tokens + row) // num_rows for row in range(num_rows)]
            worst = max(worst, *(sum(-(-c // query_tile) for c in each) for each in (counts, spread)))
    assert worst <= layout.num_items <= layout.num_tokens
