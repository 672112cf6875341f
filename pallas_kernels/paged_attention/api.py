"""Paged decode attention: checks the arguments, picks tiles and backend, calls it."""

from typing import Any, Literal

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
    out, _ = _attend((q, k, v, block_tables, context_lens, layer), None, scale, backend, tiles, interpret)
    return out


def paged_attention_one_launch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    layer: jax.Array | int,
    counters: jax.Array,
    *,
    touched: tuple[jax.Array, ...] = (),
    scale: float | None = None,
    backend: Backend = "triton",
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `paged_attention` does from a single kernel, and the counters for the next call.

    Args:
      q: bf16, f16 or f32[B H d]
      k: [L N K S d]
      v: [L N K S d]
      block_tables: i32[B P]
      context_lens: i32[B]
      layer: i32[]
      counters: i32[B K] of finished programs: all 0 before, and 0 again after; donated where the caller's jit can.
      touched: weights [O I] of later products, I a power of two, that programs of their own read into the L2 while
        those of a short context wait for memory, 12 MB in all; they don't change the result. None are read if one
        split is enough.
      scale: of the scores; 1 / sqrt(d) by default.
      backend: which implementation.
      tiles: sizes; by default the measured ones for this device, else the heuristic's.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    if counters.shape != (q.shape[0], k.shape[2]) or counters.dtype != jnp.int32:
        raise ValueError(f"expected counters i32{(q.shape[0], k.shape[2])}, got {counters.dtype}{counters.shape}")
    for weight in touched:
        if weight.ndim != 2 or weight.shape[1] & (weight.shape[1] - 1):
            raise ValueError(f"touched weights must be [O I] with a power of two of inputs, got {weight.shape}")
    arguments = (q, k, v, block_tables, context_lens, layer)
    return _attend(arguments, counters, scale, backend, tiles, interpret, touched)


def _attend(
    arguments: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | int],
    counters: Any,
    scale: float | None,
    backend: Backend,
    tiles: TileConfig | None,
    interpret: bool,
    touched: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, Any]:
    q, k = arguments[:2]
    _check_arguments(*arguments[:5])
    if backend != "triton":
        raise KernelUnsupportedError(f"paged_attention has the backend triton, got {backend!r}")
    head_dim, block_size = q.shape[2], k.shape[3]
    check_support(head_dim=head_dim, dtype=q.dtype, block_size=block_size)
    tiles = tiles or choose_tiles(
        device=device_name(),
        head_dim=head_dim,
        num_groups=q.shape[1] // k.shape[2],
        block_size=block_size,
        dtype=q.dtype.name,
    )
    scale = head_dim**-0.5 if scale is None else scale
    found: tuple[jax.Array, Any] = paged_attention_triton(
        *arguments, counters, touched, scale=scale, tiles=tiles, interpret=interpret
    )
    return found
