"""The root-mean-square norm against its formula in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from photon_jax.ops.norm import rms_norm


def formula(x, weight, eps):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("shape", [(1, 16), (5, 64), (4, 3, 96)])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_norm_is_that_of_float64(shape, eps):
    rng = np.random.default_rng(0)
    x, weight = (3.0 * rng.standard_normal(s).astype(np.float32) for s in (shape, shape[-1:]))
    out = rms_norm(jnp.asarray(x), jnp.asarray(weight), eps=eps)
    np.testing.assert_allclose(np.asarray(out), formula(x, weight, eps), rtol=1e-6, atol=1e-6)


def test_eps_is_added_to_the_mean_square_and_keeps_zeros_finite():
    out = rms_norm(jnp.zeros((2, 8)), jnp.ones((8,)), eps=1e-5)
    np.testing.assert_array_equal(np.asarray(out), np.zeros((2, 8)))
    x = jnp.full((1, 8), 1e-3)
    np.testing.assert_allclose(np.asarray(rms_norm(x, jnp.ones((8,)), eps=3e-6)), 0.5, rtol=1e-6)


def test_bf16_is_normed_and_weighed_in_float32():
    rng = np.random.default_rng(1)
    # sums of 512 squares of values around 300: bf16 would lose every digit that tells them apart
    x = jnp.asarray(300.0 + rng.standard_normal((4, 512)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(512), jnp.bfloat16)
    out = rms_norm(x, weight, eps=1e-5)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out), formula(x, weight, 1e-5), rtol=1e-6)
