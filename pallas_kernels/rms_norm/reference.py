"""Root-mean-square normalization, the specification."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.parts import add_parts


def rms_norm_reference(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) * weight [M D] in the weight's dtype, computed in float32.

    Zhang and Sennrich, arXiv:1910.07467.

    Args:
      x: [M D]
      weight: [D]
      eps: added to the mean square.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=1, keepdims=True) + eps)
    return (normed * jnp.expand_dims(weight.astype(jnp.float32), 0)).astype(weight.dtype)


def add_rms_norm_reference(
    x: jax.Array, parts: jax.Array, weight: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the normed rows of x + (the sum of parts) [M D] in the weight's dtype, and that sum f32[M D].

    Parts are added one after the other, then their sum to x, all in float32.

    Args:
      x: f32[M D]
      parts: f32[S M D]
      weight: [D]
      eps: added to the mean square.
    """
    total = x + add_parts(parts)
    return rms_norm_reference(total, weight, eps=eps), total
