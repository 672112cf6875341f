"""Rotary embedding and cache write, Pallas with the Triton backend: one program a row and KV head."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.common.parts import add_parts
from pallas_kernels.rope_append.rounding import int8_scale, round_to_int8

MIN_HEAD_DIM = 16
WARPS_FOR_PARTS = 4  # one warp waits for some of many parts before it asks for the others, or spills registers


class NewHeads(NamedTuple):
    """The heads of a new token, rounded to a dtype."""

    queries: jax.Array  # [* d], zeros past the group
    key: jax.Array  # [d]
    value: jax.Array  # [d]


def load_heads(
    qkv_ref,  # [S B K*(G+2)*d]
    cos_ref,  # f32[B d/2]
    sin_ref,  # f32[B d/2]
    norm_refs,  # of queries and keys, [d] each, or none
    *,
    row,
    kv_head,
    num_groups: int,
    num_rows: int,
    eps: float,
    dtype: jnp.dtype,
) -> NewHeads:
    """Returns the heads of a row's token that belong to one KV head, the queries filled up to num_rows.

    What a head's half is turned with, its other half, is loaded a second time: no thread has both.
    """
    half = cos_ref.shape[1]
    dims, group = lax.iota(jnp.int32, 2 * half), lax.iota(jnp.int32, num_rows)
    others, angles = lax.rem(dims + half, jnp.full_like(dims, 2 * half)), lax.rem(dims, jnp.full_like(dims, half))
    first = kv_head * (num_groups + 2)

    def load(part, head, columns):
        return plt.load(qkv_ref.at[part, row, (first + head) * (2 * half) + columns]).astype(jnp.float32)

    def load_queries(part, columns):
        place = (first + group)[:, None] * (2 * half) + columns[None, :]
        found = plt.load(qkv_ref.at[part, row, place], mask=(group < num_groups)[:, None], other=0.0)
        return found.astype(jnp.float32)

    # All loads are asked for before the first addition waits for one.
    parts = [
        (
            *(load_queries(part, dims), load_queries(part, others)),
            *(load(part, num_groups, dims), load(part, num_groups, others), load(part, num_groups + 1, dims)),
        )
        for part in range(qkv_ref.shape[0])
    ]
    cos, sin = (plt.load(ref.at[row, angles]) for ref in (cos_ref, sin_ref))
    sin = jnp.where(dims < half, -sin, sin)
    norms = [[plt.load(ref.at[columns]).astype(jnp.float32) for columns in (dims, others)] for ref in norm_refs]
    queries, other_queries, key, other_key, value = (add_parts(loaded) for loaded in zip(*parts, strict=True))

    q_norm, k_norm = norms or (None, None)
    turn = functools.partial(_turn, cos=cos, sin=sin, eps=eps)
    turned = turn(queries, other_queries, q_norm), turn(key, other_key, k_norm)
    return NewHeads(*(heads.astype(dtype) for heads in (*turned, value)))


def _turn(x, other, norm, *, cos, sin, eps):  # f32[* d] each
    """Returns heads normed and turned, of them and their other halves; the norm's weight comes in both orders, too."""

    def row(vector):
        return vector[None, :] if x.ndim == 2 else vector

    if norm is not None:
        factor = lax.rsqrt((x * x).sum(axis=-1) / x.shape[-1] + eps)
        factor = factor[:, None] if x.ndim == 2 else factor
        x, other = (values * factor * row(weight) for values, weight in zip((x, other), norm, strict=True))
    return x * row(cos) + other * row(sin)


def store_head(values, ref, scale_ref, place, *, mask) -> jax.Array:
    """Stores a head [d] in its place [layer, block, KV head, offset]; returns what a reader gets, in the head's dtype.

    Args:
      scale_ref: of an int8 cache, else None.
      mask: whether to store it, bool[].
    """
    dims = lax.iota(jnp.int32, values.shape[0])
    stored, scale = values.astype(ref.dtype), None
    if scale_ref is not None:
        wide = values.astype(jnp.float32)
        scale = int8_scale(jnp.abs(wide).max())
        stored = round_to_int8(wide, scale)
        plt.store(scale_ref.at[place], scale, mask=mask)
    plt.store(ref.at[(*place, dims)], stored, mask=jnp.broadcast_to(mask, dims.shape))
    return values if scale is None else (stored.astype(jnp.float32) * scale).astype(values.dtype)


