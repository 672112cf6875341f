"""Small-M matmul with int8 or dense weights, Pallas with the Triton backend: Ampere and later.

Letters: M rows, O outputs, I inputs, g inputs per scale. Weights lie [O I], as in checkpoints. Two kernels: `sum`
(sum_triton.py) streams weights through the ordinary cores; `dot` and `swap` multiply tiles on the tensor cores. With
k_splits > 1 each split writes float32 parts, which are added in order outside: by whoever reads them
(`parts_triton`), or by XLA.

The gate of an MLP can ride in a product's kernel: weights hold the gate's outputs, then the up projection's.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.common.parts import add_parts
from pallas_kernels.int8_matmul.shared import Surroundings, split_steps
from pallas_kernels.int8_matmul.sum_triton import sum_kernel
from pallas_kernels.int8_matmul.tiles import TileConfig


def _dot_kernel(
    x_ref,  # [M I]
    w_ref,  # [O I], int8 or dense
    *refs,  # scale [O ceil(I/g)] of int8 weights; the output f32[splits M O] or [M O]
    tiles: TileConfig,
    group_size: int,
    around: Surroundings,
):
    scale_ref, out_ref = around.take(refs)
    (num_rows, num_inputs), num_outputs = x_ref.shape, out_ref.shape[-1]
    split_inputs, steps = split_steps(num_inputs, tiles)
    rows = pl.program_id(0) * tiles.tile_m + lax.iota(jnp.int32, tiles.tile_m)
    outputs = pl.program_id(1) * tiles.tile_n + lax.iota(jnp.int32, tiles.tile_n)
    halves = (outputs, outputs + num_outputs) if around.is_gated else (outputs,)
    start = pl.program_id(2) * split_inputs
    is_row, is_output = (rows < num_rows)[:, None], (outputs < num_outputs)[:, None]
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    is_ragged = num_inputs % (tiles.tile_k * tiles.k_splits) != 0
    chunk = min(group_size or tiles.tile_k, tiles.tile_k)  # inputs that share a scale
    is_swapped = tiles.method == "swap"

    def load_scales(step):
        firsts = [start + step * tiles.tile_k + index * chunk for index in range(tiles.tile_k // chunk)]
        return _load_scales(scale_ref, halves, firsts, outputs < num_outputs, num_inputs, group_size)

    def multiply(first):  # for each half f32[tile_m tile_n], swapped f32[tile_n tile_m]
        inputs = first + lax.iota(jnp.int32, chunk)
        x_mask, w_mask = is_row, is_output
        if is_ragged:
            x_mask, w_mask = is_row & (inputs < num_inputs)[None, :], is_output & (inputs < num_inputs)[None, :]
        x = plt.load(x_ref.at[rows[:, None], inputs[None, :]], mask=x_mask, other=0.0)
        found = []
        for half in halves:
            weights = plt.load(w_ref.at[half[:, None], inputs[None, :]], mask=w_mask, other=0).astype(x.dtype)
            left, right = (weights, x.T) if is_swapped else (x, weights.T)
            found.append(jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32))
        return found

    def accumulate(step, carry):
        accs, scales = carry
        # Scales are too short for the compiler's asynchronous copies, so they are asked for a step ahead. Only one:
        # values carried further than to the next step stop it from pipelining the loop.
        next_scales = load_scales(step + 1)
        num_chunks = tiles.tile_k // chunk
        for index in range(num_chunks):
            parts = multiply(start + step * tiles.tile_k + index * chunk)
            if scales:
                used = [scales[half * num_chunks + index].astype(jnp.float32) for half in range(len(halves))]
                parts = [
                    part * jnp.expand_dims(scale, int(is_swapped)) for part, scale in zip(parts, used, strict=True)
                ]
            accs = tuple(acc + part for acc, part in zip(accs, parts, strict=True))
        return accs, next_scales

    shape = (tiles.tile_n, tiles.tile_m) if is_swapped else (tiles.tile_m, tiles.tile_n)
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in halves)
    accs, _ = lax.fori_loop(0, steps, accumulate, (zeros, load_scales(0)))
    _store_tile(accs, rows, outputs, out_ref, is_swapped=is_swapped)


def _load_scales(scale_ref, halves, firsts, mask, num_inputs, group_size):
    """Returns for each half one [tile_n] for each chunk that starts at an input of firsts; none if dense."""
    if scale_ref is None:
        return ()
    # Past the end weights are 0, and any scale will do.
    groups = [jnp.minimum(first, num_inputs - 1) // group_size for first in firsts]
    return tuple(plt.load(scale_ref.at[half, group], mask=mask, other=0.0) for half in halves for group in groups)


def _store_tile(accs, rows, outputs, out_ref, *, is_swapped):
    num_rows, num_outputs = out_ref.shape[-2:]
    value = accs[0] * jax.nn.sigmoid(accs[0]) * accs[1] if len(accs) == 2 else accs[0]
    row_axis, output_axis = (0, 1) if is_swapped else (1, 0)
    index = (jnp.expand_dims(rows, row_axis), jnp.expand_dims(outputs, output_axis))
    mask = jnp.expand_dims(rows < num_rows, row_axis) & jnp.expand_dims(outputs < num_outputs, output_axis)
    part = () if out_ref.ndim == 2 else (pl.program_id(2),)
    plt.store(out_ref.at[(*part, *index)], value.astype(out_ref.dtype), mask=mask)


def check_support(*, m: int, group_size: int, dtype: jnp.dtype, tiles: TileConfig) -> None:
    """Raises KernelUnsupportedError for what this backend can't compute."""
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise KernelUnsupportedError(f"the Triton backend needs bfloat16, float16 or float32, got {dtype}")
    if group_size & (group_size - 1) or 0 < group_size < 16:
        raise KernelUnsupportedError(
            f"the Triton backend needs a power-of-two group_size of at least 16, got {group_size}"
        )
    if tiles.method == "sum" and m > 16:
        raise KernelUnsupportedError(f"method sum takes at most 16 rows, got {m}; use dot")
    if tiles.method == "sum" and group_size and (tiles.vector < 4 or tiles.tile_k < 128 * tiles.num_warps):
        raise KernelUnsupportedError(
            "method sum needs vectors of at least 4 int8 weights, and one for each thread of its warps, got "
            f"{tiles.vector}, and tile_k {tiles.tile_k} for {tiles.num_warps} warps"
        )
    if group_size and tiles.tile_k % group_size and (tiles.method == "sum" or group_size % tiles.tile_k):
        raise KernelUnsupportedError(
            f"tile_k must be a multiple of group_size {group_size} (in dot also a divisor), got {tiles.tile_k}"
        )


