"""Matmuls for few rows: check the arguments, pick tiles and backend, call it."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import device_name, has_mosaic
from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.common.limbs import LimbRows, check_group
from pallas_kernels.int8_matmul.limb_tiles import LimbTiles, choose_limb_tiles
from pallas_kernels.int8_matmul.limbs_triton import limb_parts_triton
from pallas_kernels.int8_matmul.mosaic_tiles import MosaicTiles
from pallas_kernels.int8_matmul.tiles import TileConfig, choose_tiles
from pallas_kernels.int8_matmul.triton import check_support, matmul_triton, parts_triton

Backend = Literal["triton"]


def _check_product(x: jax.Array, weight: jax.Array) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"expected x [M I] and weights [O I], got {x.shape} and {weight.shape}")


def _check_scales(q: jax.Array, scale: jax.Array, group_size: int) -> None:
    if q.dtype != jnp.int8 or scale.dtype not in (jnp.float16, jnp.float32):
        raise ValueError(f"expected int8 weights with float16 or float32 scales, got {q.dtype} and {scale.dtype}")
    if group_size < 1 or scale.shape != (q.shape[0], -(-q.shape[1] // group_size)):
        raise ValueError(
            f"weights {q.shape} with group_size {group_size} need scales "
            f"{(q.shape[0], -(-q.shape[1] // max(1, group_size)))}, got {scale.shape}"
        )


def _check_weight(x: jax.Array, weight: jax.Array, scale: jax.Array | None, group_size: int) -> None:
    if scale is not None:
        _check_scales(weight, scale, group_size)
    elif weight.dtype != x.dtype:
        raise ValueError(f"x and the weights must have one dtype, got {x.dtype} and {weight.dtype}")


def _choose(x: jax.Array, weight: jax.Array, group_size: int, backend: Backend, tiles: TileConfig | None) -> TileConfig:
    if backend != "triton":
        raise KernelUnsupportedError(f"the matmuls have the backend triton, got {backend!r}")
    (m, k), n = x.shape, weight.shape[0]
    tiles = tiles or choose_tiles(device=device_name(), m=m, n=n, k=k, group_size=group_size, dtype=x.dtype.name)
    check_support(m=m, group_size=group_size, dtype=x.dtype, tiles=tiles)
    return tiles


def int8_matmul(
    x: jax.Array,
    q: jax.Array,
    scale: jax.Array,
    *,
    group_size: int,
    backend: Backend = "triton",
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns x @ dequantize(q, scale).T as `int8_matmul_reference` defines it, summed in float32.

    Args:
      x: bf16, f16 or f32[M I]
      q: int8[O I]
      scale: f16 or f32[O ceil(I/group_size)]
      group_size: inputs per scale, a power of two; the last group may be short.
      backend: which implementation.
      tiles: sizes; by default the measured ones for this device, else the heuristic's. They may depend on M, and with
        them the order of the sum: give one for all M where a row's bits must not depend on its mates.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    _check_product(x, q)
    _check_scales(q, scale, group_size)
    tiles = _choose(x, q, group_size, backend, tiles)
    out: jax.Array = matmul_triton(x, q, scale, group_size=group_size, tiles=tiles, interpret=interpret)
    return out


def dense_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    backend: Backend = "triton",
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns x @ weight.T as `dense_matmul_reference` defines it, summed in float32.

    Args:
      x: bf16, f16 or f32[M I]
      weight: of x's dtype [O I]
      backend: which implementation.
      tiles: sizes; by default the measured ones for this device, else the heuristic's.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    _check_product(x, weight)
    _check_weight(x, weight, None, 0)
    tiles = _choose(x, weight, 0, backend, tiles)
    out: jax.Array = matmul_triton(x, weight, None, group_size=0, tiles=tiles, interpret=interpret)
    return out


def fused_matmul(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    *,
    group_size: int = 0,
    is_gated: bool = False,
    out_dtype: jnp.dtype | None = None,
    backend: Backend = "triton",
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns a product with its gate, as `fused_matmul_reference` defines it.

    Args:
      x: bf16, f16 or f32[M I]
      weight: int8[O I] with scales, or dense of x's dtype.
      scale: f16 or f32[O ceil(I/group_size)]
      group_size: inputs per scale, a power of two.
      is_gated: the weights hold a gate's outputs, then those of an up projection; the result is silu(gate) * up.
      out_dtype: of the result, x's by default.
      backend: which implementation.
      tiles: sizes; by default the measured ones for this device, else the heuristic's, with half the outputs if the
        kernel gates.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    _check_product(x, weight)
    if is_gated and weight.shape[0] % 2:
        raise ValueError(f"gated weights hold two equal halves of outputs, got {weight.shape[0]} outputs")
    _check_weight(x, weight, scale, group_size)
    chosen = _choose(x, weight, group_size, backend, tiles)
    if tiles is None and is_gated and chosen.can_gate:
        chosen = dataclasses.replace(chosen, tile_n=max(1 if chosen.method == "sum" else 16, chosen.tile_n // 2))
    options = {"group_size": group_size, "is_gated": is_gated, "out_dtype": out_dtype}
    out: jax.Array = matmul_triton(x, weight, scale, **options, tiles=chosen, interpret=interpret)
    return out


def matmul_parts(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    *,
    group_size: int = 0,
    backend: Backend = "triton",
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns a product as f32[S M O], for whoever reads it to add: `add_parts` of them is x @ weight.T in float32.

    S, at least 1, is the number of splits of the tiles. A kernel that adds them as it reads them saves a launch.

    Args:
      x: bf16, f16 or f32[M I]
      weight: int8[O I] with scales, or dense of x's dtype.
      scale: f16 or f32[O ceil(I/group_size)]
      group_size: inputs per scale, a power of two.
      backend: which implementation.
      tiles: sizes; by default the measured ones for this device, else the heuristic's.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    _check_product(x, weight)
    _check_weight(x, weight, scale, group_size)
    tiles = _choose(x, weight, group_size, backend, tiles)
    parts: jax.Array = parts_triton(x, weight, scale, group_size=group_size, tiles=tiles, interpret=interpret)
    return parts


def limb_matmul_parts(
    x: LimbRows,
    q: jax.Array,
    scale: jax.Array,
    *,
    tiles: LimbTiles | MosaicTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns a product as f32[S M O], for whoever reads it to add: their sum is what `limb_matmul_reference` defines.

    Args:
      x: rows in limbs, [M I].
      q: int8[O I]
      scale: f16 or f32[O ceil(I/g)], of x's groups.
      tiles: sizes, and which kernel; by default what was measured best. A row's bits depend on the splits alone, and
        those of the default on O and I.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the kernel can't compute these shapes.
    """
    check_group(x.group_size)
    (m, k), n = x.shape, q.shape[0]
    _check_scales(q, scale, x.group_size)
    if x.limbs.shape != (2, *x.shape) or q.shape[1] != k or x.scale.shape != (m, scale.shape[1]):
        raise ValueError(
            f"expected limbs [2 M I] with scales [M {scale.shape[1]}] for weights [O I], got {x.limbs.shape}, "
            f"{x.scale.shape} and {q.shape}"
        )
    if tiles is None:
        tiles = choose_limb_tiles(
            m=m, n=n, k=k, group_size=x.group_size, scale_dtype=scale.dtype, has_mosaic=has_mosaic()
        )
    if isinstance(tiles, LimbTiles):
        parts: jax.Array = limb_parts_triton(x, q, scale, tiles=tiles, interpret=interpret)
        return parts
    from pallas_kernels.int8_matmul.mosaic import limb_parts_mosaic  # here, since older JAXes lack some of its names

    parts = limb_parts_mosaic(x, q, scale, tiles=tiles, interpret=interpret)
    return parts
