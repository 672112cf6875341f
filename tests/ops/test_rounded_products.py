"""Products of many rows whose reader rounds what it makes of them: they come in bfloat16 on a GPU, half the bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda
from helpers.tiny_model import tiny_config

from photon_jax.config import KernelConfig
from photon_jax.models.params import DenseLinear, abstract_params
from photon_jax.ops.attention import qkv_parts
from photon_jax.ops.linear import KERNEL_ROWS, linear_gated, linear_parts
from photon_jax.ops.mlp import gate_up
from photon_jax.ops.stream import Stream, add_product
from photon_jax.quantization.int8 import quantize_int8

MANY = KERNEL_ROWS + 2
TRITON = KernelConfig(linear="triton", attention="triton")


def dense_layer(dtype="bfloat16", **fields):
    weight = jax.random.normal(jax.random.key(1), (64, 96)) / 8.0
    return DenseLinear(weight=weight.astype(dtype), **fields)


def rows_of(count, dtype="bfloat16"):
    return jax.random.normal(jax.random.key(2), (count, 64)).astype(dtype)


def test_the_product_is_rounded_once_and_so_is_the_gate_of_its_halves():
    x, layer = rows_of(MANY), dense_layer()
    exact = np.asarray(x, np.float64) @ np.asarray(layer.weight, np.float64)
    (found,) = linear_parts(x, layer, backend="triton", may_round=True)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2.0**-8, atol=1e-6)
    gate, up = np.split(np.asarray(found, np.float64), 2, axis=1)
    gated = linear_gated(x, layer, backend="triton", dtype=jnp.dtype("bfloat16"))
    np.testing.assert_allclose(np.asarray(gated, np.float64), gate / (1 + np.exp(-gate)) * up, rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "dtype", "backend", "fields", "may_round"),
    [
        (KERNEL_ROWS, "bfloat16", "triton", {}, True),
        (MANY, "float16", "triton", {}, True),
        (MANY, "float32", "triton", {}, True),
        (MANY, "bfloat16", "xla", {}, True),
        (MANY, "bfloat16", "reference", {}, True),
        (MANY, "bfloat16", "triton", {"bias": jnp.ones((96,), jnp.bfloat16)}, True),
        (MANY, "bfloat16", "triton", {}, False),
    ],
)
def test_all_other_products_come_in_float32(rows, dtype, backend, fields, may_round):
    layer = dense_layer(dtype, **fields)
    parts = jax.eval_shape(
        lambda x, w: linear_parts(x, w, backend=backend, may_round=may_round), rows_of(rows, dtype), layer
    )
    assert parts.dtype == jnp.float32


def test_a_product_with_rounded_activations_comes_in_float32():
    layer = quantize_int8(jax.random.normal(jax.random.key(1), (96, 64)), group_size=32)
    for rounds, dtype in ((False, jnp.bfloat16), (True, jnp.float32)):
        layer = dataclasses.replace(layer, int8_activations=rounds)
        parts = jax.eval_shape(lambda x, w: linear_parts(x, w, backend="triton", may_round=True), rows_of(MANY), layer)
        assert parts.dtype == dtype


@pytest.mark.lowers
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_layer_of_many_rows_has_rounded_qkv_and_gates_and_leaves_the_stream_in_float32(is_int8):
    config = tiny_config(dtype="bfloat16")
    layer = abstract_params(config).layers[0]
    if is_int8:
        names = ("qkv_proj", "gate_up_proj", "down_proj")
        shapes = {name: getattr(layer, name).weight.shape[::-1] for name in names}
        layer = dataclasses.replace(
            layer, **{name: quantize_int8(jnp.ones(shape), group_size=32) for name, shape in shapes.items()}
        )

    def run(x, layer):
        parts, residual = qkv_parts(Stream(base=x), layer, config=config, kernels=TRITON)
        hidden, residual = gate_up(Stream(base=residual), layer, config=config, kernels=TRITON, tiles=None)
        return parts, add_product(residual, hidden, layer.down_proj, backend="triton", tiles=None)

    x = jax.ShapeDtypeStruct((MANY, config.hidden_size), jnp.float32)
    text = lower_for_cuda(run, x, layer)
    dtypes = [line.rsplit("x", 1)[-1].rstrip(">") for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert dtypes == ["bf16", "bf16", "f32"]  # of QKV, gate and up, down
