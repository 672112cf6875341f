"""Rotary embedding and cache write, Pallas with the Triton backend: one program a row and KV head."""

import functools

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
    scale_refs = refs[-2:] if num_arrays == 4 else ()
    row, kv_head = pl.program_id(0), pl.program_id(1)
    block_size, head_dim = k_ref.shape[3:]
    half = head_dim // 2
    head = lax.iota(jnp.int32, pl.next_power_of_2(num_groups + 2))
    dims = lax.iota(jnp.int32, half)
    columns = (kv_head * (num_groups + 2) + head)[:, None] * head_dim + dims[None, :]
    mask = (head < num_groups + 2)[:, None]

    def load(part, columns):
        return plt.load(qkv_ref.at[part, row, columns], mask=mask, other=0.0).astype(jnp.float32)

    # All loads are asked for before the first addition waits for one.
    slot, layer = slots_ref[row], layer_ref[0]
    cos, sin = cos_ref[row, :][None, :], sin_ref[row, :][None, :]
    parts = [(load(part, columns), load(part, columns + half)) for part in range(qkv_ref.shape[0])]
    x, y = (add_parts(halves) for halves in zip(*parts, strict=True))
    if norm_refs:
        x, y = _normed(x, y, head, dims, norm_refs, num_groups=num_groups, eps=eps)
    is_turned = (head <= num_groups)[:, None]
    low = jnp.where(is_turned, x * cos - y * sin, x).astype(q_ref.dtype)
    high = jnp.where(is_turned, y * cos + x * sin, y).astype(q_ref.dtype)

    for values, own_columns in ((low, dims), (high, dims + half)):
        place = (row, (kv_head * num_groups + head)[:, None], own_columns[None, :])
        plt.store(q_ref.at[place], values, mask=(head < num_groups)[:, None])
    slot_place = (layer, slot // block_size, kv_head, slot % block_size)
    for index, ref in enumerate((k_ref, v_ref)):
        is_own = (head == num_groups + index)[:, None]
        pair = [jnp.where(is_own, half_heads, 0).astype(jnp.float32).sum(axis=0) for half_heads in (low, high)]
        _store_head(pair, ref, scale_refs[index] if scale_refs else None, slot_place, dims)


def _store_head(pair, ref, scale_ref, place, dims):
    """Stores a head, two halves f32[d/2], in its place [layer, block, KV head, offset]; with a scale as int8."""
    if scale_ref is not None:
        scale = int8_scale(jnp.maximum(jnp.abs(pair[0]).max(), jnp.abs(pair[1]).max()))
        scale_ref[place] = scale
        pair = [round_to_int8(values, scale) for values in pair]
    for values, columns in zip(pair, (dims, dims + dims.shape[0]), strict=True):
        ref[(*place, columns)] = values.astype(ref.dtype)


def _normed(x, y, head, dims, norm_refs, *, num_groups, eps):  # f32[heads d/2] each
    """Returns both halves of all heads with those of queries and key normed, each by its own weight."""
    half = x.shape[1]
    mean_square = ((x * x).sum(axis=1) + (y * y).sum(axis=1)) / (2 * half)
    factor = lax.rsqrt(mean_square + eps)[:, None]
    is_query, is_normed = (head < num_groups)[:, None], (head <= num_groups)[:, None]

    def weigh(values, columns):
        q_weight, k_weight = (plt.load(ref.at[columns]).astype(jnp.float32)[None, :] for ref in norm_refs)
        return jnp.where(is_normed, values * factor * jnp.where(is_query, q_weight, k_weight), values)

    return weigh(x, dims), weigh(y, dims + half)


def _check(qkv, cos, cache, slots, q_norm, k_norm, dtype):
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
      qkv: [S B K*(G+2)*d], parts that are added in order; for each KV head its G queries, its key and its value.
      cos, sin: f32[B d/2]
      k, v: [L N K S d]
      slots: i32[B], block * S + offset; where two are alike, one of the tokens is kept.
      layer: i32[]
      k_scale, v_scale: f32[L N K S] of an int8 cache; q_norm, k_norm: [d].
      eps: added to the mean squares.
      dtype: of q, and of keys and values before they are rounded to int8; by default the cache's.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes don't fit each other.
      KernelUnsupportedError: the head size is no power of two.
    """
    cache = [array for array in (k, v, k_scale, v_scale) if array is not None]
    _check(qkv, cos, cache, slots, q_norm, k_norm, dtype)
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
