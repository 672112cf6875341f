"""Small-M matmul with int8 or dense weights, Pallas with the Triton backend: Ampere and later.

Letters: M rows, O outputs, I inputs, g inputs per scale. Weights lie [O I], as in checkpoints. Two kernels: `sum`
streams whole rows of weights through the ordinary cores; `dot` multiplies tiles on the tensor cores. With k_splits > 1
each split writes float32 parts, added in order outside.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.int8_matmul.tiles import TileConfig

_VECTOR = 8  # inputs that a thread loads at once: 16 bytes of activations, 8 of int8 weights


def _iota(size: int, axis: int, ndim: int) -> jax.Array:
    # A broadcast keeps what the compiler knows of contiguity; a reshape loses it, and the kernel loads byte by byte.
    return lax.broadcast_in_dim(lax.iota(jnp.int32, size), [size if i == axis else 1 for i in range(ndim)], (axis,))


def _steps(num_inputs: int, tiles: TileConfig) -> tuple[int, int]:
    """Returns the inputs of one split, a multiple of tile_k, and how many steps it takes."""
    steps = pl.cdiv(pl.cdiv(num_inputs, tiles.k_splits), tiles.tile_k)
    return steps * tiles.tile_k, steps


def _load(ref, index, mask, other):
    return ref[index] if mask is None else plt.load(ref.at[index], mask=mask, other=other)


def _sum_kernel(
    x_ref,  # [M I]
    w_ref,  # [O I], int8 or dense
    *refs,  # scale [O ceil(I/g)] if int8; the output f32[splits M O], or [M O] with one split
    tiles: TileConfig,
    group_size: int,
):
    out_ref = refs[-1]
    num_rows, (num_outputs, num_inputs) = x_ref.shape[0], w_ref.shape
    split_inputs, steps = _steps(num_inputs, tiles)
    # The inputs of a step are [A C E]: A groups of C vectors of E. Activations and weights have one shape, so one
    # layout, and meet in registers; a thread adds its vector before any exchange.
    group = group_size or tiles.tile_k
    shape = (tiles.tile_k // group, group // _VECTOR, _VECTOR)
    offsets = _iota(shape[0], 0, 3) * group + _iota(shape[1], 1, 3) * _VECTOR + _iota(_VECTOR, 2, 3)
    start = pl.program_id(1) * split_inputs
    first_output = pl.program_id(0) * tiles.tile_n
    is_ragged = num_inputs % (tiles.tile_k * tiles.k_splits) != 0

    def accumulate(step, accs):
        first = start + step * tiles.tile_k
        inputs = first + offsets
        mask = inputs < num_inputs if is_ragged else None
        xs = [_load(x_ref, (row, inputs), mask, 0.0).astype(jnp.float32) for row in range(num_rows)]
        groups = first // group + lax.iota(jnp.int32, shape[0])
        group_mask = groups * group < num_inputs if is_ragged else None
        found = []
        for n in range(tiles.tile_n):
            # Past the last output the last one is computed again, and not stored.
            output = jnp.minimum(first_output + n, num_outputs - 1)
            weights = _load(w_ref, (output, inputs), mask, 0).astype(jnp.float32)
            parts = [(weights * x).sum(axis=2) for x in xs]  # f32[A C]
            if group_size:
                scale = _load(refs[0], (output, groups), group_mask, 0.0).astype(jnp.float32)
                parts = [part * scale[:, None] for part in parts]
            found += parts
        return tuple(acc + part for acc, part in zip(accs, found, strict=True))

    accs = tuple(jnp.zeros(shape[:2], jnp.float32) for _ in range(tiles.tile_n * num_rows))
    accs = accumulate(0, accs) if steps == 1 else lax.fori_loop(0, steps, accumulate, accs)
    for n in range(tiles.tile_n):
        for row in range(num_rows):
            total = accs[n * num_rows + row].sum(axis=1).sum(axis=0).astype(out_ref.dtype)
            index = (row, first_output + n) if out_ref.ndim == 2 else (pl.program_id(1), row, first_output + n)

            @pl.when(first_output + n < num_outputs)
            def _(index=index, total=total):
                out_ref[index] = total


def _dot_kernel(
    x_ref,  # [M I]
    w_ref,  # [O I], int8 or dense
    *refs,  # scale [O ceil(I/g)] if int8; the output f32[splits M O], or [M O] with one split
    tiles: TileConfig,
    group_size: int,
):
    out_ref = refs[-1]
    (num_rows, num_inputs), num_outputs = x_ref.shape, w_ref.shape[0]
    split_inputs, steps = _steps(num_inputs, tiles)
    rows = pl.program_id(0) * tiles.tile_m + lax.iota(jnp.int32, tiles.tile_m)
    outputs = pl.program_id(1) * tiles.tile_n + lax.iota(jnp.int32, tiles.tile_n)
    start = pl.program_id(2) * split_inputs
    is_row, is_output = (rows < num_rows)[:, None], (outputs < num_outputs)[:, None]
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    is_ragged = num_inputs % (tiles.tile_k * tiles.k_splits) != 0
    chunk = min(group_size or tiles.tile_k, tiles.tile_k)  # inputs that share a scale

    def load_scales(step):  # one [tile_n] for each chunk of a step; none if dense
        if not group_size:
            return ()
        firsts = [start + step * tiles.tile_k + index * chunk for index in range(tiles.tile_k // chunk)]
        # Past the end weights are 0, and any scale will do.
        groups = [jnp.minimum(first, num_inputs - 1) // group_size for first in firsts]
        return tuple(plt.load(refs[0].at[outputs, group], mask=outputs < num_outputs, other=0.0) for group in groups)

    def multiply(first):  # f32[tile_m tile_n]
        inputs = first + lax.iota(jnp.int32, chunk)
        x_mask, w_mask = is_row, is_output
        if is_ragged:
            x_mask, w_mask = is_row & (inputs < num_inputs)[None, :], is_output & (inputs < num_inputs)[None, :]
        x = plt.load(x_ref.at[rows[:, None], inputs[None, :]], mask=x_mask, other=0.0)
        weights = plt.load(w_ref.at[outputs[:, None], inputs[None, :]], mask=w_mask, other=0).astype(x.dtype)
        return jnp.dot(x, weights.T, precision=precision, preferred_element_type=jnp.float32)

    def accumulate(step, carry):
        acc, scales = carry
        # Scales are too short for the compiler's asynchronous copies, so they are asked for a step ahead. Only one:
        # values carried further than to the next step stop it from pipelining the loop.
        next_scales = load_scales(step + 1)
        for index in range(tiles.tile_k // chunk):
            part = multiply(start + step * tiles.tile_k + index * chunk)
            acc = acc + (part * scales[index].astype(jnp.float32)[None, :] if scales else part)
        return acc, next_scales

    acc = jnp.zeros((tiles.tile_m, tiles.tile_n), jnp.float32)
    acc, _ = lax.fori_loop(0, steps, accumulate, (acc, load_scales(0)))
    part = () if out_ref.ndim == 2 else (pl.program_id(2),)
    index = (*part, rows[:, None], outputs[None, :])
    mask = is_row & (outputs < num_outputs)[None, :]
    plt.store(out_ref.at[index], acc.astype(out_ref.dtype), mask=mask)


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
    if group_size and tiles.tile_k % group_size and (tiles.method == "sum" or group_size % tiles.tile_k):
        raise KernelUnsupportedError(
            f"tile_k must be a multiple of group_size {group_size} (in dot also a divisor), got {tiles.tile_k}"
        )


@functools.partial(jax.jit, static_argnames=("group_size", "tiles", "interpret"))
def matmul_triton(
    x: jax.Array,  # [M I]
    weight: jax.Array,  # int8[O I], or dense
    scale: jax.Array | None,  # [O ceil(I/g)], None if dense
    *,
    group_size: int,
    tiles: TileConfig,
    interpret: bool = False,
) -> jax.Array:
    """Returns x @ weight.T, scaled by group if int8, in x's dtype; arguments are checked by the caller."""
    (m, _), n = x.shape, weight.shape[0]
    is_split = tiles.k_splits > 1
    grid: tuple[int, ...] = (pl.cdiv(n, tiles.tile_n), tiles.k_splits)
    if tiles.method == "dot":
        grid = (pl.cdiv(m, tiles.tile_m), *grid)
    kernel = _sum_kernel if tiles.method == "sum" else _dot_kernel
    call = pl.pallas_call(
        functools.partial(kernel, tiles=tiles, group_size=group_size),
        out_shape=jax.ShapeDtypeStruct(
            (tiles.k_splits, m, n) if is_split else (m, n), jnp.float32 if is_split else x.dtype
        ),
        grid=grid,
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=f"matmul_g{group_size}_{tiles.label}",
    )
    out = call(x, weight) if scale is None else call(x, weight, scale)
    return out.sum(axis=0).astype(x.dtype) if is_split else out
