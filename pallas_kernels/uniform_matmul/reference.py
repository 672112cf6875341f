"""The uniform product, the specification: float32, in tiles of a fixed number of rows."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.int8_matmul.reference import dense_matmul_reference, dequantize


@functools.partial(jax.jit, static_argnames=("group_size", "has_inputs_first"))
def uniform_parts_reference(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    *,
    group_size: int = 0,
    has_inputs_first: bool = False,
) -> jax.Array:
    """Returns the product as its only part f32[1 M O]; a kernel may return more, whose sum it is.

    A row's bits don't depend on how many rows there are, nor on where it stands.

    Args:
      x: [M I]
      weight: int8[O I] with scales, or dense [O I], or [I O] if has_inputs_first.
      scale: f16 or f32[O ceil(I/group_size)]
      group_size: inputs per scale; the last group may be short.
    """
    if scale is not None:
        weight = dequantize(weight, scale, group_size=group_size)
    weight = weight.T if has_inputs_first else weight
    return jnp.expand_dims(dense_matmul_reference(x.astype(jnp.float32), weight), 0)


@functools.partial(jax.jit, static_argnames=("group_size", "has_inputs_first", "out_dtype"))
def uniform_gated_reference(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    *,
    group_size: int = 0,
    has_inputs_first: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns silu(gate) * up [M O/2] of the two halves of the product, computed in float32.

    Args:
      x, weight, scale, group_size, has_inputs_first: as in `uniform_parts_reference`.
      out_dtype: of the result, x's by default.
    """
    options = {"group_size": group_size, "has_inputs_first": has_inputs_first}
    gate, up = jnp.split(uniform_parts_reference(x, weight, scale, **options)[0], 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(out_dtype or x.dtype)
