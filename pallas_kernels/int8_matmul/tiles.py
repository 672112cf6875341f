"""Tiles of the small-M matmul: what a program works on, and which choices are worth measuring."""

import dataclasses
from typing import Literal

from pallas_kernels.common.tuning import lookup_tuned

Method = Literal["sum", "dot"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Sizes and method of a call; M, O and I are rows, outputs and inputs.

    Attributes:
      method: `sum` multiplies and adds on the ordinary cores, weights read once for all rows, for few rows;
        `dot` uses the tensor cores with rows padded to 16.
      tile_m: rows of a program (`dot`; `sum` takes them all).
      tile_n: outputs of a program.
      tile_k: inputs of one step of the loop.
      k_splits: programs that share an output's inputs; their parts are added in order.
      num_warps: warps of a program.
      num_stages: software pipelining depth.
    """

    method: Method
    tile_m: int = 16
    tile_n: int = 16
    tile_k: int = 128
    k_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        if self.method not in ("sum", "dot"):
            raise ValueError(f"method must be sum or dot, got {self.method!r}")
        for name in ("tile_m", "tile_n", "tile_k", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.method == "dot" and min(self.tile_m, self.tile_n, self.tile_k) < 16:
            raise ValueError(
                f"dot needs tiles of at least 16, got {self.tile_m} x {self.tile_n} x {self.tile_k}; use sum"
            )
        if self.k_splits < 1 or self.num_stages < 1:
            raise ValueError(f"k_splits and num_stages must be positive, got {self.k_splits} and {self.num_stages}")

    @property
    def label(self) -> str:
        """The sizes as a short name for kernels and tables."""
        rows = f"m{self.tile_m}_" if self.method == "dot" else ""
        sizes = f"n{self.tile_n}_k{self.tile_k}_s{self.k_splits}_w{self.num_warps}_p{self.num_stages}"
        return f"{self.method}_{rows}{sizes}"


def row_bucket(num_rows: int) -> int:
    """Returns the power of two that stands for a number of rows in the tuned table."""
    return 1 << (num_rows - 1).bit_length()


def tuning_key(*, m: int, n: int, k: int, group_size: int, dtype: str) -> dict[str, int | str]:
    """Returns the facts that tiles may depend on; group_size 0 stands for dense weights."""
    return {"m": row_bucket(m), "n": n, "k": k, "group_size": group_size, "dtype": dtype}


def _floor_power_of_two(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)


def heuristic(*, m: int, n: int, k: int, group_size: int) -> TileConfig:
    """Returns tiles that every supported shape accepts.

    Up to 4 rows, `sum` with whole rows of weights (up to 4096 inputs at once) and 16 KiB or so a program. Beyond,
    `dot`, one group a step.
    """
    weight_bytes = 1 if group_size else 2
    if m <= 4:
        tile_k = min(4096, 1 << (k - 1).bit_length())
        tile_k = max(tile_k, group_size or 16)
        tile_n = max(1, min(16, _floor_power_of_two(16384 // (tile_k * weight_bytes)), _floor_power_of_two(n)))
        return TileConfig(method="sum", tile_n=tile_n, tile_k=tile_k, num_warps=4, num_stages=2)
    if m <= 32:
        tile_m = 16 if m <= 16 else 32
        return TileConfig(method="dot", tile_m=tile_m, tile_n=16, tile_k=group_size or 128, num_warps=2, num_stages=5)
    return TileConfig(method="dot", tile_m=64, tile_n=64, tile_k=group_size or 64, num_warps=4, num_stages=4)


def choose_tiles(*, device: str, m: int, n: int, k: int, group_size: int, dtype: str) -> TileConfig:
    """Returns the measured winner for this device, else what the heuristic says."""
    tuned = lookup_tuned("int8_matmul", device, tuning_key(m=m, n=n, k=k, group_size=group_size, dtype=dtype))
    return TileConfig(**tuned) if tuned else heuristic(m=m, n=n, k=k, group_size=group_size)  # type: ignore[arg-type]


def candidates(*, m: int, n: int, k: int, group_size: int) -> tuple[TileConfig, ...]:
    """Returns the tiles that a tuner times, the heuristic's first."""
    found = [heuristic(m=m, n=n, k=k, group_size=group_size)]
    step = group_size or 64
    if m <= 4:
        whole = min(8192, 1 << (k - 1).bit_length())
        for tile_n, tile_k, warps in ((8, 2048, 4), (16, 2048, 8), (4, whole, 4), (8, whole, 8), (4, 1024, 2)):
            found.append(TileConfig(method="sum", tile_n=tile_n, tile_k=tile_k, num_warps=warps, num_stages=2))
    if m <= 32:
        tile_m = 16 if m <= 16 else 32
        sizes = [(16, 1, 2, 6), (32, 1, 4, 5), (64, 1, 4, 4), (32, 4, 4, 4), (64, 4, 4, 4), (128, 8, 8, 3)]
    else:
        tile_m = 128 if m > 64 else 64
        sizes = [(64, 1, 4, 4), (128, 1, 8, 3), (64, 4, 4, 4), (32, 1, 4, 4)]
    for tile_n, splits, warps, stages in sizes:
        found.append(
            TileConfig(
                method="dot",
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=step,
                k_splits=splits,
                num_warps=warps,
                num_stages=stages,
            )
        )
    return tuple(dict.fromkeys(found))
