"""What comes before attention: norm, projection grouped by KV head, QK-norm, rope, cache write; and both together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.interpreted import interpret_kernels
from helpers.tiny_model import tiny_config

from photon_jax.cache.kv_cache import init_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig
from photon_jax.models.params import random_params
from photon_jax.ops.attention import attend, attention_input
from photon_jax.ops.rope import inverse_frequencies, rope_tables
from photon_jax.ops.stream import Stream
from photon_jax.ops.tiles import RowTiles
from photon_jax.step_io import StepInputs, StepLayout, input_fields

REFERENCE = KernelConfig(linear="reference", attention="reference")

POSITIONS = (0, 1, 17, 4095, 4096, 8191, 100_000, 131_071)
SLOTS = (7, 5, 8, 6, 12, 4, 15, 11)
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-7}  # relative norm; bf16 rounds the normed input and the result


def as_float64(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def norm_formula(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * as_float64(weight)


def rotate(x, config):
    """Rotates in float64; the phase is the float32 product that the definition asks for."""
    frequencies, _ = inverse_frequencies(config.rope, config.head_dim, 4096)
    phases = (np.asarray(POSITIONS, np.float32)[:, None] * frequencies).astype(np.float64)[:, None]
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(phases), np.sin(phases)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def project_formula(x, layer, config):
    """Returns q, k and v by slicing the fused weight: for each KV head its query heads, its key, its value."""
    normed = norm_formula(x, layer.input_norm, config.rms_norm_eps)
    bias = 0.0 if layer.qkv_proj.bias is None else as_float64(layer.qkv_proj.bias)
    heads = np.split(normed @ as_float64(layer.qkv_proj.weight) + bias, config.qkv_size // config.head_dim, axis=-1)
    group = config.num_groups + 2
    q = np.stack([head for i, head in enumerate(heads) if i % group < config.num_groups], axis=1)
    k = np.stack(heads[config.num_groups :: group], axis=1)
    v = np.stack(heads[config.num_groups + 1 :: group], axis=1)
    if config.has_qk_norm:
        q = norm_formula(q, layer.q_norm, config.rms_norm_eps)
        k = norm_formula(k, layer.k_norm, config.rms_norm_eps)
    return rotate(q, config), rotate(k, config), v


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_qwen3", [False, True])
def test_queries_and_cache_hold_the_normed_projected_rotated_input(dtype, is_qwen3):
    config = tiny_config(dtype=dtype, has_qk_norm=is_qwen3, has_qkv_bias=not is_qwen3, num_layers=1)
    layer = random_params(config, jax.random.key(3)).layers[0]
    x = jax.random.normal(jax.random.key(4), (8, config.hidden_size))

    @jax.jit
    def run(x, cache, positions):
        tiles = RowTiles(8, jnp.int32(8)) if is_qwen3 else None
        cos, sin = rope_tables(positions, config=config, seq_len=4096, tiles=tiles)
        slots = jnp.asarray(SLOTS, jnp.int32)
        return attention_input(
            Stream(base=x), cos, sin, layer, cache, slots, layer_index=0, config=config, kernels=REFERENCE, tiles=tiles
        )

    cache = init_kv_cache(config, CacheLayout(num_blocks=4, block_size=4))
    q, cache, residual = run(x, cache, jnp.asarray(POSITIONS, jnp.int32))
    np.testing.assert_array_equal(residual, x)
    # [N K S d] -> [N*S K d]
    k, v = (a[0].transpose(0, 2, 1, 3).reshape(16, config.num_kv_heads, config.head_dim) for a in (cache.k, cache.v))
    slots = np.asarray(SLOTS)
    for ours, expected in zip((q, k[slots], v[slots]), project_formula(as_float64(x), layer, config), strict=True):
        assert ours.dtype == jnp.dtype(dtype)
        errors = np.linalg.norm(as_float64(ours) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert errors.max() < TOLERANCE[dtype], errors
    assert not np.asarray(k.astype(jnp.float32))[np.setdiff1d(np.arange(16), slots)].any()


def decode_inputs(context_lens, *, block_size, width):
    """Returns the inputs of rows of one token each, blocks in descending order; a length of 0 is a padding row."""
    layout = StepLayout(num_tokens=4, num_rows=4, table_width=width, query_tile=1, row_tile=4)
    fields = {field.name: np.zeros(field.shape, field.dtype) for field in input_fields(layout)}
    free = list(range(1, 1 + sum(-(-length // block_size) for length in context_lens)))
    for row, length in enumerate(context_lens):
        for index in range(-(-length // block_size)):
            fields["block_tables"][row, index] = free.pop()
        if length:
            last = length - 1
            fields["positions"][row], fields["item_rows"][row], fields["item_starts"][row] = last, row, row
            fields["item_lens"][row] = 1
            block = fields["block_tables"][row, last // block_size]
            fields["slot_mapping"][row] = block * block_size + last % block_size
    fields["counts"][:] = (3, 3, 3, 0)
    return StepInputs(**{name: jnp.asarray(array) for name, array in fields.items()})


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("is_qwen3", [False, True])
def test_the_kernel_of_decode_steps_gives_what_the_reference_does(monkeypatch, is_qwen3, kv_dtype):
    interpret_kernels(monkeypatch)
    config = tiny_config(dtype="float32", has_qk_norm=is_qwen3, num_layers=2, head_dim=16)
    layer = random_params(config, jax.random.key(3)).layers[1]
    inputs = decode_inputs((1, 64, 70, 0), block_size=64, width=8)
    x = jax.random.normal(jax.random.key(4), (4, config.hidden_size))
    cache = init_kv_cache(config, CacheLayout(num_blocks=6, block_size=64), kv_dtype)
    keys = iter(jax.random.split(jax.random.key(5), 4))
    draw = {jnp.dtype(jnp.int8): lambda key, shape: jax.random.randint(key, shape, -127, 128, jnp.int8)}
    cache = jax.tree.map(lambda leaf: draw.get(leaf.dtype, jax.random.uniform)(next(keys), leaf.shape), cache)

    def run(backend):
        cos, sin = rope_tables(inputs.positions, config=config, seq_len=4096, tiles=None)
        return attend(
            *(Stream(base=x), cos, sin, layer, cache, inputs),
            layer_index=jnp.int32(1),
            config=config,
            kernels=KernelConfig(linear="xla", attention=backend),
            query_tile=1,
            tiles=None,
        )

    (found, found_cache, stream), (expected, expected_cache, _) = run("triton"), run("reference")
    np.testing.assert_array_equal(stream, x)
    np.testing.assert_allclose(found[:3], expected[:3], atol=1e-5 if kv_dtype == "auto" else 1e-2)
    for one, other in zip(jax.tree.leaves(found_cache), jax.tree.leaves(expected_cache), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), other, atol=1 if one.dtype == jnp.int8 else 1e-5)
