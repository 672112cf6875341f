"""The gated MLP against its formula in float64, with row tiles and without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import tiny_config

from photon_jax.config import KernelConfig
from photon_jax.models.params import random_params
from photon_jax.ops.mlp import gate_up
from photon_jax.ops.stream import Stream, add_product
from photon_jax.ops.tiles import RowTiles

REFERENCE = KernelConfig(linear="reference", attention="reference")


def as_float64(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def mlp_formula(x, layer, eps):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * as_float64(layer.post_attention_norm)
    gate, up = np.split(normed @ as_float64(layer.gate_up_proj.weight) + bias_of(layer.gate_up_proj), 2, axis=-1)
    hidden = gate / (1.0 + np.exp(-gate)) * up
    return x + hidden @ as_float64(layer.down_proj.weight) + bias_of(layer.down_proj)


def bias_of(linear):
    return 0.0 if linear.bias is None else as_float64(linear.bias)


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "has_bias", "tolerance"),
    [("float32", True, 2e-6), ("bfloat16", False, 2.0**-8)],  # bf16: normed input and hidden state round to 8 bits
)
def test_mlp_is_that_of_float64(is_tiled, dtype, has_bias, tolerance):
    config = tiny_config(dtype=dtype, has_mlp_bias=has_bias)
    layer = random_params(config, jax.random.key(1)).layers[0]
    x = jax.random.normal(jax.random.key(2), (16, config.hidden_size))
    tiles = RowTiles(8, jnp.int32(16)) if is_tiled else None

    @jax.jit
    def run(x):
        hidden, residual = gate_up(Stream(base=x), layer, config=config, kernels=REFERENCE, tiles=tiles)
        return hidden, add_product(residual, hidden, layer.down_proj, backend="reference", tiles=tiles).settled()

    hidden, out = run(x)
    assert (hidden.dtype, out.dtype) == (jnp.dtype(dtype), jnp.float32)
    expected = mlp_formula(as_float64(x), layer, config.rms_norm_eps)
    error = np.linalg.norm(as_float64(out) - expected) / np.linalg.norm(expected)
    assert error < tolerance, error


def test_gate_comes_before_up():
    config = tiny_config()
    layer = random_params(config, jax.random.key(1)).layers[0]
    weight = layer.gate_up_proj.weight
    closed = dataclasses.replace(layer.gate_up_proj, weight=weight.at[:, : config.mlp_size].set(0.0))
    x = jax.random.normal(jax.random.key(2), (2, config.hidden_size))
    layer = dataclasses.replace(layer, gate_up_proj=closed)
    hidden, _ = gate_up(Stream(base=x), layer, config=config, kernels=REFERENCE, tiles=None)
    np.testing.assert_array_equal(np.asarray(hidden), 0.0)
