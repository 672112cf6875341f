"""Linear layers and the output projection against products in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from photon_jax.models.params import DenseLinear
from photon_jax.ops.linear import head_logits, linear


def random_arrays(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def as_float64(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_product_plus_bias(has_bias):
    x, weight, bias = random_arrays((5, 48), (48, 20), (20,))
    out = linear(x, DenseLinear(weight=weight, bias=bias if has_bias else None))
    expected = as_float64(x) @ as_float64(weight) + (as_float64(bias) if has_bias else 0.0)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-5)


def test_bf16_product_and_bias_are_summed_in_float32_and_left_to_the_caller_to_round():
    x, weight, bias = random_arrays((5, 512), (512, 20), (20,), dtype=jnp.bfloat16)
    out = linear(x, DenseLinear(weight=weight, bias=bias))
    assert out.dtype == jnp.float32
    expected = as_float64(x) @ as_float64(weight) + as_float64(bias)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-4)  # sums of 512 terms that may cancel


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_float32_whatever_the_model_is(dtype):
    x, head = random_arrays((3, 64), (37, 64), dtype=dtype)
    logits = head_logits(x, head)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(logits), as_float64(x) @ as_float64(head).T, rtol=1e-5, atol=1e-5)
