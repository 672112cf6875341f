"""Rotary embedding and cache write, Pallas with the Triton backend: one program a row and KV head."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError

MIN_HEAD_DIM = 16


def _kernel(
    qkv_ref,  # [B K*(G+2)*d]
    cos_ref,  # f32[B d/2]
    sin_ref,  # f32[B d/2]
    slots_ref,  # i32[B]
    layer_ref,  # i32[1]
    k_in_ref,  # [L N K S d], the memory of k_ref
    v_in_ref,
    *refs,  # q_norm [d] and k_norm [d] where there are norms; the outputs q [B H d], k and v [L N K S d]
    num_groups: int,
    eps: float,
):
    *norm_refs, q_ref, k_ref, v_ref = refs
    row, kv_head = pl.program_id(0), pl.program_id(1)
    block_size, head_dim = k_ref.shape[3:]
    half = head_dim // 2
    head = lax.iota(jnp.int32, pl.next_power_of_2(num_groups + 2))
    dims = lax.iota(jnp.int32, half)
    columns = (kv_head * (num_groups + 2) + head)[:, None] * head_dim + dims[None, :]
    mask = (head < num_groups + 2)[:, None]
    x = plt.load(qkv_ref.at[row, columns], mask=mask, other=0.0).astype(jnp.float32)
    y = plt.load(qkv_ref.at[row, columns + half], mask=mask, other=0.0).astype(jnp.float32)
    if norm_refs:
        x, y = _normed(x, y, head, dims, norm_refs, num_groups=num_groups, eps=eps)
    cos, sin = cos_ref[row, :][None, :], sin_ref[row, :][None, :]
    is_turned = (head <= num_groups)[:, None]
    low = jnp.where(is_turned, x * cos - y * sin, x).astype(q_ref.dtype)
    high = jnp.where(is_turned, y * cos + x * sin, y).astype(q_ref.dtype)

    layer, slot = layer_ref[0], slots_ref[row]
    block, offset = slot // block_size, slot % block_size
    for part, columns in ((low, dims), (high, dims + half)):
        index = (row, (kv_head * num_groups + head)[:, None], columns[None, :])
        plt.store(q_ref.at[index], part, mask=(head < num_groups)[:, None])
        for ref, own in ((k_ref, num_groups), (v_ref, num_groups + 1)):
            ref[layer, block, kv_head, offset, columns] = jnp.where((head == own)[:, None], part, 0).sum(axis=0)


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


def _check(qkv, cos, k, slots, q_norm, k_norm):
    (num_rows, width), num_kv_heads, head_dim = qkv.shape, k.shape[2], k.shape[4]
    if width % (num_kv_heads * head_dim) or cos.shape != (num_rows, head_dim // 2) or slots.shape != (num_rows,):
        raise ValueError(f"qkv {qkv.shape}, cos {cos.shape} and slots {slots.shape} don't fit a cache {k.shape}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together: give both or none")
    if head_dim < MIN_HEAD_DIM or head_dim & (head_dim - 1):
        raise KernelUnsupportedError(
            f"the Triton backend needs a power-of-two head_dim of at least {MIN_HEAD_DIM}, got {head_dim}"
        )


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rope_append(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    layer: jax.Array | int,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q [B H d], and k and v with the new tokens, as `rope_append_reference` defines them.

    The caches are written in place where the caller's jit owns them.

    Args:
      qkv: [B K*(G+2)*d], for each KV head its G queries, its key and its value.
      cos, sin: f32[B d/2]
      k, v: [L N K S d]
      slots: i32[B], block * S + offset; where two are alike, one of the tokens is kept.
      layer: i32[]
      q_norm, k_norm: [d], weights of the root-mean-square norms of queries and keys, or None.
      eps: added to the mean squares.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes don't fit each other.
      KernelUnsupportedError: the head size is no power of two.
    """
    _check(qkv, cos, k, slots, q_norm, k_norm)
    (num_rows, width), num_kv_heads, head_dim = qkv.shape, k.shape[2], k.shape[4]
    num_groups = width // (num_kv_heads * head_dim) - 2
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)
    q, k, v = pl.pallas_call(
        functools.partial(_kernel, num_groups=num_groups, eps=eps),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_kv_heads * num_groups, head_dim), k.dtype),
            *(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k, v)),
        ],
        grid=(num_rows, num_kv_heads),
        input_output_aliases={5: 1, 6: 2},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rope_append",
    )(qkv, cos, sin, slots, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), k, v, *norms)
    return q, k, v
