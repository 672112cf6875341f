"""Rounding to int8 in groups: every element within half a scale, whatever the group holds."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from photon_jax.errors import ConfigError
from photon_jax.quantization.int8 import MIN_SCALE, dequantize, quantize_int8

NUM_INPUTS = 160  # one group and a short one of 128, five of 32
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
GROUP_SIZES = [32, 64, 128]


def alternating(value):
    return np.where(np.arange(NUM_INPUTS) % 2, value, -value)


def hard_rows(dtype):
    """Returns one row a kind of group, float64 of what the dtype holds."""
    rng = np.random.default_rng(5)
    top = float(ml_dtypes.finfo(dtype).max)
    noise = rng.standard_normal(NUM_INPUTS)
    outlier = noise * 0.02
    outlier[37] = 1e4
    halves = (rng.integers(-127, 127, NUM_INPUTS) + 0.5) / 64  # ties, when the scale is 1/64
    halves[::32] = 127 / 64
    rows = {
        "all zero": np.zeros(NUM_INPUTS),
        "1e-38": np.full(NUM_INPUTS, 1e-38),
        "alternating 1e-38": alternating(1e-38),
        "smallest normal": alternating(float(ml_dtypes.finfo(dtype).smallest_normal)),
        "an outlier of 1e4": outlier,
        "alternating largest": alternating(top),
        "largest and zeros": np.where(np.arange(NUM_INPUTS) % 3, 0.0, top),
        "ties": halves,
        "noise": noise,
        "noise of many sizes": noise * 10.0 ** rng.integers(-4, 4, NUM_INPUTS),
        "one value": np.eye(1, NUM_INPUTS, 3)[0] * 0.3,
        "negative": -np.abs(noise),
    }
    return {name: row.astype(dtype) for name, row in rows.items()}


def quantized(dtype, group_size):
    rows = hard_rows(DTYPES[dtype])
    weight = np.stack(list(rows.values()))
    layer = quantize_int8(jnp.asarray(weight), group_size=group_size)
    return list(rows), weight.astype(np.float64), layer


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_element_is_off_by_more_than_half_a_scale(dtype, group_size):
    names, weight, layer = quantized(dtype, group_size)
    out = np.asarray(dequantize(layer.q, layer.scale, group_size=group_size), np.float64)
    half = np.repeat(np.asarray(layer.scale, np.float64) / 2, group_size, axis=1)[:, :NUM_INPUTS]
    for name, error, bound in zip(names, np.abs(out - weight), half, strict=True):
        assert (error <= bound).all(), f"{name}: {error.max()} in a group of scale {2 * bound.max()}"


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_scales_are_finite_and_in_range(dtype, group_size):
    _, weight, layer = quantized(dtype, group_size)
    q, scale = np.asarray(layer.q, np.int32), np.asarray(layer.scale)
    assert layer.q.dtype == jnp.int8 and layer.scale.dtype == jnp.float32
    assert q.min() >= -127 and q.max() <= 127
    assert np.isfinite(scale).all() and (scale >= MIN_SCALE).all()
    assert np.isfinite(np.asarray(dequantize(layer.q, layer.scale, group_size=group_size))).all()
    assert (q[weight == 0.0] == 0).all()


def test_an_outlier_costs_its_own_group_only():
    weight = np.full((1, 128), 0.01, np.float32)
    weight[0, 0] = 1e4
    layer = quantize_int8(jnp.asarray(weight), group_size=32)
    out = np.asarray(dequantize(layer.q, layer.scale, group_size=32))
    assert (out[0, 1:32] == 0.0).all()
    np.testing.assert_allclose(out[0, 32:], 0.01, rtol=1e-4)


def test_ties_go_to_even():
    weight = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], np.float32)
    layer = quantize_int8(jnp.asarray(weight), group_size=8)
    np.testing.assert_array_equal(np.asarray(layer.q), [[127, 0, 2, 2, 0, -2, -2, 126]])


def test_products_of_values_and_scales_are_exact():
    rng = np.random.default_rng(2)
    layer = quantize_int8(jnp.asarray(rng.standard_normal((64, 128)), jnp.float32), group_size=32)
    exact = np.asarray(layer.q, np.float64) * np.repeat(np.asarray(layer.scale, np.float64), 32, axis=1)
    np.testing.assert_array_equal(np.asarray(dequantize(layer.q, layer.scale, group_size=32)), exact)


@pytest.mark.parametrize("num_inputs", [127, 128, 129, 192, 576])
def test_the_last_group_may_be_short(num_inputs):
    weight = np.random.default_rng(num_inputs).standard_normal((3, num_inputs)).astype(np.float32)
    if num_inputs < 128:
        with pytest.raises(ConfigError, match=r"layer layers\[3\]\.o_proj has 127 inputs.*group_size 128"):
            quantize_int8(jnp.asarray(weight), group_size=128, layer="layers[3].o_proj")
        return
    layer = quantize_int8(jnp.asarray(weight), group_size=128)
    assert layer.q.shape == weight.shape and layer.scale.shape == (3, -(-num_inputs // 128))
    start = num_inputs // 128 * 128 if num_inputs % 128 else num_inputs - 128
    alone = quantize_int8(jnp.asarray(weight[:, start:]), group_size=num_inputs - start)
    np.testing.assert_array_equal(np.asarray(layer.q)[:, start:], np.asarray(alone.q))
    np.testing.assert_array_equal(np.asarray(layer.scale)[:, -1:], np.asarray(alone.scale))


def test_a_clip_ratio_shrinks_the_scale_and_saturates_what_is_beyond():
    weight = np.array([[1.0, -1.0, 0.25, 0.5]], np.float32)
    layer = quantize_int8(jnp.asarray(weight), group_size=4, clip_ratio=jnp.full((1, 1), 0.5))
    np.testing.assert_array_equal(np.asarray(layer.q), [[127, -127, 64, 127]])
