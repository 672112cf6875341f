"""Linear layers and the output projection against products in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels.int8_matmul import int8_matmul_reference
from photon_jax.models.params import DenseLinear
from photon_jax.ops.linear import (
    DENSE_ROWS,
    KERNEL_ROWS,
    _contract_at_once,
    _contract_in_blocks,
    embedding_rows,
    head_logits,
    linear,
    linear_gated,
    linear_parts,
)
from photon_jax.quantization.int8 import dequantize, quantize_int8


def random_arrays(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def as_float64(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_product_plus_bias(has_bias):
    x, weight, bias = random_arrays((5, 48), (48, 20), (20,))
    out = linear(x, DenseLinear(weight=weight, bias=bias if has_bias else None), backend="reference")
    expected = as_float64(x) @ as_float64(weight) + (as_float64(bias) if has_bias else 0.0)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-5)


def test_bf16_product_and_bias_are_summed_in_float32_and_left_to_the_caller_to_round():
    x, weight, bias = random_arrays((5, 512), (512, 20), (20,), dtype=jnp.bfloat16)
    out = linear(x, DenseLinear(weight=weight, bias=bias), backend="reference")
    assert out.dtype == jnp.float32
    expected = as_float64(x) @ as_float64(weight) + as_float64(bias)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-4)  # sums of 512 terms that may cancel


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_are_float32_whatever_the_model_is(dtype):
    x, head = random_arrays((3, 64), (37, 64), dtype=dtype)
    logits = head_logits(x, head, backend="reference")
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(logits), as_float64(x) @ as_float64(head).T, rtol=1e-5, atol=1e-5)


def int8_layer(outputs, inputs, *, group_size, bias=None):
    (weight,) = random_arrays((outputs, inputs))
    return dataclasses.replace(quantize_int8(weight, group_size=group_size), bias=bias)


def as_dense(layer):
    return as_float64(dequantize(layer.q, layer.scale, group_size=layer.group_size))


@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"), [(20, 48, 32), (64, 64, 64), (40, 129, 128), (200, 192, 128)]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_int8_linear_is_the_product_with_the_dequantized_weights(outputs, inputs, group_size, dtype):
    x, bias = random_arrays((5, inputs), (outputs,), dtype=dtype)
    layer = int8_layer(outputs, inputs, group_size=group_size, bias=bias)
    out = linear(x, layer, backend="reference")
    assert out.dtype == jnp.float32
    expected = as_float64(x) @ as_dense(layer).T + as_float64(bias)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=2e-5)


def test_int8_linear_agrees_with_the_kernels_reference():
    (x,) = random_arrays((8, 192))
    layer = int8_layer(200, 192, group_size=128)
    expected = int8_matmul_reference(x, layer.q, layer.scale, group_size=128)
    np.testing.assert_allclose(
        np.asarray(linear(x, layer, backend="reference")), np.asarray(expected), rtol=1e-5, atol=1e-5
    )


def test_int8_logits_and_embedding_rows_share_one_table():
    (x,) = random_arrays((3, 64))
    table = int8_layer(100, 64, group_size=64)
    np.testing.assert_allclose(
        np.asarray(head_logits(x, table, backend="reference")), as_float64(x) @ as_dense(table).T, rtol=1e-5, atol=1e-5
    )
    rows = embedding_rows(table, jnp.array([3, 99, 0]))
    np.testing.assert_array_equal(np.asarray(rows), as_dense(table)[[3, 99, 0]])


def test_blocks_of_outputs_and_the_whole_weight_give_the_same_product():
    (x,) = random_arrays((5, 64))
    layer = int8_layer(150, 64, group_size=32)
    in_blocks, at_once = (fn(x, layer) for fn in (_contract_in_blocks, _contract_at_once))
    np.testing.assert_allclose(np.asarray(in_blocks), np.asarray(at_once), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, KERNEL_ROWS, KERNEL_ROWS + 2])  # both sides of where the kernel ends
def test_int8_kernel_and_what_rides_in_it_give_the_product(rows):
    x, bias = random_arrays((rows, 576), (192,))
    x = x / 24  # products around 1: gate times up of larger ones would magnify the last bits
    layer = int8_layer(192, 576, group_size=128)
    product = as_float64(x) @ as_dense(layer).T
    plain = linear(x, dataclasses.replace(layer, bias=bias), backend="triton")
    np.testing.assert_allclose(np.asarray(plain), product + as_float64(bias), rtol=1e-4, atol=1e-4)
    parts = linear_parts(x, layer, backend="triton")
    np.testing.assert_allclose(as_float64(parts).sum(axis=0), product, rtol=1e-4, atol=1e-4)
    gate, up = product[:, :96], product[:, 96:]
    gated = linear_gated(x, layer, backend="triton", dtype=x.dtype)
    np.testing.assert_allclose(np.asarray(gated), gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.lowers
@pytest.mark.parametrize("rows", [1, KERNEL_ROWS, KERNEL_ROWS + 2])
def test_few_rows_lower_to_a_kernel_and_many_to_a_product_of_dequantized_weights(rows):
    layer = int8_layer(192, 576, group_size=64)
    x = jnp.zeros((rows, 576), jnp.bfloat16)
    text = lower_for_cuda(lambda x, layer: linear_gated(x, layer, backend="triton", dtype=x.dtype), x, layer)
    assert ("int8_dequantize" in text) == (rows > KERNEL_ROWS)
    assert ("stablehlo.dot_general" in text) == (rows > KERNEL_ROWS)


@pytest.mark.lowers
@pytest.mark.parametrize("rows", [DENSE_ROWS[0] - 1, DENSE_ROWS[0], DENSE_ROWS[-1], DENSE_ROWS[-1] + 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dense_weights_have_a_kernel_for_the_rows_that_it_is_faster_for(rows, dtype):
    layer = DenseLinear(weight=jnp.zeros((576, 192), dtype))
    x = jnp.zeros((rows, 576), dtype)
    has_kernel = rows in DENSE_ROWS and dtype == "bfloat16"

    def gated(x, layer):
        return linear_gated(x, layer, backend="triton", dtype=x.dtype)

    def parts(x, layer):
        return linear_parts(x, layer, backend="triton")

    for fn in (gated, parts):
        text = lower_for_cuda(fn, x, layer)
        assert ("uniform_matmul" in text) == has_kernel != ("stablehlo.dot_general" in text)


@pytest.mark.gpu
@pytest.mark.parametrize("has_outputs_first", [False, True])
def test_dense_kernel_gives_the_product(has_outputs_first):
    x, weight, bias = (array.astype(jnp.bfloat16) for array in random_arrays((DENSE_ROWS[-1], 576), (576, 192), (192,)))
    layer = DenseLinear(
        weight=weight.T if has_outputs_first else weight, bias=bias, has_outputs_first=has_outputs_first
    )
    product = as_float64(x) @ as_float64(weight)
    plain = linear(x, layer, backend="triton")
    np.testing.assert_allclose(np.asarray(plain), product + as_float64(bias), rtol=1e-4, atol=1e-3)
