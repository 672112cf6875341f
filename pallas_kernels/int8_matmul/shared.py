"""What the kernels of the small-M matmul have in common: how inputs are split, and what is beside a product."""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.int8_matmul.tiles import TileConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What a kernel does beside the product.

    Attributes:
      has_scale: the weights are int8 with scales.
      is_gated: the result is silu(gate) * up of the two halves of the outputs.
    """

    has_scale: bool
    is_gated: bool = False

    def take(self, refs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the references of the scale, None where there is none, and the output."""
        return refs if self.has_scale else (None, *refs)


def split_steps(num_inputs: int, tiles: TileConfig) -> tuple[int, int]:
    """Returns the inputs of one split, a multiple of tile_k, and how many steps it takes."""
    steps = pl.cdiv(pl.cdiv(num_inputs, tiles.k_splits), tiles.tile_k)
    return steps * tiles.tile_k, steps
