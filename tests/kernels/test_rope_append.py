"""Rotary embedding and cache write in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels.rope_append import rope_append, rope_append_reference

LAYER = 1


def make_inputs(num_groups=3, head_dim=64, num_rows=3):
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.standard_normal((num_rows, 2 * (num_groups + 2) * head_dim)), jnp.float32)
    angles = rng.uniform(0, 6, (num_rows, head_dim // 2)).astype(np.float32)
    cache = jnp.asarray(rng.standard_normal((2, 2, 5, 2, 16, head_dim)), jnp.float32)
    return qkv, jnp.cos(angles), jnp.sin(angles), cache[0], cache[1], jnp.asarray([17, 79, 30], jnp.int32)


@pytest.mark.parametrize("num_groups", [3])
def test_kernel_gives_the_reference_result_and_touches_nothing_else(num_groups):
    inputs = make_inputs(num_groups)
    expected = rope_append_reference(*inputs, LAYER)
    found = rope_append(*inputs, LAYER, interpret=True)
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


def test_it_lowers_for_cuda():
    cache = jax.ShapeDtypeStruct((16, 512, 8, 64, 64), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    arguments = (jax.ShapeDtypeStruct((8, 3072), jnp.bfloat16), table, table, cache, cache)
    text = lower_for_cuda(lambda *a: rope_append(*a, 3), *arguments, jax.ShapeDtypeStruct((8,), jnp.int32))
    assert text is None or text.count("xla.gpu.triton") == 1


def test_shapes_that_do_not_fit_are_named():
    qkv, *rest = make_inputs()
    with pytest.raises(ValueError, match=r"qkv \(3, 600\), .* don't fit a cache"):
        rope_append(qkv[:, :600], *rest, LAYER)
