"""Paged decode attention: checks the arguments, picks tiles and backend, calls it."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import device_name
from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.paged_attention.tiles import TileConfig, choose_tiles
from pallas_kernels.paged_attention.triton import check_support, paged_attention_triton

Backend = Literal["triton"]


def _check_arguments(
    q: jax.Array, k: jax.Array, v: jax.Array, block_tables: jax.Array, context_lens: jax.Array
) -> None:
    if q.ndim != 3 or k.ndim != 5 or k.shape != v.shape:
        raise ValueError(f"expected q [B H d] and k, v [L N K S d] of one shape, got {q.shape}, {k.shape}, {v.shape}")
    if q.shape[2] != k.shape[4] or q.shape[1] % k.shape[2]:
        raise ValueError(f"q {q.shape} doesn't fit k {k.shape}: head_dim must be equal, H a multiple of K")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
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
    scale: float | None = None,
    backend: Backend = "triton",
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns decode attention as `paged_attention_reference` defines it.

    Args:
      q: bf16, f16 or f32[B H d]
      k: [L N K S d]
      v: [L N K S d]
      block_tables: i32[B P]
      context_lens: i32[B]
      layer: i32[]
      scale: of the scores; 1 / sqrt(d) by default.
      backend: which implementation.
      tiles: sizes; by default the measured ones for this device, else the heuristic's.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    _check_arguments(q, k, v, block_tables, context_lens)
    if backend != "triton":
        raise KernelUnsupportedError(f"paged_attention has the backend triton, got {backend!r}")
    head_dim, block_size = q.shape[2], k.shape[3]
    check_support(head_dim=head_dim, dtype=q.dtype, block_size=block_size)
    num_groups, dtype = q.shape[1] // k.shape[2], q.dtype.name
    shape = {"head_dim": head_dim, "num_groups": num_groups, "block_size": block_size}
    tiles = tiles or choose_tiles(device=device_name(), dtype=dtype, **shape)
    scale = head_dim**-0.5 if scale is None else scale
    arguments = (q, k, v, block_tables, context_lens, layer)
    out: jax.Array = paged_attention_triton(*arguments, scale=scale, tiles=tiles, interpret=interpret)
    return out
