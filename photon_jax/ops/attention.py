"""The attention half of a layer, at the size of a fusion: input, and attention over the paged cache."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import append_attention, prefill_attention, rope_append
from photon_jax.cache.kv_cache import KVCache, read_kv, write_kv
from photon_jax.config import OWN_KERNELS, KernelConfig
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import LayerParams
from photon_jax.ops.linear import Rows, linear, linear_parts
from photon_jax.ops.norm import rms_norm
from photon_jax.ops.rope import apply_rope
from photon_jax.ops.stream import Stream, map_normed
from photon_jax.ops.sums import ordered_sum
from photon_jax.ops.tiles import RowTiles
from photon_jax.step_io import StepInputs

CONTEXT_TILE = 64  # tokens of context that the reference weighs at once
ITEMS_AT_ONCE = 4  # items that the reference computes together where their blocks are shorter
UNIFORM_QUERY_TILE = 16  # of the kernel for items of any length
ITEM_BATCH = 64  # items that the XLA form computes at once; more would gather too much of the cache


def project_qkv(
    stream: Stream,
    cos: jax.Array,  # f32[T d/2]
    sin: jax.Array,  # f32[T d/2]
    layer: LayerParams,
    *,
    config: ModelConfig,
    kernels: KernelConfig,
    tiles: RowTiles | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns q [T H d], k [T K d] and v [T K d]: norm, QKV projection, QK-norm where the model has it, rope; and the
    stream as one array f32[T D]."""
    num_kv, groups, head_dim, dtype = config.num_kv_heads, config.num_groups, config.head_dim, layer.input_norm.dtype

    def compute(normed: Rows, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        qkv = linear(normed, layer.qkv_proj, backend=kernels.linear).reshape(-1, num_kv, groups + 2, head_dim)
        q = qkv[:, :, :groups].reshape(-1, num_kv * groups, head_dim)
        k, v = qkv[:, :, groups], qkv[:, :, groups + 1]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, eps=config.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, eps=config.rms_norm_eps)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return q.astype(dtype), k.astype(dtype), v.astype(dtype)

    options: dict[str, Any] = {"eps": config.rms_norm_eps, "backend": kernels.linear, "tiles": tiles}
    (q, k, v), residual = map_normed(compute, stream, layer.input_norm, cos, sin, reader=layer.qkv_proj, **options)
    return q, k, v, residual


def attend(
    stream: Stream,
    cos: jax.Array,  # f32[T d/2]
    sin: jax.Array,  # f32[T d/2]
    layer: LayerParams,
    cache: KVCache,
    inputs: StepInputs,
    *,
    layer_index: jax.Array,
    config: ModelConfig,
    kernels: KernelConfig,
    query_tile: int,
    tiles: RowTiles | None,
) -> tuple[jax.Array, KVCache, jax.Array]:
    """Returns attention [T H d] of the step's tokens, the cache with their keys and values in their slots, and the
    stream as one array f32[T D]."""
    options: dict[str, Any] = {"layer_index": layer_index, "config": config}
    if is_one_kernel(kernels, query_tile):
        parts, residual = qkv_parts(stream, layer, config=config, kernels=kernels)
        attended, cache = append_and_attend(parts, cos, sin, layer, cache, inputs, **options)
        return attended, cache, residual
    options |= {"kernels": kernels, "tiles": tiles}
    q, cache, residual = attention_input(stream, cos, sin, layer, cache, inputs.slot_mapping, **options)
    attended = attention(q, cache, inputs, layer_index=layer_index, query_tile=query_tile, kernels=kernels)
    return attended, cache, residual


def is_one_kernel(kernels: KernelConfig, query_tile: int) -> bool:
    """Whether all between the QKV product and O's is one kernel: where every row has one token, unless the tokens are
    to have the same bits in longer steps."""
    return kernels.attention == "triton" and query_tile == 1


