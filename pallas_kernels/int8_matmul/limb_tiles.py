"""Tiles of the products with limbs: sizes of Triton's kernel, and the choice between it and Mosaic's."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.int8_matmul.mosaic_tiles import MAX_ROWS, MosaicTiles, wide_tiles

WIDE = 8192  # outputs from which a product fills the chip without splits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LimbTiles:
    """Sizes of a call of Triton's kernel; M, O and I are rows, outputs and inputs.

    Attributes:
      tile_m: rows of a program.
      tile_n: outputs of a program.
      tile_k: inputs of one step of the loop, a multiple of the group size.
      k_splits: programs that share an output's inputs.
      num_warps: warps of a program.
      num_stages: software pipelining depth.
    """

    tile_m: int = 8
    tile_n: int = 64
    tile_k: int = 128
    k_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        for name, least in (("tile_m", 8), ("tile_n", 16), ("tile_k", 32), ("num_warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two of at least {least}, got {value}")
        if self.k_splits < 1 or self.num_stages < 1:
            raise ValueError(f"k_splits and num_stages must be positive, got {self.k_splits} and {self.num_stages}")

    @property
    def label(self) -> str:
        """The sizes as a short name for kernels and tables."""
        rest = f"s{self.k_splits}_w{self.num_warps}_p{self.num_stages}"
        return f"m{self.tile_m}_n{self.tile_n}_k{self.tile_k}_{rest}"


def choose_limb_tiles(
    *, m: int, n: int, k: int, group_size: int, scale_dtype: jnp.dtype, has_mosaic: bool
) -> LimbTiles | MosaicTiles:
    """Returns tiles that every supported shape accepts, after what the runs in NOTES.md found best.

    The splits depend on n and k alone, and with them a row's bits.

    Args:
      m: rows, at most 128.
      n: outputs.
      k: inputs.
      group_size: inputs per scale.
      scale_dtype: of the weights' scales.
      has_mosaic: whether the device and the installed JAX run Mosaic's kernel.
    """
    tile_m = min(64, max(8, 1 << (m - 1).bit_length()))
    is_wide = n >= WIDE
    if has_mosaic and is_wide and m > 32 and k % 128 == 0 and n % 8 == 0:
        # The two kernels differ in the last bit, so Mosaic's has all of these row counts or none.
        largest, found = (wide_tiles(rows, (n, k), scale_dtype, group_size) for rows in (MAX_ROWS, m))
        if largest is not None and found is not None:
            return found
    # A group a step: with several, the scales of two steps don't fit into registers.
    sizes = {"tile_m": tile_m, "tile_k": group_size, "num_stages": min(8, 512 // group_size)}
    if n >= 4 * WIDE:
        return LimbTiles(tile_n=128, num_warps=8, **sizes)
    return LimbTiles(k_splits=1 if is_wide else max(1, min(8, k // 1024)), **sizes)
