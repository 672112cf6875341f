"""Matmuls for few rows: check the arguments, pick tiles and backend, call it."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import device_name
from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.int8_matmul.tiles import TileConfig, choose_tiles
from pallas_kernels.int8_matmul.triton import check_support, matmul_triton

Backend = Literal["triton"]


def _check_product(x: jax.Array, weight: jax.Array) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"expected x [M I] and weights [O I], got {x.shape} and {weight.shape}")


def _call(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    group_size: int,
    backend: Backend,
    tiles: TileConfig | None,
    interpret: bool,
) -> jax.Array:
    if backend != "triton":
        raise KernelUnsupportedError(f"the matmuls have the backend triton, got {backend!r}")
    (m, k), n = x.shape, weight.shape[0]
    tiles = tiles or choose_tiles(device=device_name(), m=m, n=n, k=k, group_size=group_size, dtype=x.dtype.name)
    check_support(m=m, group_size=group_size, dtype=x.dtype, tiles=tiles)
    out: jax.Array = matmul_triton(x, weight, scale, group_size=group_size, tiles=tiles, interpret=interpret)
    return out


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
    if q.dtype != jnp.int8 or scale.dtype not in (jnp.float16, jnp.float32):
        raise ValueError(f"expected int8 weights with float16 or float32 scales, got {q.dtype} and {scale.dtype}")
    if group_size < 1 or scale.shape != (q.shape[0], -(-q.shape[1] // group_size)):
        raise ValueError(
            f"weights {q.shape} with group_size {group_size} need scales "
            f"{(q.shape[0], -(-q.shape[1] // max(1, group_size)))}, got {scale.shape}"
        )
    return _call(x, q, scale, group_size, backend, tiles, interpret)


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
    if weight.dtype != x.dtype:
        raise ValueError(f"x and the weights must have one dtype, got {x.dtype} and {weight.dtype}")
    return _call(x, weight, None, 0, backend, tiles, interpret)
