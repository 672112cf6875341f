"""The residual stream between the fusions of a layer: what a product adds to it may still lie beside it, in parts.

A kernel splits a product of few rows over the chip, and each split leaves a part. The norm that comes next reads the
parts as they are, so that no launch is spent on adding them: a product is followed by a `Stream`, a norm by an array.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import LimbRows, add_parts, add_rms_norm
from photon_jax.config import Backend
from photon_jax.models.params import Linear
from photon_jax.ops.linear import KERNEL_ROWS, Rows, has_parts, limb_group, linear, linear_parts
from photon_jax.ops.norm import normed_rows
from photon_jax.ops.tiles import RowTiles, map_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """The residual stream of T tokens, base + (the sum of parts).

    It stays in float32: sums of many layers lose most by rounding.

    Attributes:
      base: without the last product, or with it.
      parts: of the last product where they were left for the norm, added one after the other, then to base; else None.
    """

    base: jax.Array  # f32[T D]
    parts: jax.Array | None = None  # f32[S T D]

    def settled(self) -> jax.Array:
        """Returns the stream as one array f32[T D]."""
        return self.base if self.parts is None else self.base + add_parts(self.parts)


def add_product(
    residual: jax.Array,  # f32[T D]
    x: Rows,  # [T I]
    layer: Linear,
    *,
    backend: Backend,
    tiles: RowTiles | None,
) -> Stream:
    """Returns residual + linear(x).

    A kernel's product stays beside the residual, in parts; so does one of many rows, to which XLA would add the
    residual in a launch of its own (of few rows it does that in the product's).
    """
    is_large = backend == "triton" and x.shape[0] > KERNEL_ROWS
    if isinstance(x, LimbRows) or is_large or has_parts(layer, x, backend):
        return Stream(base=residual, parts=linear_parts(x, layer, backend=backend))

    def compute(x: jax.Array, residual: jax.Array) -> tuple[jax.Array]:
        return (residual + linear(x, layer, backend=backend),)

    (base,) = map_rows(compute, tiles, x, residual)
    return Stream(base=base)


def map_normed(
    fn: Callable[..., tuple[Any, ...]],
    stream: Stream,
    weight: jax.Array,  # [D]
    *arrays: jax.Array,  # [T *] each
    reader: Linear,
    eps: float,
    backend: Backend,
    tiles: RowTiles | None,
) -> tuple[tuple[Any, ...], jax.Array]:
    """Returns fn(the normed stream [T D], *arrays), computed as `map_rows` does, and the stream as one array f32[T D],
    which the norm has added up on its way.

    Args:
      reader: the layer that fn gives the normed stream to: it comes in the weight's dtype, or in limbs if this layer
        wants them.
    """
    group_size = limb_group(reader, stream.base.shape[0], weight.dtype, backend)
    if stream.parts is not None:
        normed, residual = add_rms_norm(stream.base, stream.parts, weight, eps=eps, group_size=group_size)
        return map_rows(fn, tiles, normed, *arrays), residual

    def compute(base: jax.Array, *arrays: jax.Array) -> tuple[Any, ...]:
        return fn(normed_rows(base, weight, eps=eps, backend=backend, group_size=group_size), *arrays)

    return map_rows(compute, tiles, stream.base, *arrays), stream.base
