"""Keys and values as int8 with a scale for each token and head: rounding to it and back."""

import jax
import jax.numpy as jnp

from photon_jax.quantization.int8 import round_groups

# Two bytes would do, but XLA on a CPU widens a whole array of 16-bit floats to write or read a part of it (measured).
SCALE_DTYPE = jnp.float32


def quantize_kv(
    x: jax.Array,  # [* d]
) -> tuple[jax.Array, jax.Array]:  # int8[* d], f32[*]
    """Returns keys or values rounded to the nearest multiple of their scale, ties to even, and the scale.

    A head is rounded as a group of weights is, see `quantize_int8`: no element is off by more than scale / 2, -128 does
    not occur, zeros stay zeros, and products with the scale are exact in float32.

    Args:
      x: bf16, f16 or f32; each vector over the last axis gets a scale.
    """
    q, scale = round_groups(x, None, group_size=x.shape[-1])
    return q, scale.squeeze(-1)


def dequantize_kv(
    q: jax.Array,  # int8[* d]
    scale: jax.Array,  # f32[*]
    dtype: jnp.dtype,
) -> jax.Array:  # [* d]
    """Returns q * scale in a dtype: exact in float32, rounded once in others."""
    return (q.astype(jnp.float32) * jnp.expand_dims(scale, -1)).astype(dtype)
