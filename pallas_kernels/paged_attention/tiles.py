"""Tiles of paged attention: what a program works on, and which choices are worth measuring."""

import dataclasses

from pallas_kernels.common.tuning import lookup_tuned


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Sizes that fix the work, and with `split_tokens` and `tile_tokens` the arithmetic, of a call.

    Attributes:
      split_tokens: context tokens of one program; fixed in size, so a row's result doesn't depend on its mates.
      tile_tokens: context tokens of one online-softmax step.
      num_warps: warps of a program.
      num_stages: software pipelining depth of the loop over tiles.
    """

    split_tokens: int = 256
    tile_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name in ("split_tokens", "tile_tokens", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.tile_tokens < 16:
            raise ValueError(f"tile_tokens must be at least 16, got {self.tile_tokens}")
        if self.split_tokens % self.tile_tokens:
            raise ValueError(
                f"split_tokens must be a multiple of tile_tokens, got {self.split_tokens} and {self.tile_tokens}"
            )
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, got {self.num_stages}")

    @property
    def label(self) -> str:
        """The sizes as a short name for kernels and tables."""
        return f"s{self.split_tokens}_t{self.tile_tokens}_w{self.num_warps}_p{self.num_stages}"


def tuning_key(*, head_dim: int, num_groups: int, block_size: int, dtype: str) -> dict[str, int | str]:
    """Returns the facts that tiles may depend on; not the batch, which must not change a row's arithmetic."""
    return {"head_dim": head_dim, "num_groups": num_groups, "block_size": block_size, "dtype": dtype}


def heuristic(*, head_dim: int, dtype: str) -> TileConfig:
    """Returns tiles that every supported shape accepts."""
    if dtype == "float32":
        return TileConfig(split_tokens=256, tile_tokens=32 if head_dim > 64 else 64, num_warps=4, num_stages=2)
    if head_dim > 64:
        return TileConfig()
    return TileConfig(split_tokens=256, tile_tokens=128, num_warps=4, num_stages=2)


def choose_tiles(*, device: str, head_dim: int, num_groups: int, block_size: int, dtype: str) -> TileConfig:
    """Returns the measured winner for this device, else what the heuristic says."""
    key = tuning_key(head_dim=head_dim, num_groups=num_groups, block_size=block_size, dtype=dtype)
    tuned = lookup_tuned("paged_attention", device, key)
    return TileConfig(**tuned) if tuned else heuristic(head_dim=head_dim, dtype=dtype)  # type: ignore[arg-type]


def candidates() -> tuple[TileConfig, ...]:
    """Returns the tiles that a tuner times, the likeliest first."""
    sizes = [(256, 64, 4, 3), (256, 64, 4, 2), (256, 64, 2, 4), (128, 64, 4, 2), (512, 64, 4, 4), (256, 128, 4, 2)]
    sizes += [(256, 32, 2, 4), (128, 128, 4, 1), (64, 64, 2, 1), (256, 128, 8, 2), (256, 256, 8, 1)]
    return tuple(TileConfig(split_tokens=s, tile_tokens=t, num_warps=w, num_stages=p) for s, t, w, p in sizes)
