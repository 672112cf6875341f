"""Weight-only int8 matmul, the specification: rows in tiles of 8, in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.limbs import LimbRows, split_groups

TILE_ROWS = 8


def dequantize(q: jax.Array, scale: jax.Array, *, group_size: int) -> jax.Array:
    """Returns f32[O I]: q[o, i] * scale[o, i // group_size].

    Args:
      q: int8[O I]
      scale: f16 or f32[O ceil(I/group_size)]; the last group may be short.
      group_size: inputs per scale.
    """
    factors = jnp.repeat(scale.astype(jnp.float32), group_size, axis=1)[:, : q.shape[1]]
    return q.astype(jnp.float32) * factors


@jax.jit
def dense_matmul_reference(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns x @ weight.T in float32, cast to x's dtype, computed in tiles of 8 rows.

    A row's bits don't depend on how many rows there are.

    Args:
      x: bf16 or f32[M I]
      weight: [O I]
    """
    num_rows, num_inputs = x.shape
    num_tiles = -(-num_rows // TILE_ROWS)
    padded = jnp.pad(x.astype(jnp.float32), ((0, num_tiles * TILE_ROWS - num_rows), (0, 0)))
    weight32 = weight.astype(jnp.float32)

    def multiply(tile: jax.Array) -> jax.Array:
        return jnp.einsum("MI,OI->MO", tile, weight32, precision=lax.Precision.HIGHEST)

    tiles: jax.Array = lax.map(multiply, padded.reshape(num_tiles, TILE_ROWS, num_inputs))
    return tiles.reshape(-1, weight.shape[0])[:num_rows].astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("group_size",))
def int8_matmul_reference(x: jax.Array, q: jax.Array, scale: jax.Array, *, group_size: int) -> jax.Array:
    """Returns x @ dequantize(q, scale).T in float32, cast to x's dtype.

    Args:
      x: bf16 or f32[M I]
      q: int8[O I]
      scale: f16 or f32[O ceil(I/group_size)]
      group_size: inputs per scale; the last group may be short.
    """
    out: jax.Array = dense_matmul_reference(x, dequantize(q, scale, group_size=group_size))
    return out


@functools.partial(jax.jit, static_argnames=("group_size", "is_gated", "out_dtype"))
def fused_matmul_reference(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    *,
    group_size: int = 0,
    is_gated: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns x @ weight.T, or silu(y[:, :F]) * y[:, F:] of it if is_gated, in float32, cast to out_dtype.

    Args:
      x: [M I]
      weight: int8[O I] with scales, or dense.
      scale: f16 or f32[O ceil(I/group_size)]
      group_size: inputs per scale.
      is_gated: the weights hold a gate's outputs, then those of an up projection.
      out_dtype: of the result, x's by default.
    """
    dtype = out_dtype or x.dtype
    if scale is not None:
        weight = dequantize(weight, scale, group_size=group_size)
    out = dense_matmul_reference(x.astype(jnp.float32), weight)
    if is_gated:
        gate, up = jnp.split(out, 2, axis=1)
        out = jax.nn.silu(gate) * up
    rounded: jax.Array = out.astype(dtype)
    return rounded


@jax.jit
def limb_matmul_reference(x: LimbRows, q: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns f32[M O]: the sum over groups, in their order, of (256 * high.q + low.q) * (scale * x.scale).

    The whole number in the first brackets is exact and rounded once to float32; sums are float32's.

    Args:
      x: [M I]
      q: int8[O I]
      scale: f16 or f32[O ceil(I/g)], of x's groups.
    """
    # Products of one limb are below 2^24, so that float32 holds them exactly in any order.
    limbs = jnp.moveaxis(split_groups(x.limbs.astype(jnp.float32), x.group_size), 2, 0)  # [G 2 M g]
    weights = jnp.moveaxis(split_groups(q.astype(jnp.float32), x.group_size), 1, 0)  # [G O g]

    def add(total: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        limbs, weights, x_scale, scale = group
        high, low = jnp.einsum("LMI,OI->LMO", limbs, weights, precision=lax.Precision.HIGHEST)
        factors = jnp.expand_dims(x_scale, 1) * jnp.expand_dims(scale, 0)
        return total + (256.0 * high + low) * factors, None

    zeros = jnp.zeros((x.shape[0], q.shape[0]), jnp.float32)
    total: jax.Array = lax.scan(add, zeros, (limbs, weights, x.scale.T, scale.astype(jnp.float32).T))[0]
    return total
