"""Decode attention that appends the new tokens to the paged cache, Pallas with the Triton backend: Ampere and later.

One program takes one row, one KV head and one split of `split_tokens` context tokens for all query heads of the group.
It makes the new token's heads itself, as `rope_append` does, the queries padded to 16 rows, which is the least a
tensor-core product takes. The split that the new token belongs to begins with it, and
stores its key and value; the other tokens come from the cache, where what lies in the new token's slot weighs nothing.
Splits past the context end at once. With more than one split, a second kernel adds the partial results of a row in
their order, eight at a time.

Int8 keys and values become the queries' dtype tile by tile, each token's times its scale; so does the new token's.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.common.paged import load_dequantized
from pallas_kernels.paged_attention.tiles import TileConfig
from pallas_kernels.rope_append.triton import load_heads, store_head

_LOG2_E = math.log2(math.e)
_COMBINE_SPLITS = 8  # splits added at once; fixed, since it orders the sum
_MIN_DOT_ROWS = 16


def _append_attention_kernel(
    qkv_ref,  # [S B K*(G+2)*d]
    cos_ref,  # f32[B d/2]
    sin_ref,  # f32[B d/2]
    slots_ref,  # i32[B]
    tables_ref,  # i32[B P]
    positions_ref,  # i32[B]
    layer_ref,  # i32[1]
    *refs,  # the cache: k and v [L N K S d], of an int8 one k_scale and v_scale f32[L N K S]; q_norm and k_norm [d]
    # where there are norms; with one split the output [B H d], else the parts f32[splits B H d], their maximum and sum
    # f32[splits B H]; the cache's memory once more
    num_groups: int,
    num_arrays: int,  # of the cache: 2, or 4 with scales
    num_norms: int,
    eps: float,
    dtype: jnp.dtype,
    tiles: TileConfig,
    scale: float,
):
    cache_refs, norm_refs = refs[:num_arrays], refs[num_arrays:][:num_norms]
    out_refs, new_refs = refs[num_arrays + num_norms : -num_arrays], refs[-num_arrays:]
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    start, position, layer = split * tiles.split_tokens, positions_ref[row], layer_ref[0]
    # Never negative: the tables are asked for together with the position, and lie in L1 when the first tile needs them.
    first_block = tables_ref[row, lax.div(start, jnp.int32(cache_refs[0].shape[3]))]
    num_rows = max(_MIN_DOT_ROWS, pl.next_power_of_2(num_groups))

    @pl.when((start <= position) & (first_block >= 0))
    def _():
        slot, block_size = slots_ref[row], cache_refs[0].shape[3]
        place: dict[str, Any] = {"row": row, "kv_head": head}
        sizes: dict[str, Any] = {"num_groups": num_groups, "num_rows": num_rows, "eps": eps, "dtype": dtype}
        heads = load_heads(qkv_ref, cos_ref, sin_ref, norm_refs, **place, **sizes)
        is_own = position < start + tiles.split_tokens
        carry = _begin(heads, new_refs, (layer, slot // block_size, head, slot % block_size), scale, is_own=is_own)
        at = (tables_ref, layer, row, head)
        attend = functools.partial(
            _accumulate, heads.queries, cache_refs, at, start, position, tiles.tile_tokens, scale
        )
        num_tiles = pl.cdiv(jnp.minimum(position - start, tiles.split_tokens), tiles.tile_tokens)
        carry = lax.fori_loop(0, num_tiles, attend, carry)
        group = lax.iota(jnp.int32, num_rows)
        _store_parts(out_refs, carry, row, (group < num_groups, head * num_groups + group), split)


def _begin(heads, new_refs, place, scale, *, is_own):
    """Stores key and value in their place where the new token is the split's own, and returns maximum, sum and
    accumulator of that token alone; where it isn't, of none."""
    scale_refs = new_refs[2:] or (None, None)
    key, value = (
        store_head(new, ref, scale_ref, place, mask=is_own).astype(jnp.float32)
        for new, ref, scale_ref in zip(heads[1:], new_refs[:2], scale_refs, strict=True)
    )
    score = (heads.queries.astype(jnp.float32) * key[None, :]).sum(axis=1) * (scale * _LOG2_E)
    m, total = jnp.where(is_own, score, -jnp.inf), jnp.where(is_own, jnp.ones_like(score), 0.0)
    return m, total, jnp.broadcast_to(jnp.where(is_own, value, 0.0)[None, :], heads.queries.shape)


def _accumulate(queries, cache_refs, at, start, position, tile_tokens, scale, index, carry):
    """Returns maximum, sum and accumulator with one more tile of the cache's tokens, those before the position."""
    m, total, acc = carry
    (k_ref, v_ref), (k_scale_ref, v_scale_ref) = cache_refs[:2], cache_refs[2:] or (None, None)
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    begin = start + index * tile_tokens
    keys = load_dequantized(k_ref, k_scale_ref, queries.dtype, *at, begin, tile_tokens)
    scores = jnp.dot(queries, keys.T, precision=precision, preferred_element_type=jnp.float32)
    is_visible = begin + lax.iota(jnp.int32, tile_tokens) < position
    scores = jnp.where(is_visible[None, :], scores * (scale * _LOG2_E), -jnp.inf)
    m_new = jnp.maximum(m, scores.max(axis=1))
    p, alpha = jnp.exp2(scores - m_new[:, None]), jnp.exp2(m - m_new)
    values = load_dequantized(v_ref, v_scale_ref, queries.dtype, *at, begin, tile_tokens)
    mixed = jnp.dot(p.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32)
    return m_new, alpha * total + p.sum(axis=1), alpha[:, None] * acc + mixed


