"""Paged decode attention, Pallas with the Triton backend: Ampere and later.

One program takes one row, one KV head and one split of `split_tokens` context tokens for all query heads of the group,
padded to 16 rows, which is the least a tensor-core product takes. Splits past the context end at once. With more than
one split, a second kernel adds the partial results of a row in their order, eight at a time.

Int8 keys and values become q's dtype tile by tile, each token's times its scale.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.common.paged import load_dequantized
from pallas_kernels.paged_attention.tiles import TileConfig

_LOG2_E = math.log2(math.e)
_COMBINE_SPLITS = 8  # splits added at once; fixed, since it orders the sum
_MIN_DOT_ROWS = 16


def _attend_kernel(
    q_ref,  # [B H d]
    k_ref,  # [L N K S d]
    v_ref,  # [L N K S d]
    tables_ref,  # i32[B P]
    lens_ref,  # i32[B]
    layer_ref,  # i32[1]
    *refs,  # of int8 keys and values the scales [L N K S]; then with one split the output [B H d], else the parts
    # f32[splits B H d], their maximum and sum f32[splits B H]
    is_int8: bool,
    tiles: TileConfig,
    num_groups: int,
    scale: float,
):
    (k_scale_ref, v_scale_ref), out_refs = (refs[:2], refs[2:]) if is_int8 else ((None, None), refs)
    is_whole = len(out_refs) == 1
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_dim = k_ref.shape[4]
    context_len = lens_ref[row]
    start = split * tiles.split_tokens
    group_rows = max(_MIN_DOT_ROWS, pl.next_power_of_2(num_groups))
    group = lax.iota(jnp.int32, group_rows)
    heads, dims = head * num_groups + group, lax.iota(jnp.int32, head_dim)
    in_group = group < num_groups
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    layer = layer_ref[0]

    # Rows past the group are zeros, and never stored.
    q = plt.load(q_ref.at[row, heads[:, None], dims[None, :]], mask=in_group[:, None], other=0.0)

    def accumulate(index, carry):
        m, total, acc = carry
        position = start + index * tiles.tile_tokens
        at = (tables_ref, layer, row, head, position, tiles.tile_tokens)
        keys = load_dequantized(k_ref, k_scale_ref, q.dtype, *at)
        scores = jnp.dot(q, keys.T, precision=precision, preferred_element_type=jnp.float32)
        is_visible = position + lax.iota(jnp.int32, tiles.tile_tokens) < context_len
        scores = jnp.where(is_visible[None, :], scores * (scale * _LOG2_E), -jnp.inf)
        m_new = jnp.maximum(m, scores.max(axis=1))
        p, alpha = jnp.exp2(scores - m_new[:, None]), jnp.exp2(m - m_new)
        values = load_dequantized(v_ref, v_scale_ref, q.dtype, *at)
        mixed = jnp.dot(p.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32)
        return m_new, alpha * total + p.sum(axis=1), alpha[:, None] * acc + mixed

    @pl.when((start < context_len) | is_whole)
    def _():
        num_tiles = pl.cdiv(jnp.clip(context_len - start, 0, tiles.split_tokens), tiles.tile_tokens)
        m = jnp.full((group_rows,), -jnp.inf, jnp.float32)
        carry = (m, jnp.zeros_like(m), jnp.zeros((group_rows, head_dim), jnp.float32))
        carry = lax.fori_loop(0, num_tiles, accumulate, carry)
        _store_parts(out_refs, carry, row, (in_group, heads), split)


def _store_parts(refs, carry, row, heads, split):
    (acc_ref, *stats_refs), (m, total, acc) = refs, carry
    dims, in_group = lax.iota(jnp.int32, acc.shape[1]), heads[0]
    index, mask = (row, heads[1][:, None], dims[None, :]), in_group[:, None]
    if not stats_refs:
        out = (acc / jnp.where(total > 0, total, 1.0)[:, None]).astype(acc_ref.dtype)
        plt.store(acc_ref.at[index], out, mask=mask)
        return
    plt.store(acc_ref.at[(split, *index)], acc, mask=mask)
    plt.store(stats_refs[0].at[split, row, heads[1]], m, mask=in_group)
    plt.store(stats_refs[1].at[split, row, heads[1]], total, mask=in_group)


def _combine_kernel(
    acc_ref,  # f32[splits B H d]
    m_ref,  # f32[splits B H]
    total_ref,  # f32[splits B H]
    lens_ref,  # i32[B]
    out_ref,  # [B H d]
    *,
    split_tokens: int,
):
    row, head, head_dim = pl.program_id(0), pl.program_id(1), acc_ref.shape[3]
    num_used = pl.cdiv(lens_ref[row], split_tokens)

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
    out_ref[row, head, :] = (acc / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)


def check_support(*, head_dim: int, dtype: jnp.dtype, block_size: int) -> None:
    """Raises KernelUnsupportedError for what this backend can't compute."""
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise KernelUnsupportedError(f"the Triton backend needs a power-of-two head_dim of at least 16, got {head_dim}")
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise KernelUnsupportedError(f"the Triton backend needs bfloat16, float16 or float32, got {dtype}")
    if block_size & (block_size - 1):
        raise KernelUnsupportedError(f"the Triton backend needs a power-of-two block size, got {block_size}")


@functools.partial(jax.jit, static_argnames=("scale", "tiles", "interpret"))
def paged_attention_triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    layer: jax.Array | int,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale: float,
    tiles: TileConfig,
    interpret: bool = False,
) -> jax.Array:
    """Returns what the reference returns, by one kernel for one split, else two; the caller checks the arguments."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k.shape[2:4]
    num_splits = pl.cdiv(block_tables.shape[1] * block_size, tiles.split_tokens)
    parts = (num_splits, num_rows, num_heads)
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    parts_shape = [jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32)]
    parts_shape += [jax.ShapeDtypeStruct(parts, jnp.float32)] * 2
    scales = () if k_scale is None else (k_scale, v_scale)
    num_groups = num_heads // num_kv_heads
    results = pl.pallas_call(
        functools.partial(_attend_kernel, is_int8=bool(scales), tiles=tiles, num_groups=num_groups, scale=scale),
        out_shape=[out_shape] if num_splits == 1 else parts_shape,
        grid=(num_rows, num_kv_heads, num_splits),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=f"paged_attention_{tiles.label}",
    )(q, k, v, block_tables, context_lens, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), *scales)
    if num_splits == 1:
        return results[0]
    return pl.pallas_call(
        functools.partial(_combine_kernel, split_tokens=tiles.split_tokens),
        out_shape=out_shape,
        grid=(num_rows, num_heads),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
        name=f"paged_attention_combine_s{tiles.split_tokens}",
    )(*results, context_lens)