def _kernel(
    qkv_ref,  # [S B K*(G+2)*d]
    cos_ref,  # f32[B d/2]
    sin_ref,  # f32[B d/2]
    slots_ref,  # i32[B]
    layer_ref,  # i32[1]
    *refs,  # the memory of the outputs after q; q_norm [d] and k_norm [d] where there are norms; the outputs:
    # q [B H d], k and v [L N K S d], of an int8 cache k_scale and v_scale f32[L N K S]
    num_groups: int,
    num_arrays: int,  # of the cache: 2, or 4 with scales
    eps: float,
):
    *norm_refs, q_ref, k_ref, v_ref = refs[num_arrays : len(refs) - num_arrays + 2]
    scale_refs = refs[-2:] if num_arrays == 4 else (None, None)
    row, kv_head = pl.program_id(0), pl.program_id(1)
    block_size, head_dim = k_ref.shape[3:]
    slot, layer = slots_ref[row], layer_ref[0]
    heads = load_heads(
        qkv_ref,
        cos_ref,
        sin_ref,
        norm_refs,
        row=row,
        kv_head=kv_head,
        num_groups=num_groups,
        num_rows=pl.next_power_of_2(num_groups),
        eps=eps,
        dtype=q_ref.dtype,
    )
    group, dims = lax.iota(jnp.int32, heads.queries.shape[0]), lax.iota(jnp.int32, head_dim)
    place = (row, (kv_head * num_groups + group)[:, None], dims[None, :])
    plt.store(q_ref.at[place], heads.queries, mask=(group < num_groups)[:, None])
    slot_place = (layer, slot // block_size, kv_head, slot % block_size)
    for new, ref, scale_ref in zip(heads[1:], (k_ref, v_ref), scale_refs, strict=True):
        store_head(new, ref, scale_ref, slot_place, mask=True)


def check_new_tokens(
    qkv: jax.Array,
    cos: jax.Array,
    cache: Sequence[jax.Array],
    slots: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    dtype: jnp.dtype | None,
) -> None:
    """Raises ValueError unless the arguments of `rope_append` fit each other, KernelUnsupportedError for head sizes."""
    (num_parts, num_rows, width), (num_kv_heads, _, head_dim) = qkv.shape, cache[0].shape[2:]
    is_filled = num_parts and width % (num_kv_heads * head_dim) == 0
    if not is_filled or cos.shape != (num_rows, head_dim // 2) or slots.shape != (num_rows,):
        raise ValueError(f"qkv {qkv.shape}, cos {cos.shape} and slots {slots.shape} don't fit a cache {cache[0].shape}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together: give both or none")
    is_int8 = cache[0].dtype == jnp.int8
    if len(cache) != (4 if is_int8 else 2) or (is_int8 and dtype is None):
        raise ValueError("an int8 cache needs k_scale, v_scale and a dtype for q; others have no scales")
    if head_dim < MIN_HEAD_DIM or head_dim & (head_dim - 1):
        raise KernelUnsupportedError(
            f"the Triton backend needs a power-of-two head_dim of at least {MIN_HEAD_DIM}, got {head_dim}"
        )


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))
def rope_append(
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
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns what `rope_append_reference` does; the caches are written in place where the caller's jit owns them.

    Args:
      slots: i32[B]; where two are alike, one of the tokens is kept. All other arrays are as the reference has them.
      dtype: of q, and of keys and values before they are rounded to int8; by default the cache's.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes don't fit each other.
      KernelUnsupportedError: the head size is no power of two.
    """
    cache = [array for array in (k, v, k_scale, v_scale) if array is not None]
    check_new_tokens(qkv, cos, cache, slots, q_norm, k_norm, dtype)
    (num_parts, num_rows, width), (num_kv_heads, _, head_dim) = qkv.shape, k.shape[2:]
    num_groups, norms = width // (num_kv_heads * head_dim) - 2, [w for w in (q_norm, k_norm) if w is not None]
    q = jax.ShapeDtypeStruct((num_rows, num_kv_heads * num_groups, head_dim), dtype or k.dtype)
    kernel = functools.partial(_kernel, num_groups=num_groups, num_arrays=len(cache), eps=eps)
    found: list[jax.Array] = pl.pallas_call(
        kernel,
        out_shape=[q, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in cache)],
        grid=(num_rows, num_kv_heads),
        input_output_aliases={5 + index: 1 + index for index in range(len(cache))},
        compiler_params=plt.CompilerParams(num_warps=1 if num_parts == 1 else WARPS_FOR_PARTS, num_stages=1),
        interpret=interpret,
        name=f"rope_append_s{num_parts}",
    )(qkv, cos, sin, slots, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), *cache, *norms)
    return tuple(found)
