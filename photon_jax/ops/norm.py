"""Root-mean-square normalization."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rms_norm as rms_norm_kernel
from photon_jax.config import OWN_KERNELS, Backend
from photon_jax.ops.linear import Rows
from photon_jax.ops.sums import ordered_sum


def rms_norm(
    x: jax.Array,  # [* D]
    weight: jax.Array,  # [D]
    *,
    eps: float,
) -> jax.Array:  # f32[* D]
    """Returns x scaled to unit root-mean-square over its last axis, then by weight.

    Computed in float32; the caller rounds (Zhang and Sennrich, arXiv:1910.07467).

    Args:
      eps: added to the mean square, not to its root.
    """
    x32 = x.astype(jnp.float32)
    mean_square = jnp.expand_dims(ordered_sum(x32 * x32), -1) / x.shape[-1]
    normed = x32 * lax.rsqrt(mean_square + eps)
    return normed * jnp.expand_dims(weight.astype(jnp.float32), tuple(range(x.ndim - 1)))


def normed_rows(
    x: jax.Array,  # f32[M D]
    weight: jax.Array,  # [D]
    *,
    eps: float,
    backend: Backend,
    group_size: int | None = None,
) -> Rows:  # [M D]
    """Returns rms_norm(x), the input of a linear layer of the same backend.

    Args:
      group_size: of the limbs that the layer wants (`limb_group`); else the rows are rounded to the weight's dtype.
    """
    if backend in OWN_KERNELS:
        normed: Rows = rms_norm_kernel(x, weight, eps=eps, group_size=group_size)
        return normed
    return rms_norm(x, weight, eps=eps).astype(weight.dtype)