def qkv_parts(
    stream: Stream,
    layer: LayerParams,
    *,
    config: ModelConfig,
    kernels: KernelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Returns the QKV product's parts [S T K*(G+2)*d] and the stream as one array f32[T D]."""

    def compute(normed: Rows) -> tuple[jax.Array]:
        return (linear_parts(normed, layer.qkv_proj, backend=kernels.linear, may_round=True),)

    options: dict[str, Any] = {"eps": config.rms_norm_eps, "backend": kernels.linear, "tiles": None}
    (parts,), residual = map_normed(compute, stream, layer.input_norm, reader=layer.qkv_proj, **options)
    return parts, residual


def append_and_attend(
    parts: jax.Array,  # [S T K*(G+2)*d]
    cos: jax.Array,  # f32[T d/2]
    sin: jax.Array,  # f32[T d/2]
    layer: LayerParams,
    cache: KVCache,
    inputs: StepInputs,
    *,
    layer_index: jax.Array,
    config: ModelConfig,
) -> tuple[jax.Array, KVCache]:
    """Returns attention [T H d] of rows of one token each, and the cache with their keys and values, in one kernel."""
    attended, *arrays = append_attention(
        *(parts, cos, sin, cache.k, cache.v, inputs.slot_mapping, inputs.block_tables, inputs.positions, layer_index),
        **_append_options(layer, cache, config),
    )
    return attended, _cache_of(arrays)


def _append_options(layer: LayerParams, cache: KVCache, config: ModelConfig) -> dict[str, Any]:
    """Returns what the kernels that append to the cache take beside their inputs."""
    return {
        "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
        "q_norm": layer.q_norm,
        "k_norm": layer.k_norm,
        "eps": config.rms_norm_eps,
        "dtype": layer.input_norm.dtype,
    }


def _cache_of(arrays: list[jax.Array]) -> KVCache:
    return KVCache(**dict(zip(("k", "v", "k_scale", "v_scale"), arrays, strict=False)))


def attention_input(
    stream: Stream,
    cos: jax.Array,  # f32[T d/2]
    sin: jax.Array,  # f32[T d/2]
    layer: LayerParams,
    cache: KVCache,
    slot_mapping: jax.Array,  # i32[T]
    *,
    layer_index: jax.Array,
    config: ModelConfig,
    kernels: KernelConfig,
    tiles: RowTiles | None,
) -> tuple[jax.Array, KVCache, jax.Array]:
    """Returns q [T H d], the cache with the new keys and values in their slots, and the stream as one array f32[T D].

    All that follows the projection is one kernel where attention is one too; it adds the projection's parts.
    """
    if kernels.attention not in OWN_KERNELS:
        q, k, v, residual = project_qkv(stream, cos, sin, layer, config=config, kernels=kernels, tiles=tiles)
        return q, write_kv(cache, layer_index, k, v, slot_mapping), residual
    parts, residual = qkv_parts(stream, layer, config=config, kernels=kernels)
    options = _append_options(layer, cache, config)
    q, *arrays = rope_append(parts, cos, sin, cache.k, cache.v, slot_mapping, layer_index, **options)
    return q, _cache_of(arrays), residual


def attention(
    q: jax.Array,  # [T H d]
    cache: KVCache,
    inputs: StepInputs,
    *,
    layer_index: jax.Array,
    query_tile: int,
    kernels: KernelConfig,
) -> jax.Array:  # [T H d]
    """Returns causal attention of each token over its own sequence's cache.

    The implementations walk over the work list of items: up to query_tile tokens of one sequence. "uniform" takes one
    size of tiles in all steps; "triton" is for those that `is_one_kernel` leaves to it.
    """
    if kernels.attention in OWN_KERNELS:
        scales: dict[str, Any] = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        arguments = (q, cache.k, cache.v, inputs.block_tables)
        items = (inputs.item_rows, inputs.item_starts, inputs.item_lens)
        if kernels.attention == "uniform":
            assert query_tile <= UNIFORM_QUERY_TILE, f"items of {query_tile} tokens are longer than the kernel's tile"
            scales |= {"query_tile": UNIFORM_QUERY_TILE, "is_uniform": True}
            return prefill_attention(*arguments, inputs.positions, *items, layer_index, **scales)
        return prefill_attention(*arguments, inputs.positions, *items, layer_index, query_tile=query_tile, **scales)
    num_tokens = q.shape[0]
    padded = jnp.pad(q, ((0, query_tile), (0, 0), (0, 0)))  # an item may reach past the last token, or hold none
    positions = jnp.pad(inputs.positions, (0, query_tile))
    if kernels.attention == "reference":
        out = _attention_reference(padded, positions, cache, inputs, layer_index, query_tile)
    else:
        out = _attention_xla(padded, positions, cache, inputs, layer_index, query_tile)
    return out[:num_tokens]


def _attention_reference(
    q: jax.Array, positions: jax.Array, cache: KVCache, inputs: StepInputs, layer_index: jax.Array, query_tile: int
) -> jax.Array:
    """A few items at a time, context tile by context tile: an item's bits depend on its own sequence alone.

    Items ascend, so what an item writes past its own tokens the next ones overwrite. Those that fill up the last few
    hold none, and are written behind all tokens.
    """
    num_items = inputs.item_rows.shape[0]
    size = ITEMS_AT_ONCE if cache.block_size < CONTEXT_TILE else 1  # long blocks gain nothing (measured)
    is_real = jnp.arange(num_items) < inputs.counts[2]
    starts = jnp.where(is_real, inputs.item_starts, q.shape[0] - query_tile)
    fields = (inputs.item_rows, starts, inputs.item_lens)
    rows, starts, lens = (jnp.pad(field, (0, -num_items % size), mode="edge") for field in fields)

    def attend_some(index: jax.Array, out: jax.Array) -> jax.Array:
        items = [index * size + offset for offset in range(size)]
        q_items = [lax.dynamic_slice_in_dim(q, starts[item], query_tile) for item in items]
        pos_items = [lax.dynamic_slice_in_dim(positions, starts[item], query_tile) for item in items]
        lasts = [pos[jnp.maximum(lens[item] - 1, 0)] for pos, item in zip(pos_items, items, strict=True)]
        tables = [inputs.block_tables[rows[item]] for item in items]
        num_tiles = functools.reduce(jnp.maximum, lasts) // CONTEXT_TILE + 1
        attend = functools.partial(_attend_item, num_tiles=num_tiles, cache=cache, layer_index=layer_index)
        if size == 1:
            attended = [attend(q_items[0], pos_items[0], tables[0])]
        else:
            attended = list(jax.vmap(attend)(*(jnp.stack(each) for each in (q_items, pos_items, tables))))
        for item, part in zip(items, attended, strict=True):
            out = lax.dynamic_update_slice_in_dim(out, part, starts[item], 0)
        return out

    out: jax.Array = lax.fori_loop(0, (inputs.counts[2] + size - 1) // size, attend_some, jnp.zeros_like(q))
    return out


def _attend_item(
    q: jax.Array,  # [Q H d]
    positions: jax.Array,  # i32[Q]
    table: jax.Array,  # i32[P]
    *,
    num_tiles: jax.Array,  # i32[], of context; the last ones may be masked
    cache: KVCache,
    layer_index: jax.Array,
) -> jax.Array:  # [Q H d]
    """Online softmax over context tiles (Milakov and Gimelshein, arXiv:1805.02867); a masked tile changes nothing."""
    query_tile, num_heads, head_dim = q.shape
    num_kv = cache.k.shape[2]
    groups = num_heads // num_kv
    # [Q H d] -> [K Q*G d]
    folded = q.reshape(query_tile, num_kv, groups, head_dim).transpose(1, 0, 2, 3).reshape(num_kv, -1, head_dim)
    row_positions = jnp.repeat(positions, groups)  # i32[Q*G]
    shape = (num_kv, query_tile * groups)

    def add_tile(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, acc = carry
        k, v = read_kv(cache, lambda array: _context_tile(array, layer_index, table, index), q.dtype)
        scores = _contract("KMd,KCd->KMC", folded, k) / math.sqrt(head_dim)
        context = index * CONTEXT_TILE + jnp.arange(CONTEXT_TILE)
        visible = jnp.expand_dims(context, 0) <= jnp.expand_dims(row_positions, 1)
        scores = jnp.where(jnp.expand_dims(visible, 0), scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - jnp.expand_dims(new_top, 2))
        decay = jnp.exp(top - new_top)
        update = _contract("KMC,KCd->KMd", weights.astype(v.dtype), v)
        return new_top, total * decay + ordered_sum(weights), acc * jnp.expand_dims(decay, 2) + update

    empty = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    _, total, acc = lax.fori_loop(0, num_tiles, add_tile, empty)
    out: jax.Array = (acc / jnp.expand_dims(total, 2)).reshape(num_kv, query_tile, groups, head_dim)
    return out.transpose(1, 0, 2, 3).reshape(q.shape).astype(q.dtype)


def _context_tile(array: jax.Array, layer_index: jax.Array, table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns keys or values [K C d] of positions [index * C, (index + 1) * C) of a sequence, C = CONTEXT_TILE."""
    _, _, num_kv, block_size, head_dim = array.shape
    if block_size >= CONTEXT_TILE:
        start = index * CONTEXT_TILE
        at = (layer_index, table[start // block_size], 0, start % block_size, 0)
        return lax.dynamic_slice(array, at, (1, 1, num_kv, CONTEXT_TILE, head_dim)).reshape(num_kv, -1, head_dim)
    blocks_per_tile = CONTEXT_TILE // block_size
    blocks = lax.dynamic_slice_in_dim(table, index * blocks_per_tile, blocks_per_tile)
    # [n K S d] -> [K n*S d]
    return array[layer_index, blocks].transpose(1, 0, 2, 3).reshape(num_kv, -1, head_dim)


def _attention_xla(
    q: jax.Array, positions: jax.Array, cache: KVCache, inputs: StepInputs, layer_index: jax.Array, query_tile: int
) -> jax.Array:
    """Items in batches, each over its sequence's whole table width at once: for devices that want large operations."""
    num_kv, groups, head_dim = cache.k.shape[2], q.shape[1] // cache.k.shape[2], q.shape[2]

    def attend_item(work: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, start = work
        q_item = lax.dynamic_slice_in_dim(q, start, query_tile).reshape(query_tile, num_kv, groups, head_dim)
        pos_item = lax.dynamic_slice_in_dim(positions, start, query_tile)
        k, v = read_kv(cache, lambda array: array[layer_index, inputs.block_tables[row]], q.dtype)
        scores = _contract("QKGd,PKSd->KGQPS", q_item, k) / math.sqrt(head_dim)
        context = jnp.arange(k.shape[0] * k.shape[2]).reshape(k.shape[0], k.shape[2])
        visible = jnp.expand_dims(context, 0) <= jnp.expand_dims(pos_item, (1, 2))
        scores = jnp.where(jnp.expand_dims(visible, (0, 1)), scores, -jnp.inf)
        weights = jnp.exp(scores - scores.max(axis=(-2, -1), keepdims=True))
        out = _contract("KGQPS,PKSd->QKGd", weights.astype(v.dtype), v)
        total = weights.sum(axis=(-2, -1)).transpose(2, 0, 1)
        return (out / jnp.expand_dims(total, 3)).reshape(query_tile, -1, head_dim).astype(q.dtype)

    work = (inputs.item_rows, inputs.item_starts)
    if inputs.item_rows.shape[0] <= ITEM_BATCH:
        items = jax.vmap(attend_item)(work)  # [A Q H d]
    else:
        items = lax.map(attend_item, work, batch_size=ITEM_BATCH)
    offsets = jnp.arange(query_tile)
    is_real = jnp.expand_dims(offsets, 0) < jnp.expand_dims(inputs.item_lens, 1)
    places = jnp.expand_dims(inputs.item_starts, 1) + jnp.expand_dims(offsets, 0)
    places = jnp.where(is_real, places, q.shape[0])  # dropped
    return jnp.zeros_like(q).at[places].set(items, mode="drop")


def full_attention(
    q: jax.Array,  # [B T H d]
    k: jax.Array,  # [B T K d]
    v: jax.Array,  # [B T K d]
) -> jax.Array:  # [B T H d]
    """Returns causal attention with no cache, the differentiable form that `forward` uses."""
    batch, num_tokens, num_heads, head_dim = q.shape
    q = q.reshape(batch, num_tokens, k.shape[2], -1, head_dim)
    scores = _contract("BQKGd,BCKd->BKGQC", q, k) / math.sqrt(head_dim)
    visible = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    scores = jnp.where(jnp.expand_dims(visible, (0, 1, 2)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = _contract("BKGQC,BCKd->BQKGd", weights, v).astype(v.dtype)
    return out.reshape(batch, num_tokens, num_heads, head_dim)


def _contract(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the einsum in float32."""
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
