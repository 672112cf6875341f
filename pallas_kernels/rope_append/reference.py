"""Rotary embedding and cache write, the specification."""

import jax
import jax.numpy as jnp
from jax import lax


def rope_append_reference(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    layer: jax.Array | int,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q [B H d] in the cache's dtype, and k and v with the new tokens in their slots.

    A head's halves x, y become x cos - y sin, y cos + x sin; queries and keys are turned, values are not. Where there
    are norms, queries and keys are divided by their root mean square before, and weighed (as Qwen3 does).

    Args:
      qkv: [B K*(G+2)*d], for each KV head its G queries, its key and its value.
      cos: f32[B d/2]
      sin: f32[B d/2]
      k: [L N K S d]
      v: [L N K S d]
      slots: i32[B], block * S + offset; no two alike.
      layer: i32[]
      q_norm: [d], or None; k_norm likewise.
      k_norm: [d]
      eps: added to the mean squares.
    """
    num_rows = qkv.shape[0]
    num_kv_heads, block_size, head_dim = k.shape[2:]
    heads = qkv.astype(jnp.float32).reshape(num_rows, num_kv_heads, -1, head_dim)
    turned_heads = heads[:, :, :-1]
    if q_norm is not None and k_norm is not None:
        weights = jnp.stack([q_norm] * (heads.shape[2] - 2) + [k_norm]).astype(jnp.float32)  # [G+1 d]
        mean_square = jnp.mean(turned_heads * turned_heads, axis=-1, keepdims=True)
        turned_heads = turned_heads * lax.rsqrt(mean_square + eps) * jnp.expand_dims(weights, (0, 1))
    x, y = jnp.split(turned_heads, 2, axis=-1)
    cos, sin = jnp.expand_dims(cos, (1, 2)), jnp.expand_dims(sin, (1, 2))
    turned = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1).astype(k.dtype)
    q = turned[:, :, :-1].reshape(num_rows, -1, head_dim)
    blocks, offsets = slots // block_size, slots % block_size
    k = k.at[layer, blocks, :, offsets].set(turned[:, :, -1])
    v = v.at[layer, blocks, :, offsets].set(heads[:, :, -1].astype(v.dtype))
    return q, k, v
