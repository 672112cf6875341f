"""Products of rows in limbs with int8 weights, Pallas with the Triton backend: Ampere and later.

Weights and limbs go from shared memory to the tensor cores as they are; only sums over a group are converted.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.common.limbs import NUM_LIMBS, LimbRows
from pallas_kernels.int8_matmul.limb_tiles import LimbTiles


def _kernel(
    limbs_ref,  # i8[2 M I]
    x_scale_ref,  # f32[M G]
    w_ref,  # i8[O I]
    scale_ref,  # f16 or f32[O G]
    out_ref,  # f32[S M O]
    *,
    tiles: LimbTiles,
    group_size: int,
):
    (_, num_rows, num_inputs), num_outputs = limbs_ref.shape, w_ref.shape[0]
    steps = pl.cdiv(pl.cdiv(num_inputs, tiles.k_splits), tiles.tile_k)
    start = pl.program_id(2) * (steps * tiles.tile_k)
    rows = pl.program_id(0) * tiles.tile_m + lax.iota(jnp.int32, tiles.tile_m)
    outputs = pl.program_id(1) * tiles.tile_n + lax.iota(jnp.int32, tiles.tile_n)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    is_ragged = num_inputs % (tiles.tile_k * tiles.k_splits) != 0
    columns = lax.iota(jnp.int32, NUM_LIMBS * tiles.tile_m)  # of the product: high limbs of all rows, then low ones
    limb_of, column_rows = columns // tiles.tile_m, pl.program_id(0) * tiles.tile_m + columns % tiles.tile_m

    def load_scales(step):
        found = []
        for index in range(tiles.tile_k // group_size):
            group = (start + step * tiles.tile_k) // group_size + index
            # Past the end weights and limbs are 0, and any scale will do.
            group = jnp.minimum(group, x_scale_ref.shape[1] - 1)
            of_rows = plt.load(x_scale_ref.at[rows, group], mask=is_row, other=0.0)
            of_outputs = plt.load(scale_ref.at[outputs, group], mask=is_output, other=0.0)
            found.append((of_rows, of_outputs))
        return tuple(found)

    def multiply(first):  # f32[tile_n tile_m]
        inputs = first + lax.iota(jnp.int32, group_size)
        w_mask, x_mask = is_output[:, None], (column_rows < num_rows)[:, None]
        if is_ragged:
            w_mask, x_mask = (mask & (inputs < num_inputs)[None, :] for mask in (w_mask, x_mask))
        weights = plt.load(w_ref.at[outputs[:, None], inputs[None, :]], mask=w_mask, other=0)
        index = (limb_of[:, None], column_rows[:, None], inputs[None, :])
        x = plt.load(limbs_ref.at[index], mask=x_mask, other=0)
        dots = jnp.dot(weights, x.T, preferred_element_type=jnp.int32)
        high, low = lax.split(dots, (tiles.tile_m, tiles.tile_m), axis=1)
        return (high * 256 + low).astype(jnp.float32)

    def accumulate(step, carry):
        acc, scales = carry
        # Scales are too short for the compiler's asynchronous copies, so they are asked for a step ahead.
        next_scales = load_scales(step + 1)
        for index, (of_rows, of_outputs) in enumerate(scales):
            whole = multiply(start + step * tiles.tile_k + index * group_size)
            acc = acc + whole * (of_outputs.astype(jnp.float32)[:, None] * of_rows[None, :])
        return acc, next_scales

    zeros = jnp.zeros((tiles.tile_n, tiles.tile_m), jnp.float32)
    acc, _ = lax.fori_loop(0, steps, accumulate, (zeros, load_scales(0)))
    mask = is_output[:, None] & is_row[None, :]
    plt.store(out_ref.at[pl.program_id(2), rows[None, :], outputs[:, None]], acc, mask=mask)


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def limb_parts_triton(
    x: LimbRows,  # [M I]
    q: jax.Array,  # i8[O I]
    scale: jax.Array,  # f16 or f32[O ceil(I/g)]
    *,
    tiles: LimbTiles,
    interpret: bool = False,
) -> jax.Array:
    """Returns the parts f32[k_splits M O] of the product; a row's bits depend on the splits and on nothing else.

    Raises:
      KernelUnsupportedError: the kernel can't work with these tiles; other arguments are checked by the caller.
    """
    if tiles.tile_k % x.group_size:
        raise KernelUnsupportedError(f"tile_k must be a multiple of group_size {x.group_size}, got {tiles.tile_k}")
    m, n = x.shape[0], q.shape[0]
    parts: jax.Array = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, group_size=x.group_size),
        out_shape=jax.ShapeDtypeStruct((tiles.k_splits, m, n), jnp.float32),
        grid=(pl.cdiv(m, tiles.tile_m), pl.cdiv(n, tiles.tile_n), tiles.k_splits),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=f"limb_matmul_g{x.group_size}_{tiles.label}",
    )(x.limbs, x.scale, q, scale)
    return parts
