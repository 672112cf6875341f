"""Rotary embedding and cache write in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import KernelUnsupportedError, rope_append, rope_append_reference

LAYER = 1


def make_inputs(num_groups=3, head_dim=64, num_rows=3):
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.standard_normal((num_rows, 2 * (num_groups + 2) * head_dim)), jnp.float32)
    angles = rng.uniform(0, 6, (num_rows, head_dim // 2)).astype(np.float32)
    cache = jnp.asarray(rng.standard_normal((2, 2, 5, 2, 16, head_dim)), jnp.float32)
    return qkv, jnp.cos(angles), jnp.sin(angles), cache[0], cache[1], jnp.asarray([17, 79, 30], jnp.int32)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("has_norms", [False, True])
def test_kernel_gives_the_reference_result_and_touches_nothing_else(head_dim, has_norms):
    inputs, norms = make_inputs(head_dim=head_dim), {}
    if has_norms:
        q_norm, k_norm = jnp.asarray(np.random.default_rng(1).standard_normal((2, head_dim)), jnp.float32)
        norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": 0.1}
    expected = rope_append_reference(*inputs, LAYER, **norms)
    found = rope_append(*inputs, LAYER, **norms, interpret=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    changed = np.any(np.asarray(found[1] != inputs[3]), axis=(2, 4))
    assert sorted(map(tuple, np.argwhere(changed))) == [(LAYER, 1, 1), (LAYER, 1, 14), (LAYER, 4, 15)]


def test_keys_keep_their_length_and_values_their_bits():
    inputs = make_inputs()
    _, k, v = rope_append_reference(*inputs, LAYER)
    heads = np.asarray(inputs[0]).reshape(3, 2, 5, 64)
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


@pytest.mark.parametrize(("head_dim", "norms"), [(64, {}), (128, {"eps": 1e-6})])
def test_it_lowers_for_cuda(head_dim, norms):
    cache = jax.ShapeDtypeStruct((16, 512, 8, 64, head_dim), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((8, head_dim // 2), jnp.float32)
    arguments = (jax.ShapeDtypeStruct((8, 48 * head_dim), jnp.float32), table, table, cache, cache)
    weights = [jax.ShapeDtypeStruct((head_dim,), jnp.bfloat16)] * 2 if norms else []

    def call(qkv, cos, sin, k, v, slots, *weights):
        return rope_append(
            qkv, cos, sin, k, v, slots, 3, **dict(zip(("q_norm", "k_norm"), weights, strict=False)), **norms
        )

    text = lower_for_cuda(call, *arguments, jax.ShapeDtypeStruct((8,), jnp.int32), *weights)
    assert text is None or text.count("xla.gpu.triton") == 1


def test_shapes_that_do_not_fit_are_named():
    qkv, *rest = make_inputs()
    with pytest.raises(ValueError, match=r"qkv \(3, 600\), .* don't fit a cache"):
        rope_append(qkv[:, :600], *rest, LAYER)
    with pytest.raises(ValueError, match="give both or none"):
        rope_append(qkv, *rest, LAYER, q_norm=jnp.ones(64))
    with pytest.raises(KernelUnsupportedError, match="head_dim of at least 16, got 8"):
        rope_append(*make_inputs(head_dim=8), LAYER)
