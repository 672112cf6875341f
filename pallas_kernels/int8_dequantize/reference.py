"""Dequantization, the specification."""

import jax
import jax.numpy as jnp


def int8_dequantize_reference(q: jax.Array, scale: jax.Array, *, group_size: int, dtype: jnp.dtype) -> jax.Array:
    """Returns q times the scale of its group, rounded once to dtype [O I].

    Args:
      q: int8[O I]
      scale: f16 or f32[O ceil(I/group_size)]
      group_size: neighboring inputs that share a scale.
    """
    scales = jnp.repeat(scale.astype(jnp.float32), group_size, axis=1)[:, : q.shape[1]]
    return (q.astype(jnp.float32) * scales).astype(dtype)
