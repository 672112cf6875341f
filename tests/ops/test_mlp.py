"""The gated MLP against its formula in float64, with row tiles and without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import tiny_config

import photon_jax.ops.linear
import photon_jax.ops.norm
import photon_jax.ops.stream
from pallas_kernels import LimbRows
from photon_jax.config import KernelConfig
from photon_jax.models.params import random_params
from photon_jax.ops.linear import LIMB_ROWS, linear
from photon_jax.ops.mlp import gate_up
from photon_jax.ops.stream import Stream, add_product, map_normed
from photon_jax.ops.tiles import RowTiles
from photon_jax.quantization.int8 import dequantize, quantize_int8

REFERENCE = KernelConfig(linear="reference", attention="reference")
TRITON = KernelConfig(linear="triton", attention="triton")
KERNELS = {
    photon_jax.ops.linear: ("fused_matmul", "limb_matmul_parts", "matmul_parts", "silu_mul_limbs"),
    photon_jax.ops.norm: ("rms_norm_kernel",),
    photon_jax.ops.stream: ("add_rms_norm",),
}


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


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run on the CPU."""
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=True))


def int8_layer(config, group_size):
    """Returns a layer with int8 MLP and QKV weights, and the same with the dense weights that they stand for."""
    layer = random_params(config, jax.random.key(1)).layers[0]
    names = ("gate_up_proj", "down_proj", "qkv_proj")
    found = {name: quantize_int8(getattr(layer, name).weight.T, group_size=group_size) for name in names}
    dense = {
        name: dataclasses.replace(getattr(layer, name), weight=dequantize(one.q, one.scale, group_size=group_size).T)
        for name, one in found.items()
    }
    return dataclasses.replace(layer, **found), dataclasses.replace(layer, **dense)


def run_mlp(x, layer, config):
    """Returns the hidden values, the stream after the MLP, and the next QKV projection of its norm."""
    hidden, residual = gate_up(Stream(base=x), layer, config=config, kernels=TRITON, tiles=None)
    stream = add_product(residual, hidden, layer.down_proj, backend="triton", tiles=None)
    options = {"eps": config.rms_norm_eps, "backend": "triton", "tiles": None}

    def project(normed):
        assert isinstance(normed, LimbRows)
        return (linear(normed, layer.qkv_proj, backend="triton"),)

    (projected,), after = map_normed(project, stream, layer.input_norm, reader=layer.qkv_proj, **options)
    np.testing.assert_array_equal(after, stream.settled())
    return hidden, after, projected


def test_an_int8_mlp_of_some_rows_keeps_its_values_in_limbs_between_the_products(interpreted):
    config = tiny_config(dtype="bfloat16")
    layer, dense = int8_layer(config, 32)
    x = jax.random.normal(jax.random.key(2), (20, config.hidden_size))
    hidden, after, projected = run_mlp(x, layer, config)
    assert isinstance(hidden, LimbRows) and hidden.shape == (20, config.mlp_size)
    expected = mlp_formula(as_float64(x), dense, config.rms_norm_eps)
    normed = expected / np.sqrt((expected**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
    normed = normed * as_float64(layer.input_norm) @ as_float64(dense.qkv_proj.weight)
    for found, exact in ((after, expected), (projected, normed)):
        error = np.linalg.norm(as_float64(found) - exact) / np.linalg.norm(exact)
        assert error < 2.0**-14, error  # limbs have steps of 2^-15 of their group's largest value
    for one, other in zip(run_mlp(x[:17], layer, config), (hidden, after, projected), strict=True):
        ours, theirs = (getattr(rows, "scale", rows) for rows in (one, other))
        np.testing.assert_array_equal(ours, theirs[:17])  # whatever the mates


@pytest.mark.parametrize(("rows", "dtype"), [(LIMB_ROWS.start - 1, "bfloat16"), (LIMB_ROWS.start, "float32")])
def test_an_int8_mlp_of_fewer_rows_or_in_float32_keeps_its_values_in_the_dtype_of_the_model(interpreted, rows, dtype):
    config = tiny_config(dtype=dtype)
    layer, _ = int8_layer(config, 32)
    x = jax.ShapeDtypeStruct((rows, config.hidden_size), jnp.float32)
    options = {"config": config, "kernels": TRITON, "tiles": None}
    hidden, _ = jax.eval_shape(lambda x: gate_up(Stream(base=x), layer, **options), x)
    assert (hidden.shape, hidden.dtype) == ((rows, config.mlp_size), jnp.dtype(dtype))