@functools.partial(jax.jit, static_argnames=("group_size", "tiles", "is_gated", "out_dtype", "interpret"))
def matmul_triton(
    x: jax.Array,  # [M I]
    weight: jax.Array,  # int8[O I], or dense
    scale: jax.Array | None,  # [O ceil(I/g)], None if dense
    *,
    group_size: int,
    tiles: TileConfig,
    is_gated: bool = False,
    out_dtype: jnp.dtype | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns the product with what follows it, in out_dtype (x's by default); arguments are checked by the caller.

    With splits, and of large tiles, the gate comes after the kernel.
    """
    dtype = out_dtype or x.dtype
    if tiles.k_splits > 1 or (is_gated and not tiles.can_gate):
        parts = parts_triton(x, weight, scale, group_size=group_size, tiles=tiles, interpret=interpret)
        return _finish(parts, is_gated=is_gated).astype(dtype)
    around = Surroundings(has_scale=scale is not None, is_gated=is_gated)
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0] // (2 if is_gated else 1)), dtype)
    operands = [x, weight, *(() if scale is None else (scale,))]
    return _call(operands, out, around, group_size=group_size, tiles=tiles, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("group_size", "tiles", "interpret"))
def parts_triton(
    x: jax.Array,  # [M I]
    weight: jax.Array,  # int8[O I], or dense
    scale: jax.Array | None,  # [O ceil(I/g)], None if dense
    *,
    group_size: int,
    tiles: TileConfig,
    interpret: bool = False,
) -> jax.Array:
    """Returns the parts f32[k_splits M O] of the product; arguments are checked by the caller."""
    out = jax.ShapeDtypeStruct((tiles.k_splits, x.shape[0], weight.shape[0]), jnp.float32)
    around = Surroundings(has_scale=scale is not None)
    operands = [x, weight, *(() if scale is None else (scale,))]
    return _call(operands, out, around, group_size=group_size, tiles=tiles, interpret=interpret)


def _call(
    operands: list[jax.Array],
    out: jax.ShapeDtypeStruct,
    around: Surroundings,
    *,
    group_size: int,
    tiles: TileConfig,
    interpret: bool,
) -> jax.Array:
    m, n = out.shape[-2:]
    grid: tuple[int, ...] = (pl.cdiv(n, tiles.tile_n), tiles.k_splits)
    grid = grid if tiles.method == "sum" else (pl.cdiv(m, tiles.tile_m), *grid)
    kernel = functools.partial(sum_kernel, interpret=interpret) if tiles.method == "sum" else _dot_kernel
    found: jax.Array = pl.pallas_call(
        functools.partial(kernel, tiles=tiles, group_size=group_size, around=around),
        out_shape=out,
        grid=grid,
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=f"matmul_g{group_size}_{tiles.label}",
    )(*operands)
    return found


def _finish(parts: jax.Array, *, is_gated: bool) -> jax.Array:
    """Returns what follows the parts f32[splits M O] of a product that was computed alone."""
    out = add_parts(parts)
    if not is_gated:
        return out
    gate, up = jnp.split(out, 2, axis=1)
    return jax.nn.silu(gate) * up
