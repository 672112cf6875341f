"""Rotary embedding and cache write, the specification."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.parts import add_parts
from pallas_kernels.rope_append.rounding import int8_scale, round_to_int8


def rope_append_reference(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    layer: jax.Array | int,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, ...]:
    """Returns q [B H d], and k and v with the new tokens in their slots; of an int8 cache also k_scale and v_scale.

    A head's halves x, y become x cos - y sin, y cos + x sin; queries and keys are turned, values are not. Where there
    are norms, queries and keys are divided by their root mean square before, and weighed (as Qwen3 does). All is
    rounded to `dtype`; keys and values of an int8 cache from there to int8, see `rounding`.

    Args:
      qkv: [S B K*(G+2)*d], parts that are added in order; for each KV head its G queries, its key and its value.
      cos, sin: f32[B d/2]
      k, v: [L N K S d]
      slots: i32[B], block * S + offset; no two alike.
      layer: i32[]
      k_scale, v_scale: f32[L N K S] of an int8 cache, else None.
      q_norm, k_norm: [d], or None.
      eps: added to the mean squares.
      dtype: of q, by default the cache's.
    """
    num_rows, dtype, (num_kv_heads, block_size, head_dim) = qkv.shape[1], dtype or k.dtype, k.shape[2:]
    heads = add_parts(qkv.astype(jnp.float32)).reshape(num_rows, num_kv_heads, -1, head_dim)
    turned_heads = heads[:, :, :-1]
    if q_norm is not None and k_norm is not None:
        turned_heads = _normed(turned_heads, q_norm, k_norm, eps)
    turned = _turn(turned_heads, cos, sin).astype(dtype)
    q = turned[:, :, :-1].reshape(num_rows, -1, head_dim)
    new_k, new_v = turned[:, :, -1], heads[:, :, -1].astype(dtype)
    blocks, offsets = slots // block_size, slots % block_size

    def write(array: jax.Array, new: jax.Array) -> jax.Array:
        return array.at[layer, blocks, :, offsets].set(new)

    if k_scale is None or v_scale is None:
        return q, write(k, new_k.astype(k.dtype)), write(v, new_v.astype(v.dtype))
    (k_q, new_k_scale), (v_q, new_v_scale) = _round(new_k), _round(new_v)
    return q, write(k, k_q), write(v, v_q), write(k_scale, new_k_scale), write(v_scale, new_v_scale)


def _normed(heads: jax.Array, q_norm: jax.Array, k_norm: jax.Array, eps: float) -> jax.Array:  # f32[B K G+1 d]
    weights = jnp.stack([q_norm] * (heads.shape[2] - 1) + [k_norm]).astype(jnp.float32)  # [G+1 d]
    mean_square = jnp.mean(heads * heads, axis=-1, keepdims=True)
    return heads * lax.rsqrt(mean_square + eps) * jnp.expand_dims(weights, (0, 1))


def _turn(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:  # f32[B K G+1 d]
    x, y = jnp.split(heads, 2, axis=-1)
    cos, sin = jnp.expand_dims(cos, (1, 2)), jnp.expand_dims(sin, (1, 2))
    return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)


def _round(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # int8[B K d], f32[B K]
    x32 = x.astype(jnp.float32)
    scale = int8_scale(jnp.abs(x32).max(axis=-1))
    return round_to_int8(x32, jnp.expand_dims(scale, -1)), scale
