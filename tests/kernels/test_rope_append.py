"""Rotary embedding and cache write in one kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import KernelUnsupportedError, rope_append, rope_append_reference
from pallas_kernels.rope_append.rounding import int8_scale, round_to_int8
from photon_jax.quantization.kv import quantize_kv

LAYER = 1


def make_inputs(num_groups=3, head_dim=64, num_rows=3, num_parts=1):
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.standard_normal((num_parts, num_rows, 2 * (num_groups + 2) * head_dim)), jnp.float32)
    angles = rng.uniform(0, 6, (num_rows, head_dim // 2)).astype(np.float32)
    cache = jnp.asarray(rng.standard_normal((2, 2, 5, 2, 16, head_dim)), jnp.float32)
    return qkv, jnp.cos(angles), jnp.sin(angles), cache[0], cache[1], jnp.asarray([17, 79, 30], jnp.int32)


def make_int8_inputs(dtype, **sizes):
    """Returns inputs with an int8 cache, its scales, and the dtype of queries."""
    *inputs, k, v, slots = make_inputs(**sizes)
    rng = np.random.default_rng(2)
    k, v = (jnp.asarray(rng.integers(-127, 128, k.shape), jnp.int8) for _ in range(2))
    k_scale, v_scale = (jnp.asarray(rng.uniform(0.1, 1, k.shape[:-1]), jnp.float32) for _ in range(2))
    return (*inputs, k, v, slots), {"k_scale": k_scale, "v_scale": v_scale, "dtype": jnp.dtype(dtype)}


@pytest.mark.parametrize(("head_dim", "num_parts"), [(16, 1), (64, 5)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_kernel_gives_the_reference_result_and_touches_nothing_else(head_dim, has_norms, num_parts):
    inputs, norms = make_inputs(head_dim=head_dim, num_parts=num_parts), {}
    if has_norms:
        q_norm, k_norm = jnp.asarray(np.random.default_rng(1).standard_normal((2, head_dim)), jnp.float32)
        norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": 0.1}
    expected = rope_append_reference(*inputs, LAYER, **norms)
    found = rope_append(*inputs, LAYER, **norms, interpret=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    changed = np.any(np.asarray(found[1] != inputs[3]), axis=(2, 4))
    assert sorted(map(tuple, np.argwhere(changed))) == [(LAYER, 1, 1), (LAYER, 1, 14), (LAYER, 4, 15)]


def test_parts_are_added_one_after_the_other():  # seen in values, which are not turned
    qkv, *rest = make_inputs(num_parts=4)
    total = np.asarray(qkv[0])
    for part in np.asarray(qkv[1:]):
        total = total + part
    for call in (functools.partial(rope_append, interpret=True), rope_append_reference):
        found, expected = (call(parts, *rest, LAYER) for parts in (qkv, jnp.asarray(total[None])))
        np.testing.assert_array_equal(found[2], expected[2])
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_cache_gets_the_bits_that_quantize_kv_gives(dtype):
    inputs, options = make_int8_inputs(dtype, num_parts=2)
    q, k, v, k_scale, v_scale = rope_append(*inputs, LAYER, **options, interpret=True)
    plain_k, plain_v = (jnp.zeros(k.shape, dtype) for _ in range(2))
    plain = rope_append(*inputs[:3], plain_k, plain_v, inputs[5], LAYER, interpret=True)
    np.testing.assert_array_equal(q, plain[0])
    for values, scale, whole, olds in zip((k, v), (k_scale, v_scale), plain[1:], (inputs[3:5]), strict=True):
        expected, expected_scale = quantize_kv(whole)
        is_new = np.asarray(jnp.any(whole != 0, axis=-1))
        assert is_new.sum() == 6  # three tokens of two heads
        np.testing.assert_array_equal(values, jnp.where(is_new[..., None], expected, olds))
        np.testing.assert_array_equal(np.asarray(scale)[is_new], np.asarray(expected_scale)[is_new])
    found = rope_append_reference(*inputs, LAYER, **options)
    for one, other in zip(found[2::2], (v, v_scale), strict=True):  # keys are turned with other bits
        np.testing.assert_array_equal(one, other)


def test_rounding_to_int8_has_the_bits_of_quantize_kv_also_for_ties_zeros_and_large_and_small_heads():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((400, 64)) * 10.0 ** rng.integers(-30, 30, (400, 1))
    x[0], x[1, :], x[1, 0] = 0.0, np.arange(64) + 0.5, 127.0
    x = jnp.asarray(x, jnp.float32)
    scale = int8_scale(jnp.abs(x).max(axis=-1))
    for one, other in zip((jax.jit(round_to_int8)(x, scale[:, None]), scale), quantize_kv(x), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("num_parts", [1, 8])
def test_a_gpu_gives_the_reference_result_into_an_int8_cache(num_parts):
    inputs, options = make_int8_inputs("bfloat16", num_parts=num_parts)
    found = rope_append(*inputs, LAYER, **options)
    expected = rope_append_reference(*inputs, LAYER, **options)
    np.testing.assert_allclose(np.asarray(found[0], np.float32), np.asarray(expected[0], np.float32), rtol=1e-2)
    for values, scale, exact, exact_scale in zip(found[1:3], found[3:], expected[1:3], expected[3:], strict=True):
        np.testing.assert_allclose(scale, exact_scale, rtol=1e-2)
        np.testing.assert_allclose(np.asarray(values, np.int32), np.asarray(exact, np.int32), atol=1)


def test_keys_keep_their_length_and_values_their_bits():
    inputs = make_inputs()
    _, k, v = rope_append_reference(*inputs, LAYER)
    heads = np.asarray(inputs[0][0]).reshape(3, 2, 5, 64)
    np.testing.assert_allclose(
        np.linalg.norm(k[LAYER, 1, :, 1], axis=-1), np.linalg.norm(heads[0, :, 3], axis=-1), rtol=1e-5
    )
    np.testing.assert_array_equal(v[LAYER, 1, :, 1], heads[0, :, 4])


def test_norms_are_those_of_queries_and_keys():
    q_norm, k_norm = jnp.full(64, 2.0), jnp.full(64, 3.0)
    inputs = make_inputs()
    q, k, v = rope_append_reference(*inputs, LAYER, q_norm=q_norm, k_norm=k_norm)
    _, _, plain_v = rope_append_reference(*inputs, LAYER)
    np.testing.assert_allclose(np.linalg.norm(q, axis=-1), 2.0 * 8.0, rtol=1e-5)  # root mean square of 64 values
    np.testing.assert_allclose(np.linalg.norm(k[LAYER, 1, :, 1], axis=-1), 3.0 * 8.0, rtol=1e-5)
    np.testing.assert_array_equal(v, plain_v)


@pytest.mark.lowers
@pytest.mark.parametrize(("head_dim", "norms"), [(64, {}), (128, {"eps": 1e-6})])
def test_it_lowers_for_cuda(head_dim, norms):
    cache = jax.ShapeDtypeStruct((16, 512, 8, 64, head_dim), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((8, head_dim // 2), jnp.float32)
    arguments = (jax.ShapeDtypeStruct((4, 8, 48 * head_dim), jnp.float32), table, table, cache, cache)
    weights = [jax.ShapeDtypeStruct((head_dim,), jnp.bfloat16)] * 2 if norms else []

    def call(qkv, cos, sin, k, v, slots, *weights):
        return rope_append(
            qkv, cos, sin, k, v, slots, 3, **dict(zip(("q_norm", "k_norm"), weights, strict=False)), **norms
        )

    text = lower_for_cuda(call, *arguments, jax.ShapeDtypeStruct((8,), jnp.int32), *weights)
    assert text.count("xla.gpu.triton") == 1 and "stablehlo.add" not in text


@pytest.mark.lowers
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_it_lowers_for_cuda_into_an_int8_cache(device):
    inputs, options = make_int8_inputs("bfloat16", head_dim=64, num_parts=8)
    dtype = options.pop("dtype")
    text = lower_for_cuda(
        lambda inputs, options: rope_append(*inputs, LAYER, **options, dtype=dtype), inputs, options, device=device
    )
    assert text.count("xla.gpu.triton") == 1


def test_shapes_that_do_not_fit_are_named():
    qkv, *rest = make_inputs()
    with pytest.raises(ValueError, match=r"qkv \(1, 3, 600\), .* don't fit a cache"):
        rope_append(qkv[..., :600], *rest, LAYER)
    with pytest.raises(ValueError, match="give both or none"):
        rope_append(qkv, *rest, LAYER, q_norm=jnp.ones(64))
    with pytest.raises(ValueError, match="an int8 cache needs k_scale, v_scale and a dtype for q"):
        rope_append(*make_int8_inputs("bfloat16")[0], LAYER)
    with pytest.raises(KernelUnsupportedError, match="head_dim of at least 16, got 8"):
        rope_append(*make_inputs(head_dim=8), LAYER)
