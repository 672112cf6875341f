"""Causal attention of ragged chunks over a paged KV cache, Pallas with the Triton backend: Ampere and later.

One program takes one item of the work list and one KV head: up to query_tile tokens of a sequence times the query heads
of the group are the rows of its products, so that keys and values are loaded once for the whole group. It walks over
the context in tiles with the online softmax (Dao, arXiv:2307.08691, algorithm 1). Items are taken last first: the later
chunks of a long prompt have the longest contexts. Items of one token, which are most of a busy step's, get a launch of
their own, whose products have few rows; in the uniform form they don't, so that a token's bits are the same in each.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.paged import load_dequantized
from pallas_kernels.prefill_attention.tiles import TileConfig

_LOG2_E = math.log2(math.e)
_MIN_DOT_ROWS = 16


def _attend_kernel(
    q_ref,  # [T H d]
    k_ref,  # [L N K S d]
    v_ref,  # [L N K S d]
    tables_ref,  # i32[B P]
    positions_ref,  # i32[T]
    rows_ref,  # i32[A]
    starts_ref,  # i32[A]
    lens_ref,  # i32[A]
    layer_ref,  # i32[1]
    before_ref,  # [T H d]   the output's memory: tokens of other items, and of none, keep what it holds
    *refs,  # of int8 keys and values the scales [L N K S]; then the output [T H d]
    tiles: TileConfig,
    lens: range,
    num_groups: int,
    scale: float,
):
    del before_ref
    *scale_refs, out_ref = refs
    k_scale_ref, v_scale_ref = scale_refs or (None, None)
    item, head = pl.num_programs(1) - 1 - pl.program_id(1), pl.program_id(0)
    num_queries = lens_ref[item]
    head_dim = k_ref.shape[4]
    num_rows = max(_MIN_DOT_ROWS, pl.next_power_of_2(lens[-1] * num_groups))
    fold = lax.iota(jnp.int32, num_rows)
    offset, dims = lax.div(fold, jnp.full_like(fold, num_groups)), lax.iota(jnp.int32, head_dim)
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    @pl.when((num_queries >= lens[0]) & (num_queries <= lens[-1]))
    def _():
        start, row, layer = starts_ref[item], rows_ref[item], layer_ref[0]
        first = positions_ref[start]
        is_real = offset < num_queries
        index = (start + offset)[:, None], (head * num_groups + fold - offset * num_groups)[:, None], dims[None, :]
        q = plt.load(q_ref.at[index], mask=is_real[:, None], other=0.0)

        def accumulate(index, carry):
            m, total, acc = carry
            begin = index * tiles.tile_tokens
            at = (tables_ref, layer, row, head, begin, tiles.tile_tokens)
            keys = load_dequantized(k_ref, k_scale_ref, q.dtype, *at)
            scores = jnp.dot(q, keys.T, precision=precision, preferred_element_type=jnp.float32)
            context = begin + lax.iota(jnp.int32, tiles.tile_tokens)
            is_visible = context[None, :] <= (first + offset)[:, None]
            scores = jnp.where(is_visible, scores * (scale * _LOG2_E), -jnp.inf)
            m_new = jnp.maximum(m, scores.max(axis=1))
            p, alpha = jnp.exp2(scores - m_new[:, None]), jnp.exp2(m - m_new)
            values = load_dequantized(v_ref, v_scale_ref, q.dtype, *at)
            mixed = jnp.dot(p.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32)
            return m_new, alpha * total + p.sum(axis=1), alpha[:, None] * acc + mixed

        m = jnp.full((num_rows,), -jnp.inf, jnp.float32)
        carry = (m, jnp.zeros_like(m), jnp.zeros((num_rows, head_dim), jnp.float32))
        num_tiles = pl.cdiv(first + num_queries, tiles.tile_tokens)
        _, total, acc = lax.fori_loop(0, num_tiles, accumulate, carry)
        plt.store(out_ref.at[index], (acc / total[:, None]).astype(out_ref.dtype), mask=is_real[:, None])


@functools.partial(jax.jit, static_argnames=("query_tile", "scale", "tiles", "is_uniform", "interpret"))
def prefill_attention_triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    item_rows: jax.Array,
    item_starts: jax.Array,
    item_lens: jax.Array,
    layer: jax.Array | int,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    query_tile: int,
    scale: float,
    tiles: TileConfig,
    is_uniform: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Returns what the reference returns; the caller checks the arguments."""
    num_groups = q.shape[1] // k.shape[2]
    scales = () if k_scale is None else (k_scale, v_scale)
    items = (block_tables, positions, item_rows, item_starts, item_lens)
    arguments = (q, k, v, *items, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)))

    def attend(out: jax.Array, lens: range) -> jax.Array:
        attended: jax.Array = pl.pallas_call(
            functools.partial(_attend_kernel, tiles=tiles, lens=lens, num_groups=num_groups, scale=scale),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(k.shape[2], item_rows.shape[0]),
            input_output_aliases={len(arguments): 0},
            compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
            interpret=interpret,
            name=f"prefill_attention_q{lens[-1]}_{tiles.label}",
        )(*arguments, out, *scales)
        return attended

    if is_uniform:
        return attend(jnp.zeros_like(q), range(1, query_tile + 1))
    single = attend(jnp.zeros_like(q), range(1, 2))
    return single if query_tile == 1 else attend(single, range(2, query_tile + 1))
