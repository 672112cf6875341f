"""Weights: those that a step reads, by its size."""

import dataclasses

import jax.numpy as jnp

from photon_jax.engine.placement import placed_shapes
from photon_jax.models.params import Params
from photon_jax.ops.expansion import expand
from photon_jax.ops.linear import KERNEL_ROWS
from photon_jax.step_io import StepLayout


@dataclasses.dataclass(frozen=True, slots=True)
class StepWeights:
    """The weights of an engine, or their shapes.

    Attributes:
      params: as they are given.
      expanded: the same with int8 weights dequantized, for steps of so many rows that each would do that; None where
        there are none, or no memory for them.
    """

    params: Params
    expanded: Params | None = None

    @classmethod
    def expanding(cls, params: Params, dtype: str) -> "StepWeights":
        """Returns weights with the int8 ones among them in dtype too."""
        return cls(params, expand(params, jnp.dtype(dtype)))

    def shapes(self) -> "StepWeights":
        """Returns the abstract trees of both, as programs are compiled for them."""
        return StepWeights(placed_shapes(self.params), placed_shapes(self.expanded))

    def of(self, layout: StepLayout) -> Params:
        """Returns what a step reads: layers by its tokens, the head by its rows; scores take few rows at a time."""
        if self.expanded is None:
            return self.params
        layers = self.expanded.layers if layout.num_tokens > KERNEL_ROWS else self.params.layers
        has_many_rows = layout.num_rows > KERNEL_ROWS and not layout.has_scores
        head = self.expanded.lm_head if has_many_rows else self.params.lm_head
        return dataclasses.replace(self.params, layers=layers, lm_head=head)
