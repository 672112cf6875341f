"""Prefill attention, the specification: each token is a row of decode attention."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.reference import paged_attention_reference


@functools.partial(jax.jit, static_argnames=("query_tile", "scale"))
def prefill_attention_reference(
    q: jax.Array,  # [T H d]
    k: jax.Array,  # [L N K S d]
    v: jax.Array,  # [L N K S d]
    block_tables: jax.Array,  # i32[B P]
    positions: jax.Array,  # i32[T]
    item_rows: jax.Array,  # i32[A]
    item_starts: jax.Array,  # i32[A]
    item_lens: jax.Array,  # i32[A]
    layer: jax.Array | int,  # i32[]
    *,
    query_tile: int,
    k_scale: jax.Array | None = None,  # [L N K S]
    v_scale: jax.Array | None = None,  # [L N K S]
    scale: float | None = None,
) -> jax.Array:  # [T H d]
    """Returns for each token softmax(scale * q k^T) v over its own sequence's tokens up to its position.

    The work list of items says which row of the block tables a token belongs to: item a covers the tokens
    [item_starts[a], item_starts[a] + item_lens[a]), whose positions ascend by one. The keys and values of all tokens,
    those of this call included, are in the cache already. A token of no item gives zeros.

    Args:
      q: bf16, f16 or f32[T H d]
      k: keys of all layers, of q's dtype or int8.
      v: values of all layers, likewise.
      block_tables: physical block of each logical block; entries past the context are read, and weigh 0.
      positions: of the tokens in their sequences.
      item_rows: row of the block tables.
      item_starts: first token.
      item_lens: number of tokens, at most query_tile; 0 for padding.
      layer: which layer of the cache.
      query_tile: most tokens of an item.
      k_scale, v_scale: what an int8 stands for, a number for each token and head; of int8 k and v only.
      scale: of the scores; 1 / sqrt(d) by default.
    """
    num_tokens = q.shape[0]
    offsets = jnp.arange(query_tile)
    is_real = jnp.expand_dims(offsets, 0) < jnp.expand_dims(item_lens, 1)
    tokens = jnp.where(is_real, jnp.expand_dims(item_starts, 1) + jnp.expand_dims(offsets, 0), num_tokens)  # dropped
    rows = jnp.zeros(num_tokens, jnp.int32).at[tokens].set(jnp.expand_dims(item_rows, 1), mode="drop")
    lens = jnp.zeros(num_tokens, jnp.int32).at[tokens].set(1, mode="drop") * (positions + 1)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    out: jax.Array = paged_attention_reference(q, k, v, block_tables[rows], lens, layer, **scales, scale=scale)
    return out
