"""Paged decode attention, the specification: fixed tiles of context in a fixed order, in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

TILE_TOKENS = 64


def _attend_row(
    query: jax.Array,  # f32[K G d], scaled
    k: jax.Array,  # [L N K S d]
    v: jax.Array,  # [L N K S d]
    table: jax.Array,  # i32[P]
    context_len: jax.Array,  # i32[]
    layer: jax.Array,  # i32[]
    k_scale: jax.Array | None,  # [L N K S]
    v_scale: jax.Array | None,  # [L N K S]
) -> jax.Array:  # f32[K G d]
    block_size = k.shape[3]

    def read(array: jax.Array, scale: jax.Array | None, positions: jax.Array) -> jax.Array:  # f32[C K d]
        blocks = table[jnp.minimum(positions // block_size, table.shape[0] - 1)]  # i32[C]
        read = array[layer, blocks, :, positions % block_size].astype(jnp.float32)
        if scale is None:
            return read
        return read * jnp.expand_dims(scale[layer, blocks, :, positions % block_size].astype(jnp.float32), 2)

    def accumulate(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        m, total, acc = carry
        positions = index * TILE_TOKENS + lax.iota(jnp.int32, TILE_TOKENS)
        keys, values = read(k, k_scale, positions), read(v, v_scale, positions)
        scores = jnp.einsum("KGd,CKd->KGC", query, keys, precision=lax.Precision.HIGHEST)
        scores = jnp.where(jnp.expand_dims(positions < context_len, (0, 1)), scores, -jnp.inf)
        m_new = jnp.maximum(m, scores.max(axis=-1, keepdims=True))
        p, alpha = jnp.exp(scores - m_new), jnp.exp(m - m_new)
        total_new = alpha * total + p.sum(axis=-1, keepdims=True)
        mixed = jnp.einsum("KGC,CKd->KGd", p, values, precision=lax.Precision.HIGHEST)
        return m_new, total_new, alpha * acc + mixed

    m = jnp.full((*query.shape[:2], 1), -jnp.inf, jnp.float32)
    num_tiles = (context_len + TILE_TOKENS - 1) // TILE_TOKENS
    _, total, acc = lax.fori_loop(0, num_tiles, accumulate, (m, jnp.zeros_like(m), jnp.zeros_like(query)))
    out: jax.Array = acc / jnp.where(total > 0, total, 1.0)
    return out


@functools.partial(jax.jit, static_argnames=("scale",))
def paged_attention_reference(
    q: jax.Array,  # [B H d]
    k: jax.Array,  # [L N K S d]
    v: jax.Array,  # [L N K S d]
    block_tables: jax.Array,  # i32[B P]
    context_lens: jax.Array,  # i32[B]
    layer: jax.Array | int,  # i32[]
    *,
    k_scale: jax.Array | None = None,  # [L N K S]
    v_scale: jax.Array | None = None,  # [L N K S]
    scale: float | None = None,
) -> jax.Array:  # [B H d]
    """Returns softmax(scale * q k^T) v of one query token a row over the first `context_lens` tokens of its blocks.

    Query head h reads KV head h // (H / K). The context is taken in tiles of 64 tokens in order, with the online
    softmax (running maximum m, total, accumulator acc) in float32, so a row's bits depend on the row alone. A row with
    a context of 0 gives zeros.

    Args:
      q: bf16 or f32[B H d]
      k: keys of all layers, of q's dtype or int8.
      v: values of all layers, likewise.
      block_tables: physical block of each logical block; entries past the context are read, and weigh 0.
      context_lens: visible tokens of each row, at most P * S.
      layer: which layer of the cache.
      k_scale, v_scale: what an int8 stands for, a number for each token and head; of int8 k and v only.
      scale: of the scores; 1 / sqrt(d) by default.
    """
    num_kv_heads, head_dim = k.shape[2], k.shape[4]
    scale = head_dim**-0.5 if scale is None else scale
    layer = jnp.asarray(layer, jnp.int32)

    def attend(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, table, context_len = inputs
        grouped = query.astype(jnp.float32).reshape(num_kv_heads, -1, head_dim) * scale  # f32[K G d]
        attended = _attend_row(grouped, k, v, table, context_len, layer, k_scale, v_scale)
        return attended.astype(q.dtype).reshape(query.shape)

    out: jax.Array = lax.map(attend, (q, block_tables, context_lens))
    return out
