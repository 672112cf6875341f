"""Ordered sums are exact within rounding, and the same bits in every program."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from photon_jax.ops.sums import ordered_sum


@pytest.mark.parametrize("size", [1, 7, 16, 17, 64, 129, 1025])
def test_sum_is_that_of_fsum(size):
    x = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    expected = [math.fsum(row) for row in x.tolist()]
    # an addition rounds by half an ulp of a partial sum, and partial sums are at most the sum of magnitudes
    bound = np.abs(x).sum(axis=1, dtype=np.float64) * 2.0**-23
    assert (np.abs(np.asarray(ordered_sum(jnp.asarray(x)), np.float64) - expected) <= bound).all()


def test_sum_of_small_integers_is_exact():
    x = np.random.default_rng(0).integers(-1000, 1000, (5, 3001))
    np.testing.assert_array_equal(np.asarray(ordered_sum(jnp.asarray(x, jnp.float32))), x.sum(axis=1))


def test_bits_are_the_same_for_any_number_of_rows():
    x = np.random.default_rng(0).standard_normal((32, 576)).astype(np.float32)
    summed = jax.jit(ordered_sum)
    expected = np.asarray(summed(x))
    for num_rows in (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31):
        np.testing.assert_array_equal(np.asarray(summed(x[:num_rows])), expected[:num_rows], err_msg=f"{num_rows}")


def test_only_the_last_axis_is_summed():
    x = np.arange(2 * 3 * 20, dtype=np.float32).reshape(2, 3, 20)
    np.testing.assert_array_equal(np.asarray(ordered_sum(jnp.asarray(x))), x.sum(axis=-1))
    assert ordered_sum(jnp.ones((20,))).shape == ()
