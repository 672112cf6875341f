"""Prefill attention: checks the arguments, picks tiles, calls the backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import device_name
from pallas_kernels.paged_attention.api import check_cache
from pallas_kernels.paged_attention.triton import check_support
from pallas_kernels.prefill_attention.tiles import TileConfig, choose_tiles
from pallas_kernels.prefill_attention.triton import prefill_attention_triton


def _check_arguments(q: jax.Array, block_tables: jax.Array, positions: jax.Array, items: tuple[jax.Array, ...]) -> None:
    if q.ndim != 3:
        raise ValueError(f"expected q [T H d], got {q.shape}")
    if positions.shape != q.shape[:1]:
        raise ValueError(f"expected positions [T] with T = {q.shape[0]}, got {positions.shape}")
    if len({each.shape for each in items}) != 1 or items[0].ndim != 1:
        raise ValueError(f"expected item_rows, item_starts, item_lens [A], got {[each.shape for each in items]}")
    dtypes = [each.dtype for each in (block_tables, positions, *items)]
    if block_tables.ndim != 2 or any(dtype != jnp.int32 for dtype in dtypes):
        raise ValueError(
            f"expected block_tables i32[B P], and int32 positions and items, got {block_tables.shape} and "
            f"{[dtype.name for dtype in dtypes]}"
        )


def prefill_attention(
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
    query_tile: int,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale: float | None = None,
    tiles: TileConfig | None = None,
    is_uniform: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Returns causal attention of the items' tokens as `prefill_attention_reference` defines it.

    Args:
      q: bf16, f16 or f32[T H d]; the other arrays are as the reference has them.
      query_tile: most tokens of an item.
      k_scale, v_scale: bf16, f16 or f32[L N K S], of int8 k and v only.
      scale: of the scores; 1 / sqrt(d) by default.
      tiles: sizes; by default the measured ones for this device, else the heuristic's.
      is_uniform: one kernel for items of any length, so that a token has the same bits alone and in a chunk; items of
        one token take several times as long.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    items = (item_rows, item_starts, item_lens)
    check_cache(q, k, v, k_scale, v_scale)
    _check_arguments(q, block_tables, positions, items)
    head_dim, block_size = q.shape[2], k.shape[3]
    check_support(head_dim=head_dim, dtype=q.dtype, block_size=block_size)
    facts = {"head_dim": head_dim, "num_groups": q.shape[1] // k.shape[2], "block_size": block_size}
    tiles = tiles or choose_tiles(device=device_name(), **facts, query_tile=query_tile, dtype=q.dtype.name)
    options = {"query_tile": query_tile, "is_uniform": is_uniform, "tiles": tiles}
    scales = {"k_scale": k_scale, "v_scale": v_scale, "scale": head_dim**-0.5 if scale is None else scale}
    arguments = (q, k, v, block_tables, positions, *items, layer)
    out: jax.Array = prefill_attention_triton(*arguments, **scales, **options, interpret=interpret)
    return out
