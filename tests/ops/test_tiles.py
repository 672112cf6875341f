"""Row tiles give a row the same bits whatever its place, its company and the number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.config import KernelConfig
from photon_jax.ops.mlp import gate_up
from photon_jax.ops.stream import Stream
from photon_jax.ops.tiles import RowTiles, map_rows

TILE = 8
WIDTH = tiny_config().hidden_size


@jax.jit
def _compute(x, num_rows, layer):
    kernels, tiles = KernelConfig(linear="reference"), RowTiles(TILE, num_rows)
    return gate_up(Stream(base=x), layer, config=tiny_config(), kernels=kernels, tiles=tiles)[0]


def compute(x, num_rows):
    """A norm, a matrix product and a non-linear function: what the compiler orders differently by shape."""
    return np.asarray(_compute(x, jnp.int32(num_rows), tiny_params().layers[0]))


def random_rows(num_rows, seed=0):
    return np.random.default_rng(seed).standard_normal((num_rows, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("size", [8, 16, 48])
def test_rows_have_the_same_bits_in_arrays_of_any_size(size):
    rows = random_rows(48)
    expected = compute(rows, 48)
    for num_rows in {1, 3, size}:
        padded = np.zeros((size, WIDTH), np.float32)
        padded[:num_rows] = rows[:num_rows]
        np.testing.assert_array_equal(compute(padded, num_rows)[:num_rows], expected[:num_rows])


def test_bits_depend_neither_on_place_nor_on_company():
    rows = random_rows(48)
    expected = compute(rows, 48)
    order = np.random.default_rng(1).permutation(48)
    np.testing.assert_array_equal(compute(rows[order], 48), expected[order])
    for place in range(TILE):
        company = 100.0 * random_rows(48, seed=2)
        company[place] = rows[5]
        np.testing.assert_array_equal(compute(company, 48)[place], expected[5])


@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 16, 24])
def test_tiles_past_the_rows_in_use_are_not_computed(num_rows):
    @jax.jit
    def count(x, num_rows):
        return map_rows(lambda x: (x + 1.0,), RowTiles(TILE, num_rows), x)[0]

    num_computed = -(-num_rows // TILE) * TILE
    expected = np.arange(24) < num_computed
    np.testing.assert_array_equal(np.asarray(count(jnp.zeros(24), jnp.int32(num_rows))), expected)


def test_several_arrays_go_in_and_out_with_their_own_shapes_and_types():
    def fn(a, b):
        return a.sum(axis=1) + b.astype(jnp.float32), jnp.expand_dims(b, 1)

    a, b = jnp.arange(48.0).reshape(16, 3), jnp.arange(16)
    total, column = map_rows(fn, RowTiles(TILE, jnp.int32(16)), a, b)
    whole_total, whole_column = map_rows(fn, None, a, b)
    assert (total.shape, total.dtype, column.shape, column.dtype) == ((16,), a.dtype, (16, 1), b.dtype)
    np.testing.assert_array_equal(total, whole_total)
    np.testing.assert_array_equal(column, whole_column)
    np.testing.assert_array_equal(np.asarray(total), np.asarray(a).sum(axis=1) + np.arange(16))


def test_rows_that_fill_no_whole_tile_are_refused():
    with pytest.raises(AssertionError, match="12 rows are no multiple of the row tile 8"):
        map_rows(lambda x: (x,), RowTiles(TILE, jnp.int32(12)), jnp.zeros((12, 2)))
