"""Paged decode attention, the specification: fixed tiles of context in a fixed order, in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rope_append.reference import rope_append_reference

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


@functools.partial(jax.jit, static_argnames=("eps", "scale", "dtype"))
def append_attention_reference(
    qkv: jax.Array,  # [S B K*(G+2)*d]
    cos: jax.Array,  # f32[B d/2]
    sin: jax.Array,  # f32[B d/2]
    k: jax.Array,  # [L N K S d]
    v: jax.Array,  # [L N K S d]
    slots: jax.Array,  # i32[B]
    block_tables: jax.Array,  # i32[B P]
    positions: jax.Array,  # i32[B]
    layer: jax.Array | int,  # i32[]
    *,
    k_scale: jax.Array | None = None,  # f32[L N K S]
    v_scale: jax.Array | None = None,  # f32[L N K S]
    q_norm: jax.Array | None = None,  # [d]
    k_norm: jax.Array | None = None,  # [d]
    eps: float = 0.0,
    scale: float | None = None,
    dtype: jnp.dtype | None = None,
) -> tuple[jax.Array, ...]:
    """Returns attention [B H d] of one new token a row, and k and v with it; of an int8 cache also k_scale and v_scale.

    It is `rope_append_reference`, which takes all arguments but tables and positions, and what
    `paged_attention_reference` then returns of the queries. A row's new token stands at its position, and it sees
    itself and those before. No other row's tables hold the block that it is written to, except the null block, which
    padding rows write to.

    Args:
      positions: at most P * S - 1; where a row's slot is not the place of its position, it is left to the caller what
        the place holds: this one reads it, a kernel takes the new token instead.
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    q, *cache = rope_append_reference(qkv, cos, sin, k, v, slots, layer, **scales, **norms, dtype=dtype)  # type: ignore[arg-type]
    names = ("k", "v", "k_scale", "v_scale")
    arrays = dict(zip(names, cache, strict=False))
    rows = {"block_tables": block_tables, "context_lens": positions + 1, "layer": layer}
    return paged_attention_reference(q, **arrays, **rows, scale=scale), *cache
