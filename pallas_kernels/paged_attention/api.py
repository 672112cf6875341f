"""Paged decode attention: checks the arguments, picks tiles and backend, calls it."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import device_name
from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.paged_attention.tiles import TileConfig, choose_tiles
from pallas_kernels.paged_attention.triton import check_support, paged_attention_triton

Backend = Literal["triton"]


def check_cache(
    q: jax.Array,
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


def _check_rows(q: jax.Array, block_tables: jax.Array, context_lens: jax.Array) -> None:
    if block_tables.ndim != 2 or block_tables.shape[0] != q.shape[0] or context_lens.shape != q.shape[:1]:
        raise ValueError(
            f"expected block_tables [B P] and context_lens [B] with B = {q.shape[0]}, "
            f"got {block_tables.shape} and {context_lens.shape}"
        )
    if block_tables.dtype != jnp.int32 or context_lens.dtype != jnp.int32:
        raise ValueError(f"tables and lengths must be int32, got {block_tables.dtype} and {context_lens.dtype}")


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    layer: jax.Array | int,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale: float | None = None,
    backend: Backend = "triton",
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns decode attention as `paged_attention_reference` defines it.

    Args:
      q: bf16, f16 or f32[B H d]; the other arrays are as the reference has them.
      k_scale, v_scale: bf16, f16 or f32[L N K S], of int8 k and v only.
      scale: of the scores; 1 / sqrt(d) by default.
      backend: which implementation.
      tiles: sizes; by default the measured ones for this device, else the heuristic's.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    check_cache(q, k, v, k_scale, v_scale)
    _check_rows(q, block_tables, context_lens)
    if backend != "triton":
        raise KernelUnsupportedError(f"paged_attention has the backend triton, got {backend!r}")
    head_dim, block_size = q.shape[2], k.shape[3]
    check_support(head_dim=head_dim, dtype=q.dtype, block_size=block_size)
    shape = {"head_dim": head_dim, "num_groups": q.shape[1] // k.shape[2], "block_size": block_size}
    tiles = tiles or choose_tiles(device=device_name(), dtype=q.dtype.name, **shape)
    scale = head_dim**-0.5 if scale is None else scale
    arguments, scales = (q, k, v, block_tables, context_lens, layer), {"k_scale": k_scale, "v_scale": v_scale}
    out: jax.Array = paged_attention_triton(*arguments, **scales, scale=scale, tiles=tiles, interpret=interpret)
    return out
