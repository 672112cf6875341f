"""Rounding of keys and values to int8, the same steps in the kernel and in its specification.

A head's scale is its largest magnitude / 127, cut to 16 significant bits, so that products with int8 are exact in
float32; elements are rounded to the nearest multiple of it, ties to even, -128 does not occur.
"""

import jax
import jax.numpy as jnp
from jax import lax

Q_MAX = 127
_MIN_SCALE = 2.0**-120  # keeps x / scale and scale / 2 normal numbers
_SCALE_MASK = 0xFFFFFF00  # 16 significant bits


def int8_scale(largest: jax.Array) -> jax.Array:
    """Returns the scale f32[*] of heads whose largest magnitudes are f32[*]."""
    scale = jnp.maximum(largest / Q_MAX, _MIN_SCALE)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(scale, jnp.uint32) & jnp.uint32(_SCALE_MASK), jnp.float32)


def round_to_int8(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns int8[*], x f32[*] in multiples of scale, which has x's shape or is broadcast to it."""
    quotient, half = x / scale, scale / 2
    q = (quotient + jnp.where(quotient < 0, -0.5, 0.5)).astype(jnp.int32)  # Triton has no rounding but this, to zero
    error = x - q.astype(jnp.float32) * scale  # exact; the quotient was not, so q may be one off
    is_odd = (q & 1) == 1
    q = q + ((error > half) | (is_odd & (error == half))).astype(jnp.int32)
    q = q - ((error < -half) | (is_odd & (error == -half))).astype(jnp.int32)
    return jnp.minimum(jnp.maximum(q, -Q_MAX), Q_MAX).astype(jnp.int8)
