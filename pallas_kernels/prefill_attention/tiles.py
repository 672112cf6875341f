"""Tiles of prefill attention: what a program works on, and which choices are worth measuring."""

import dataclasses

from pallas_kernels.common.tuning import lookup_tuned


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Sizes of a call; `tile_tokens` fixes the arithmetic.

    Attributes:
      tile_tokens: context tokens of one online-softmax step.
      num_warps: warps of a program.
      num_stages: software pipelining depth of the loop over tiles.
    """

    tile_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name in ("tile_tokens", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.tile_tokens < 16:
            raise ValueError(f"tile_tokens must be at least 16, got {self.tile_tokens}")
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, got {self.num_stages}")

    @property
    def label(self) -> str:
        """The sizes as a short name for kernels and tables."""
        return f"t{self.tile_tokens}_w{self.num_warps}_p{self.num_stages}"


def tuning_key(*, head_dim: int, num_groups: int, block_size: int, query_tile: int, dtype: str) -> dict[str, int | str]:
    """Returns the facts that tiles may depend on."""
    facts = {"head_dim": head_dim, "num_groups": num_groups, "block_size": block_size, "query_tile": query_tile}
    return facts | {"dtype": dtype}


def heuristic(*, head_dim: int, dtype: str) -> TileConfig:
    """Returns tiles that every supported shape accepts."""
    if dtype == "float32":
        return TileConfig(tile_tokens=32, num_warps=4 if head_dim <= 64 else 8, num_stages=2)
    return TileConfig()


def choose_tiles(
    *, device: str, head_dim: int, num_groups: int, block_size: int, query_tile: int, dtype: str
) -> TileConfig:
    """Returns the measured winner for this device, else what the heuristic says."""
    shape = {"head_dim": head_dim, "num_groups": num_groups, "block_size": block_size, "query_tile": query_tile}
    tuned = lookup_tuned("prefill_attention", device, tuning_key(**shape, dtype=dtype))
    return TileConfig(**tuned) if tuned else heuristic(head_dim=head_dim, dtype=dtype)  # type: ignore[arg-type]


def candidates() -> tuple[TileConfig, ...]:
    """Returns the tiles that a tuner times, the likeliest first."""
    sizes = [(64, 4, 2), (64, 4, 3), (128, 4, 2), (64, 8, 3), (128, 8, 2), (32, 4, 4)]
    return tuple(TileConfig(tile_tokens=t, num_warps=w, num_stages=p) for t, w, p in sizes)
