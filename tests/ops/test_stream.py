"""The residual stream: a product is added, at once or in parts, and a norm gives rows and the stream in one piece."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda
from helpers.tiny_model import tiny_config

from photon_jax.models.params import DenseLinear, random_params
from photon_jax.ops.linear import KERNEL_ROWS, linear_parts
from photon_jax.ops.norm import normed_rows
from photon_jax.ops.stream import Stream, add_product, map_normed
from photon_jax.ops.tiles import RowTiles
from photon_jax.quantization.int8 import quantize_int8


def as_float64(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_a_product_is_added_to_the_residual(is_tiled):
    config = tiny_config(has_o_bias=True)
    layer = random_params(config, jax.random.key(5)).layers[0].o_proj
    attended = jax.random.normal(jax.random.key(6), (8, config.num_heads * config.head_dim))
    residual = jax.random.normal(jax.random.key(7), (8, config.hidden_size))
    tiles = RowTiles(8, jnp.int32(8)) if is_tiled else None
    stream = add_product(residual, attended, layer, backend="reference", tiles=tiles)
    assert stream.parts is None
    product = as_float64(attended) @ as_float64(layer.weight) + as_float64(layer.bias)
    np.testing.assert_allclose(np.asarray(stream.settled()), as_float64(residual) + product, rtol=0.0, atol=5e-6)


def test_the_stream_of_a_bf16_model_is_not_rounded():
    x = jax.random.normal(jax.random.key(2), (2, 48))
    layer = DenseLinear(weight=jnp.ones((96, 48), jnp.bfloat16))
    stream = add_product(x, jnp.zeros((2, 96), jnp.bfloat16), layer, backend="reference", tiles=None)
    np.testing.assert_array_equal(np.asarray(stream.settled()), np.asarray(x))


def test_parts_are_settled_one_after_the_other_and_then_with_the_base():
    base, *parts = np.random.default_rng(0).standard_normal((4, 2, 32)).astype(np.float32)
    stream = Stream(base=jnp.asarray(base), parts=jnp.asarray(np.stack(parts)))
    np.testing.assert_array_equal(stream.settled(), base + ((parts[0] + parts[1]) + parts[2]))


@pytest.mark.parametrize("is_tiled", [False, True])
def test_a_stream_without_parts_is_normed_and_left_as_it_is(is_tiled):
    x, other = (jax.random.normal(jax.random.key(seed), (8, 32)) for seed in (1, 2))
    weight = jax.random.normal(jax.random.key(3), (32,))
    tiles = RowTiles(4, jnp.int32(8)) if is_tiled else None
    options = {"eps": 1e-5, "backend": "reference"}
    reader = DenseLinear(weight=jnp.ones((32, 8)))
    found = map_normed(lambda *rows: rows, Stream(base=x), weight, other, reader=reader, **options, tiles=tiles)
    (normed, same), residual = found
    np.testing.assert_allclose(normed, normed_rows(x, weight, **options), rtol=1e-6)
    np.testing.assert_array_equal(same, other)
    np.testing.assert_array_equal(residual, x)


def test_other_backends_have_one_part():
    layer, x = quantize_int8(jax.random.normal(jax.random.key(1), (64, 128)), group_size=128), jnp.ones((2, 128))
    for backend in ("reference", "xla"):
        assert linear_parts(x, layer, backend=backend).shape == (1, 2, 64)
        assert add_product(jnp.zeros((2, 64)), x, layer, backend=backend, tiles=None).parts is None


@pytest.mark.lowers
@pytest.mark.parametrize("rows", [8, KERNEL_ROWS + 2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_kernels_and_products_of_many_rows_leave_parts_that_the_norm_adds(rows, has_bias):
    layer = quantize_int8(jax.random.normal(jax.random.key(1), (64, 2048)), group_size=128)
    layer = dataclasses.replace(layer, bias=jnp.ones((64,), jnp.bfloat16) if has_bias else None)
    is_parted = rows > KERNEL_ROWS or not has_bias
    reader = DenseLinear(weight=jnp.ones((64, 8), jnp.bfloat16))

    def run(residual, x, layer, weight):
        stream = add_product(residual, x, layer, backend="triton", tiles=None)
        assert (stream.parts is not None) == is_parted
        options = {"reader": reader, "eps": 1e-5, "backend": "triton", "tiles": None}
        (normed,), residual = map_normed(lambda x: (x,), stream, weight, **options)
        return normed, residual

    arguments = jnp.zeros((rows, 64)), jnp.zeros((rows, 2048), jnp.bfloat16), layer, jnp.ones((64,), jnp.bfloat16)
    text = lower_for_cuda(run, *arguments)
    assert ("stablehlo.add" in text) == has_bias
