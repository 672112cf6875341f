"""Sums over the last axis in an order that is written down, the same on every machine and in every program."""

import jax
import jax.numpy as jnp

LANES = 16


def ordered_sum(x: jax.Array) -> jax.Array:
    """Returns the sum over the last axis: LANES strided partial sums, then halves added to halves.

    A plain reduction over the last axis leaves the order to the compiler, which decides by shape; so a row's sum would
    depend on how many rows are computed with it.

    Args:
      x: f32[* n]
    """
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LANES)])
    x = x.reshape(*x.shape[:-1], -1, LANES).sum(axis=-2)
    width = LANES
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x.squeeze(-1)