def _store_parts(refs, carry, row, heads, split):
    (acc_ref, *stats_refs), (m, total, acc) = refs, carry
    dims, in_group = lax.iota(jnp.int32, acc.shape[1]), heads[0]
    index, mask = (row, heads[1][:, None], dims[None, :]), in_group[:, None]
    if not stats_refs:
        plt.store(acc_ref.at[index], (acc / total[:, None]).astype(acc_ref.dtype), mask=mask)
        return
    plt.store(acc_ref.at[(split, *index)], acc, mask=mask)
    plt.store(stats_refs[0].at[split, row, heads[1]], m, mask=in_group)
    plt.store(stats_refs[1].at[split, row, heads[1]], total, mask=in_group)


def _combine_kernel(
    acc_ref,  # f32[splits B H d]
    m_ref,  # f32[splits B H]
    total_ref,  # f32[splits B H]
    positions_ref,  # i32[B]
    out_ref,  # [B H d]
    *,
    split_tokens: int,
):
    row, head, head_dim = pl.program_id(0), pl.program_id(1), acc_ref.shape[3]
    num_used = positions_ref[row] // split_tokens + 1

    def accumulate(index, carry):
        m, total, acc = carry
        splits = index * _COMBINE_SPLITS + lax.iota(jnp.int32, _COMBINE_SPLITS)
        mask = splits < num_used
        m_part = plt.load(m_ref.at[splits, row, head], mask=mask, other=-jnp.inf)
        total_part = plt.load(total_ref.at[splits, row, head], mask=mask, other=0.0)
        dims = lax.iota(jnp.int32, head_dim)
        acc_part = plt.load(acc_ref.at[splits[:, None], row, head, dims[None, :]], mask=mask[:, None], other=0.0)
        m_new = jnp.maximum(m, m_part.max(axis=0))
        weights, alpha = jnp.exp2(m_part - m_new), jnp.exp2(m - m_new)
        total_new = alpha * total + (total_part * weights).sum(axis=0)
        return m_new, total_new, alpha * acc + (acc_part * weights[:, None]).sum(axis=0)

    carry = (jnp.float32(-jnp.inf), jnp.float32(0.0), jnp.zeros((head_dim,), jnp.float32))
    _, total, acc = lax.fori_loop(0, pl.cdiv(num_used, _COMBINE_SPLITS), accumulate, carry)
    out_ref[row, head, :] = (acc / total).astype(out_ref.dtype)


def check_support(*, head_dim: int, dtype: jnp.dtype, block_size: int) -> None:
    """Raises KernelUnsupportedError for what this backend can't compute."""
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise KernelUnsupportedError(f"the Triton backend needs a power-of-two head_dim of at least 16, got {head_dim}")
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise KernelUnsupportedError(f"the Triton backend needs bfloat16, float16 or float32, got {dtype}")
    if block_size & (block_size - 1):
        raise KernelUnsupportedError(f"the Triton backend needs a power-of-two block size, got {block_size}")


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "scale", "tiles", "interpret"))
def append_attention_triton(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: tuple[jax.Array, ...],
    slots: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
    *,
    norms: tuple[jax.Array, ...],
    eps: float,
    dtype: jnp.dtype,
    scale: float,
    tiles: TileConfig,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns what the reference returns, by one kernel for one split, else two; the caller checks the arguments."""
    (num_parts, num_rows, width), (num_kv_heads, block_size, head_dim) = qkv.shape, cache[0].shape[2:]
    num_groups = width // (num_kv_heads * head_dim) - 2
    num_splits = pl.cdiv(block_tables.shape[1] * block_size, tiles.split_tokens)
    parts = (num_splits, num_rows, num_kv_heads * num_groups)
    out_shape = [jax.ShapeDtypeStruct((*parts[1:], head_dim), dtype)]
    parts_shape = [jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32)]
    parts_shape += [jax.ShapeDtypeStruct(parts, jnp.float32)] * 2
    results_shape = out_shape if num_splits == 1 else parts_shape
    sizes: dict[str, Any] = {
        "num_groups": num_groups,
        "num_arrays": len(cache),
        "num_norms": len(norms),
        "eps": eps,
        "dtype": dtype,
    }
    found = pl.pallas_call(
        functools.partial(_append_attention_kernel, **sizes, tiles=tiles, scale=scale),
        out_shape=[*results_shape, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in cache)],
        grid=(num_rows, num_kv_heads, num_splits),
        input_output_aliases={7 + index: len(results_shape) + index for index in range(len(cache))},
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=f"append_attention_s{num_parts}_{tiles.label}",
    )(qkv, cos, sin, slots, block_tables, positions, jnp.reshape(layer, (1,)), *cache, *norms)
    results, new_cache = found[: len(results_shape)], found[len(results_shape) :]
    if num_splits == 1:
        return results[0], *new_cache
    return _combine(results, positions, dtype, tiles, interpret), *new_cache


def _combine(
    results: list[jax.Array], positions: jax.Array, dtype: jnp.dtype, tiles: TileConfig, interpret: bool
) -> jax.Array:
    _, num_rows, num_heads, head_dim = results[0].shape
    out: jax.Array = pl.pallas_call(
        functools.partial(_combine_kernel, split_tokens=tiles.split_tokens),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), dtype),
        grid=(num_rows, num_heads),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
        name=f"attention_combine_s{tiles.split_tokens}",
    )(*results, positions)
    return out
