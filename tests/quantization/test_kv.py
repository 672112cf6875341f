"""Rounding keys and values to int8: every element within half a scale, whatever the head holds."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from photon_jax.quantization.int8 import MIN_SCALE
from photon_jax.quantization.kv import dequantize_kv, quantize_kv

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
HEAD_DIM = 64


def hard_heads(dtype):
    """Returns one head a kind of vector, [* d]."""
    rng, places = np.random.default_rng(5), np.arange(HEAD_DIM)
    noise = rng.standard_normal(HEAD_DIM)
    outlier = noise * 0.02
    outlier[37] = 1e4
    halves = (rng.integers(-127, 127, HEAD_DIM) + 0.5) / 64  # ties, when the scale is 1/64
    halves[0] = 127 / 64
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.stack(
        [
            np.zeros(HEAD_DIM),
            np.full(HEAD_DIM, 1e-38),
            np.where(places % 2, 1e-38, -1e-38),
            outlier,
            np.where(places % 2, largest, -largest),
            np.where(places % 3, 0.0, largest),
            halves,
            *rng.standard_normal((50, HEAD_DIM)),
            noise * 10.0 ** rng.integers(-4, 4, HEAD_DIM),
        ]
    ).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_element_is_off_by_more_than_half_a_scale_and_zeros_stay(dtype):
    heads = hard_heads(DTYPES[dtype])
    q, scale = quantize_kv(jnp.asarray(heads))
    assert (q.dtype, scale.dtype, scale.shape) == (jnp.int8, jnp.float32, heads.shape[:-1])
    values, scales = np.asarray(q, np.int32), np.asarray(scale, np.float64)
    assert values.min() >= -127 and values.max() <= 127
    assert np.isfinite(scales).all() and (scales >= MIN_SCALE).all()
    exact = values * scales[:, None]
    np.testing.assert_array_equal(np.asarray(dequantize_kv(q, scale, jnp.float32)), exact)
    assert (np.abs(exact - heads.astype(np.float64)) <= scales[:, None] / 2).all()
    assert (values[heads == 0.0] == 0).all()


def test_ties_go_to_even():
    q, _ = quantize_kv(jnp.asarray([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]))
    np.testing.assert_array_equal(q, [127, 0, 2, 2, 0, -2, -2, 126])


def test_each_head_of_each_token_has_its_own_scale():
    heads = np.random.default_rng(0).standard_normal((3, 2, HEAD_DIM)).astype(np.float32)
    q, scale = quantize_kv(jnp.asarray(heads))
    assert scale.shape == (3, 2)
    for token, head in np.ndindex(3, 2):
        alone_q, alone_scale = quantize_kv(jnp.asarray(heads[token, head]))
        np.testing.assert_array_equal(q[token, head], alone_q)
        assert scale[token, head] == alone_scale
