"""Paged decode attention, Pallas with the Triton backend: Ampere and later.

One program takes one row, one KV head and one split of `split_tokens` context tokens for all query heads of the group,
padded to 16 rows, which is the least a tensor-core product takes. Splits past the context end at once. With more than
one split, partial results of a row are added in their order, eight at a time: by a second kernel, or, given counters,
by whichever program of a row and head ends last.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.paged_attention.tiles import TileConfig

_LOG2_E = math.log2(math.e)
_COMBINE_SPLITS = 8  # splits added at once; fixed, since it orders the sum
_MIN_DOT_ROWS = 16
_TOUCHED_BYTES = 16384  # of weights that a program reads into the L2
_MAX_TOUCHING = 768  # programs that do so: 12 MB, about what memory can bring while attention of a few rows lasts


def _attend_kernel(
    q_ref,  # [B H d]
    k_ref,  # [L N K S d]
    v_ref,  # [L N K S d]
    tables_ref,  # i32[B P]
    lens_ref,  # i32[B]
    layer_ref,  # i32[1]
    *refs,  # with one split the output [B H d]; else the parts, after counters i32[B K] and the weights to be touched,
    # and before out, counters and what the touching programs found
    tiles: TileConfig,
    num_groups: int,
    scale: float,
    num_touched: int,
    interpret: bool,
):
    has_counters = len(refs) > 3
    # Parts f32[splits B H d], maximum and sum f32[splits B H].
    acc_ref, *stats_refs = refs[1 + num_touched : 4 + num_touched] if has_counters else refs
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

    def load_tile(ref, position):
        return _load_tile(ref, tables_ref, layer, row, head, position, tiles.tile_tokens)

    def accumulate(index, carry, is_alone=False):
        m, total, acc = carry
        position = start + index * tiles.tile_tokens
        keys = load_tile(k_ref, position)
        values = load_tile(v_ref, position) if is_alone else None  # without a pipeline, both are asked for at once
        scores = jnp.dot(q, keys.T, precision=precision, preferred_element_type=jnp.float32)
        is_visible = position + lax.iota(jnp.int32, tiles.tile_tokens) < context_len
        scores = jnp.where(is_visible[None, :], scores * (scale * _LOG2_E), -jnp.inf)
        m_new = jnp.maximum(m, scores.max(axis=1))
        p, alpha = jnp.exp2(scores - m_new[:, None]), jnp.exp2(m - m_new)
        values = load_tile(v_ref, position) if values is None else values
        mixed = jnp.dot(p.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32)
        return m_new, alpha * total + p.sum(axis=1), alpha[:, None] * acc + mixed

    @pl.when((start < context_len) | (not stats_refs))
    def _():
        num_tiles = pl.cdiv(jnp.clip(context_len - start, 0, tiles.split_tokens), tiles.tile_tokens)
        m = jnp.full((group_rows,), -jnp.inf, jnp.float32)
        carry = (m, jnp.zeros_like(m), jnp.zeros((group_rows, head_dim), jnp.float32))
        if stats_refs and tiles.split_tokens == tiles.tile_tokens:
            m, total, acc = accumulate(0, carry, is_alone=True)
        else:
            m, total, acc = lax.fori_loop(0, num_tiles, accumulate, carry)
        parts_refs = (acc_ref, *stats_refs)
        _store_parts(parts_refs, (m, total, acc), row, (in_group, heads), split, is_only_split=not stats_refs)

    if has_counters:
        num_used = pl.cdiv(context_len, tiles.split_tokens)
        out_ref, counter_ref, *found_ref = refs[4 + num_touched :]
        _combine_last((acc_ref, *stats_refs), out_ref, counter_ref, num_used, num_groups, interpret)
        if num_touched:
            index = ((split - acc_ref.shape[0]) * q_ref.shape[0] + row) * k_ref.shape[2] + head
            _touch(refs[1 : 1 + num_touched], found_ref[0], index)


def _load_tile(ref, tables_ref, layer, row, head, position, tile_tokens):  # [tile_tokens d]
    block_size = ref.shape[3]
    if block_size % tile_tokens == 0:
        block = tables_ref[row, position // block_size]
        return ref[layer, block, head, pl.ds(position % block_size, tile_tokens), :]
    tokens, dims = position + lax.iota(jnp.int32, tile_tokens), lax.iota(jnp.int32, ref.shape[4])
    blocks = plt.load(tables_ref.at[row, jnp.minimum(tokens // block_size, tables_ref.shape[1] - 1)])
    return plt.load(ref.at[layer, blocks[:, None], head, (tokens % block_size)[:, None], dims[None, :]])


def _store_parts(refs, carry, row, heads, split, *, is_only_split):
    (acc_ref, *stats_refs), (m, total, acc) = refs, carry
    dims, in_group = lax.iota(jnp.int32, acc.shape[1]), heads[0]
    index, mask = (row, heads[1][:, None], dims[None, :]), in_group[:, None]
    if is_only_split:
        out = (acc / jnp.where(total > 0, total, 1.0)[:, None]).astype(acc_ref.dtype)
        plt.store(acc_ref.at[index], out, mask=mask)
        return
    plt.store(acc_ref.at[(split, *index)], acc, mask=mask)
    plt.store(stats_refs[0].at[split, row, heads[1]], m, mask=in_group)
    plt.store(stats_refs[1].at[split, row, heads[1]], total, mask=in_group)


def _touched_rows(weight):
    """Returns how many rows of a weight matrix one program reads into the L2."""
    return max(1, _TOUCHED_BYTES // (weight.shape[1] * weight.dtype.itemsize))


def _touch(weight_refs, found_ref, index):
    """Reads the index-th tile of rows of the weights one after the other, none for an index below 0 or past them.

    Their sum is stored, so that the compiler can't leave out the loads.
    """
    first = 0
    for ref in weight_refs:
        rows = _touched_rows(ref)
        last = first + ref.shape[0] // rows

        @pl.when((index >= first) & (index < min(last, found_ref.shape[0])))
        def _(ref=ref, rows=rows, first=first):
            columns = lax.iota(jnp.int32, ref.shape[1])
            tile = ref[((index - first) * rows + lax.iota(jnp.int32, rows))[:, None], columns[None, :]]
            found_ref[index] = tile.astype(jnp.float32).sum(axis=1).sum(axis=0)

        first = last


def _combine_last(parts_refs, out_ref, counter_ref, num_used, num_groups, interpret):
    """Counts the programs of a row and head that are done; the last adds their parts and sets the counter back to 0."""
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group = lax.iota(jnp.int32, pl.next_power_of_2(num_groups))
    heads, dims = head * num_groups + group, lax.iota(jnp.int32, out_ref.shape[2])
    index, mask = (row, heads[:, None], dims[None, :]), (group < num_groups)[:, None]

    @pl.when(split < num_used)
    def _():
        if not interpret:  # interpreted programs run one after the other
            plt.debug_barrier()  # every warp's parts are stored before the one atomic add that releases them
        num_before = plt.atomic_add(counter_ref, (row, head), jnp.int32(1))

        @pl.when(num_before == num_used - 1)
        def _():
            out = _combine(*parts_refs, row=row, heads=heads, is_head=group < num_groups, num_used=num_used)
            plt.store(out_ref.at[index], out.astype(out_ref.dtype), mask=mask)
            counter_ref[row, head] = 0

    @pl.when((split == 0) & (num_used == 0))
    def _():
        zeros = jnp.zeros((group.shape[0], dims.shape[0]), out_ref.dtype)
        plt.store(out_ref.at[index], zeros, mask=mask)


def _combine(acc_ref, m_ref, total_ref, *, row, heads, is_head, num_used):  # f32[heads d]
    dims = lax.iota(jnp.int32, acc_ref.shape[3])

    def accumulate(index, carry):
        m, total, acc = carry
        splits = index * _COMBINE_SPLITS + lax.iota(jnp.int32, _COMBINE_SPLITS)
        mask = (splits < num_used)[:, None] & is_head[None, :]
        m_part = plt.load(m_ref.at[splits[:, None], row, heads[None, :]], mask=mask, other=-jnp.inf)
        total_part = plt.load(total_ref.at[splits[:, None], row, heads[None, :]], mask=mask, other=0.0)
        acc_part = plt.load(
            acc_ref.at[splits[:, None, None], row, heads[None, :, None], dims[None, None, :]],
            mask=mask[:, :, None],
            other=0.0,
        )
        m_new = jnp.maximum(m, m_part.max(axis=0))
        safe = jnp.where(is_head, m_new, 0.0)
        weights, alpha = jnp.exp2(m_part - safe[None, :]), jnp.exp2(m - safe)
        total_new = alpha * total + (total_part * weights).sum(axis=0)
        return m_new, total_new, alpha[:, None] * acc + (acc_part * weights[:, :, None]).sum(axis=0)

    shape = (heads.shape[0], acc_ref.shape[3])
    carry = (
        jnp.full(shape[:1], -jnp.inf, jnp.float32),
        jnp.zeros(shape[:1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    _, total, acc = lax.fori_loop(0, pl.cdiv(num_used, _COMBINE_SPLITS), accumulate, carry)
    return acc / jnp.where(total > 0, total, 1.0)[:, None]


def _combine_kernel(
    acc_ref,  # f32[splits B H d]
    m_ref,  # f32[splits B H]
    total_ref,  # f32[splits B H]
    lens_ref,  # i32[B]
    out_ref,  # [B H d]
    *,
    split_tokens: int,
):
    row, heads = pl.program_id(0), pl.program_id(1) + lax.iota(jnp.int32, 1)
    dims = lax.iota(jnp.int32, acc_ref.shape[3])
    num_used = pl.cdiv(lens_ref[row], split_tokens)
    out = _combine(acc_ref, m_ref, total_ref, row=row, heads=heads, is_head=heads >= 0, num_used=num_used)
    out_ref[row, heads[:, None], dims[None, :]] = out.astype(out_ref.dtype)


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
    counters: jax.Array | None = None,  # i32[B K], all 0
    touched: tuple[jax.Array, ...] = (),  # [O I] each, a power of two of inputs
    *,
    scale: float,
    tiles: TileConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns what the reference returns, and the counters; arguments are checked by the caller.

    One kernel with one split or with counters, else two.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k.shape[2:4]
    num_splits = pl.cdiv(block_tables.shape[1] * block_size, tiles.split_tokens)
    parts = (num_splits, num_rows, num_heads)
    out_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    results_shape = [jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32)]
    results_shape += [jax.ShapeDtypeStruct(parts, jnp.float32)] * 2
    arguments = [q, k, v, block_tables, context_lens, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,))]
    aliases, num_touching = {}, 0
    touched = tuple(weight for weight in touched if num_splits > 1 and weight.shape[0] >= _touched_rows(weight))
    if num_splits == 1:
        results_shape = [out_shape]
    elif counters is not None:
        results_shape += [out_shape, jax.ShapeDtypeStruct(counters.shape, counters.dtype)]
        aliases = {len(arguments): len(results_shape) - 1}
        arguments += [counters, *touched]
        num_touching = min(_MAX_TOUCHING, sum(weight.shape[0] // _touched_rows(weight) for weight in touched))
        results_shape += [jax.ShapeDtypeStruct((num_touching,), jnp.float32)] if touched else []
    facts = {"num_groups": num_heads // num_kv_heads, "num_touched": len(touched)}
    results = pl.pallas_call(
        functools.partial(_attend_kernel, tiles=tiles, scale=scale, interpret=interpret, **facts),
        out_shape=results_shape,
        grid=(num_rows, num_kv_heads, num_splits + pl.cdiv(num_touching, num_rows * num_kv_heads)),
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=f"paged_attention_{tiles.label}",
    )(*arguments)
    if num_splits == 1:
        return results[0], counters
    if counters is not None:
        return results[3], results[4]
    out = _combine_call(results, context_lens, out_shape, split_tokens=tiles.split_tokens, interpret=interpret)
    return out, None


def _combine_call(results, context_lens, out_shape, *, split_tokens, interpret):
    return pl.pallas_call(
        functools.partial(_combine_kernel, split_tokens=split_tokens),
        out_shape=out_shape,
        grid=out_shape.shape[:2],
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
        name=f"paged_attention_combine_s{split_tokens}",
    )(*results, context_lens)
