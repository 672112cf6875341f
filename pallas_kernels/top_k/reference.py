"""The greatest entries of each row, the specification."""

import jax
from jax import lax


def top_k_reference(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k greatest entries f32[M k] of each row and their places i32[M k], the greatest first.

    Ties: the lowest place first.

    Args:
      x: f32[M V], V of k at least.
    """
    values, places = lax.top_k(x, k)
    return values, places
