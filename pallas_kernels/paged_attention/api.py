"""Decode attention that appends to the cache: checks the arguments, picks tiles, calls the backend."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import device_name
from pallas_kernels.paged_attention.tiles import TileConfig, choose_tiles
from pallas_kernels.paged_attention.triton import append_attention_triton, check_support
from pallas_kernels.rope_append.triton import check_new_tokens


def check_cache(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array,
    v: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> None:
    """Raises ValueError unless q [* H d], keys and values, and the scales of int8 ones, fit each other."""
    if q.ndim != 3 or k.ndim != 5 or k.shape != v.shape:
        raise ValueError(f"expected q [* H d] and k, v [L N K S d] of one shape, got {q.shape}, {k.shape}, {v.shape}")
    if q.shape[2] != k.shape[4] or q.shape[1] % k.shape[2]:
        raise ValueError(f"q {q.shape} doesn't fit k {k.shape}: head_dim must be equal, H a multiple of K")
    if k.dtype == v.dtype == jnp.int8:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is None or scale.shape != k.shape[:-1]:
                got = None if scale is None else scale.shape
                raise ValueError(f"int8 k and v need {name} [L N K S] = {k.shape[:-1]}, got {got}")
    elif k_scale is not None or v_scale is not None:
        raise ValueError(f"k_scale and v_scale belong to int8 k and v, got {k.dtype} and {v.dtype}")
    elif not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, or int8 k and v, got {q.dtype}, {k.dtype}, {v.dtype}")


def _check_rows(num_rows: int, block_tables: jax.Array, positions: jax.Array) -> None:
    if block_tables.ndim != 2 or block_tables.shape[0] != num_rows or positions.shape != (num_rows,):
        raise ValueError(
            f"expected block_tables [B P] and positions [B] with B = {num_rows}, "
            f"got {block_tables.shape} and {positions.shape}"
        )
    if block_tables.dtype != jnp.int32 or positions.dtype != jnp.int32:
        raise ValueError(f"tables and positions must be int32, got {block_tables.dtype} and {positions.dtype}")


def append_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    layer: jax.Array | int,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    scale: float | None = None,
    dtype: jnp.dtype | None = None,
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns what `append_attention_reference` does: decode attention [B H d], and the cache with the new tokens.

    The cache is written in place where the caller's jit owns it.

    Args:
      slots: i32[B]; what lies there is finite. All other arrays are as the reference has them.
      dtype: of the result, and of queries, keys and values before they are rounded to int8; by default the cache's.
      tiles: sizes; by default the measured ones for this device, else the heuristic's.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the kernel can't compute these shapes or dtypes.
    """
    cache = tuple(array for array in (k, v, k_scale, v_scale) if array is not None)
    check_new_tokens(qkv, cos, cache, slots, q_norm, k_norm, dtype)
    (_, num_rows, width), (num_kv_heads, block_size, head_dim) = qkv.shape, k.shape[2:]
    dtype, num_groups = jnp.dtype(dtype or k.dtype), width // (num_kv_heads * head_dim) - 2
    check_cache(jax.ShapeDtypeStruct((num_rows, num_kv_heads * num_groups, head_dim), dtype), k, v, k_scale, v_scale)
    _check_rows(num_rows, block_tables, positions)
    check_support(head_dim=head_dim, dtype=dtype, block_size=block_size)
    key: dict[str, Any] = {"head_dim": head_dim, "num_groups": num_groups, "block_size": block_size}
    tiles = tiles or choose_tiles(device=device_name(), dtype=dtype.name, **key)
    arrays = (qkv, cos, sin, cache, slots, block_tables, positions, jnp.asarray(layer, jnp.int32))
    norms = tuple(norm for norm in (q_norm, k_norm) if norm is not None)
    scale = head_dim**-0.5 if scale is None else scale
    options: dict[str, Any] = {"eps": eps, "dtype": dtype, "interpret": interpret}
    found: tuple[jax.Array, ...] = append_attention_triton(*arrays, norms=norms, scale=scale, tiles=tiles, **options)
    return found
