"""Tiles of the uniform product: they depend on the weights alone, never on the number of rows."""

import dataclasses

_PROGRAMS = 128  # of one tile of rows, that a chip should have: inputs are split where the outputs are too few
_MAX_SPLITS = 8
_MIN_STEPS = 4  # of a split


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Sizes of a call; tile_k and k_splits fix the order of the sum.

    Attributes:
      tile_m: rows of a program.
      tile_n: outputs of a program.
      tile_k: inputs of one step of the loop.
      k_splits: programs that share an output's inputs.
      num_warps: warps of a program.
      num_stages: software pipelining depth.
    """

    tile_m: int = 64
    tile_n: int = 64
    tile_k: int = 64
    k_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two of at least 16, got {value}")
        for name in ("k_splits", "num_warps", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def label(self) -> str:
        """The sizes as a short name for kernels and tables."""
        sizes = f"m{self.tile_m}_n{self.tile_n}_k{self.tile_k}"
        return f"{sizes}_s{self.k_splits}_w{self.num_warps}_p{self.num_stages}"


def choose_tiles(*, n: int, k: int, group_size: int, dtype: str, is_split: bool) -> TileConfig:
    """Returns the tiles for weights of n outputs and k inputs; group_size 0 stands for dense weights.

    64 rows are what the tensor cores of one program work on at once: a step of few rows computes up to 64 times what
    it needs and still waits for its weights, and a long prompt reads them from the cache of the chip.

    Args:
      is_split: whether the caller adds the parts of splits.
    """
    tile_k = 32 if dtype == "float32" else max(group_size, 64)
    splits = 1
    while (
        is_split and -(-n // 64) * splits < _PROGRAMS and splits < _MAX_SPLITS and k >= 2 * splits * _MIN_STEPS * tile_k
    ):
        splits *= 2
    return TileConfig(tile_k=tile_k, k_splits=splits, num_stages=2 if dtype == "float32" else 3 if group_size else 4)
