"""Linear layers: one function for every weight type."""

import jax
import jax.numpy as jnp
from jax import lax

from photon_jax.models.params import DenseLinear


def linear(
    x: jax.Array,  # [M I]
    layer: DenseLinear,
) -> jax.Array:  # f32[M O]
    """Returns x @ weight + bias in float32; the caller rounds, once, at the end of its fusion."""
    y = _contract(x, layer.weight, 0)
    if layer.bias is not None:
        y = y + jnp.expand_dims(layer.bias.astype(jnp.float32), 0)
    return y


def head_logits(
    x: jax.Array,  # [M D]
    head: jax.Array,  # [V D]
) -> jax.Array:  # f32[M V]
    """Returns x @ head.T in float32."""
    return _contract(x, head, 1)


def _contract(x: jax.Array, weight: jax.Array, weight_axis: int) -> jax.Array:
    return lax.dot_general(
        x,
        weight,
        (((1,), (weight_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
