"""Tiles of the small-M matmul: what a program works on, and which choices are worth measuring."""

import dataclasses
import itertools
from typing import Literal

from pallas_kernels.common.tuning import lookup_tuned

Method = Literal["sum", "dot", "swap"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Sizes and method of a call; M, O and I are rows, outputs and inputs.

    Attributes:
      method: `sum` multiplies and adds on the ordinary cores, weights read once for all rows, for few rows;
        `dot` uses the tensor cores with rows padded to 16; `swap` too, with the weights as the left operand.
      tile_m: rows of a program (`sum` takes them all).
      tile_n: outputs of a program.
      tile_k: inputs of one step of the loop.
      k_splits: programs that share an output's inputs; their parts are added in order.
      num_warps: warps of a program.
      num_stages: software pipelining depth.
      vector: inputs that a thread of `sum` loads at once, at least 4 of int8 weights.
    """

    method: Method
    tile_m: int = 16
    tile_n: int = 16
    tile_k: int = 128
    k_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    vector: int = 8

    def __post_init__(self) -> None:
        if self.method not in ("sum", "dot", "swap"):
            raise ValueError(f"method must be sum, dot or swap, got {self.method!r}")
        for name in ("tile_m", "tile_n", "tile_k", "num_warps", "vector"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.method != "sum" and min(self.tile_m, self.tile_n, self.tile_k) < 16:
            raise ValueError(
                f"{self.method} needs tiles of at least 16, got {self.tile_m} x {self.tile_n} x {self.tile_k}; use sum"
            )
        if self.k_splits < 1 or self.num_stages < 1:
            raise ValueError(f"k_splits and num_stages must be positive, got {self.k_splits} and {self.num_stages}")

    @property
    def can_gate(self) -> bool:
        """Whether the kernel gates: it must hold whole sums, and halves of a large tile cost more than a launch."""
        return self.k_splits == 1 and (self.method == "sum" or (self.method == "dot" and self.tile_m == 16))

    @property
    def label(self) -> str:
        """The sizes as a short name for kernels and tables."""
        rows = f"m{self.tile_m}_" if self.method != "sum" else ""
        sizes = f"n{self.tile_n}_k{self.tile_k}_s{self.k_splits}_w{self.num_warps}_p{self.num_stages}"
        return f"{self.method}_{rows}{sizes}" + (f"_v{self.vector}" if self.vector != 8 else "")


def row_bucket(num_rows: int) -> int:
    """Returns the power of two that stands for a number of rows in the tuned table."""
    return 1 << (num_rows - 1).bit_length()


def tuning_key(*, m: int, n: int, k: int, group_size: int, dtype: str) -> dict[str, int | str]:
    """Returns the facts that tiles may depend on; group_size 0 stands for dense weights."""
    return {"m": row_bucket(m), "n": n, "k": k, "group_size": group_size, "dtype": dtype}


def heuristic(*, m: int, n: int, k: int, group_size: int) -> TileConfig:
    """Returns tiles that every supported shape accepts, after what the runs in NOTES.md found best.

    Up to two rows: `sum` (dense weights: of at most 8192 inputs). Other small products: `dot`, with the inputs split
    where the outputs alone are too few programs to fill a chip. Int8 for more than 32 rows: `swap`.
    """
    step = max(128, 2 * group_size)
    if m <= 2 and (group_size or k <= 8192):
        return _streaming(n, k, group_size)
    if m <= 16:
        tile_m, tile_n, warps = 16, 64 if n >= 8192 else 32, 4
    elif m <= 64:
        tile_m, tile_n, warps, step = 32 if m <= 32 else 64, 64, 4, max(128, group_size)
    else:
        tile_m, tile_n, warps, step = 128, 128, 8, max(128, group_size)
    programs, splits = -(-m // tile_m) * -(-n // tile_n), 1
    wanted = 128 if m > 16 else 256 if programs >= 256 else 512  # splitting has its price, a sum after it
    while programs * splits < wanted and splits < 8 and k // splits >= 2 * step:
        splits *= 2
    method: Method = "swap" if m > 32 and group_size >= 128 else "dot"
    return TileConfig(
        method=method, tile_m=tile_m, tile_n=tile_n, tile_k=step, k_splits=splits, num_warps=warps, num_stages=3
    )


def _streaming(n: int, k: int, group_size: int) -> TileConfig:
    """Returns tiles of `sum`: a warp for a few outputs, up to four warps where outputs are few."""
    vector = 16 if group_size else 8  # 16 bytes
    if n >= 8192:
        tile_n, tile_k, warps = 4 if group_size else 2, 512, 1
    elif group_size:
        tile_k = min(128 * vector, max(512, 1 << (k - 1).bit_length()))
        tile_n, warps = 4, tile_k // (32 * vector)
    else:
        tile_n, tile_k, warps = (
            (1, 128 * vector, 4) if k > 4096 else (2, min(128 * vector, 1 << (k - 1).bit_length()), 1)
        )
    return TileConfig(
        method="sum", tile_n=tile_n, tile_k=max(tile_k, group_size), num_warps=warps, num_stages=2, vector=vector
    )


def choose_tiles(*, device: str, m: int, n: int, k: int, group_size: int, dtype: str) -> TileConfig:
    """Returns the measured winner for this device, else what the heuristic says."""
    tuned = lookup_tuned("int8_matmul", device, tuning_key(m=m, n=n, k=k, group_size=group_size, dtype=dtype))
    return TileConfig(**tuned) if tuned else heuristic(m=m, n=n, k=k, group_size=group_size)  # type: ignore[arg-type]


def candidates(*, m: int, n: int, k: int, group_size: int) -> tuple[TileConfig, ...]:
    """Returns the tiles that a tuner times, the heuristic's first."""
    found = [heuristic(m=m, n=n, k=k, group_size=group_size)]
    step = max(128, 2 * group_size)
    if m <= 4:
        whole = max(512, min(2048, 1 << (k - 1).bit_length()), group_size)
        for tile_n, tile_k, warps in ((2, 512, 1), (4, 512, 1), (2, whole, 1), (4, whole, 4), (8, 512, 1)):
            sizes = {"tile_n": tile_n, "tile_k": max(tile_k, group_size), "num_warps": warps}
            found.append(TileConfig(method="sum", num_stages=2, vector=16 if group_size else 8, **sizes))
    methods: tuple[Method, ...] = ("dot",)
    if m <= 32:
        tile_m = 16 if m <= 16 else 32
        shapes = [(32, 1, 4, 4), (64, 1, 4, 3), (32, 4, 4, 3), (64, 4, 4, 3), (32, 8, 4, 3)]
    else:
        tile_m, step = 128 if m > 64 else 64, max(128, group_size)
        shapes = [(64, 1, 4, 3), (128, 1, 8, 3), (64, 4, 4, 3), (128, 8, 8, 3)]
        methods = ("dot", "swap") if group_size else methods
    for method, (tile_n, splits, warps, stages) in itertools.product(methods, shapes):
        found.append(
            TileConfig(
                method=method,
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=step,
                k_splits=splits,
                num_warps=warps,
                num_stages=stages,
            )
        )
    return tuple(dict.fromkeys(found))
