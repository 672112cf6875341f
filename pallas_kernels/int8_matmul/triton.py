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

_VECTOR_BYTES = 16  # of one load by one thread


def _iota(size: int, axis: int, ndim: int) -> jax.Array:
    # A broadcast keeps what the compiler knows of contiguity, a reshape loses it and loads byte by byte.
    return lax.broadcast_in_dim(lax.iota(jnp.int32, size), [size if i == axis else 1 for i in range(ndim)], (axis,))


def _steps(num_inputs: int, tiles: TileConfig) -> tuple[int, int]:
    """Returns the inputs of one split, a multiple of tile_k, and how many steps it takes."""
    steps = pl.cdiv(pl.cdiv(num_inputs, tiles.k_splits), tiles.tile_k)
    return steps * tiles.tile_k, steps


def _sum_kernel(
    x_ref,  # [M I]
    w_ref,  # [O I], int8 or dense
    *refs,  # scale [O ceil(I/g)] if int8; the output f32[splits M O], or [M O] with one split
    tiles: TileConfig,
    group_size: int,
):
    out_ref = refs[-1]
    num_outputs, num_inputs = w_ref.shape
    tile_n, tile_k = tiles.tile_n, tiles.tile_k
    split_inputs, steps = _steps(num_inputs, tiles)
    # The inputs of a step are [A C E]: A groups of C vectors of E, so that a thread adds its vector without mates.
    group = group_size or tile_k
    vector = min(_VECTOR_BYTES // jnp.dtype(w_ref.dtype).itemsize, group)
    inner = (tile_k // group, group // vector, vector)
    outputs = pl.program_id(0) * tile_n + _iota(tile_n, 0, 4)  # i32[tile_n 1 1 1]
    offsets = _iota(inner[0], 1, 4) * group + _iota(inner[1], 2, 4) * vector + _iota(inner[2], 3, 4)  # i32[1 A C E]
    start = pl.program_id(1) * split_inputs
    is_output = outputs < num_outputs
    is_ragged = num_inputs % (tile_k * tiles.k_splits) != 0

    def accumulate(step, accs):
        inputs = start + step * tile_k + offsets
        is_input = inputs < num_inputs
        mask = is_output & is_input if is_ragged else jnp.broadcast_to(is_output, (tile_n, *inner))
        weights = plt.load(w_ref.at[outputs, inputs], mask=mask, other=0).astype(jnp.float32)
        parts = []
        for row in range(x_ref.shape[0]):
            x = plt.load(x_ref.at[row, inputs], mask=is_input, other=0.0) if is_ragged else x_ref[row, inputs]
            parts.append((weights * x.astype(jnp.float32)).sum(axis=3))  # f32[tile_n A C]
        if group_size:
            first = start + step * tile_k
            groups = first // group + _iota(inner[0], 1, 2)
            mask = (_iota(tile_n, 0, 2) + pl.program_id(0) * tile_n < num_outputs) & (groups < refs[0].shape[1])
            rows = pl.program_id(0) * tile_n + _iota(tile_n, 0, 2)
            scale = plt.load(refs[0].at[rows, groups], mask=mask, other=0.0).astype(jnp.float32)
            parts = [part * scale[:, :, None] for part in parts]
        return tuple(acc + part for acc, part in zip(accs, parts, strict=True))

    accs = tuple(jnp.zeros((tile_n, *inner[:2]), jnp.float32) for _ in range(x_ref.shape[0]))
    accs = accumulate(0, accs) if steps == 1 else lax.fori_loop(0, steps, accumulate, accs)
    columns = pl.program_id(0) * tile_n + lax.iota(jnp.int32, tile_n)
    for row, acc in enumerate(accs):
        total = acc.sum(axis=2).sum(axis=1).astype(out_ref.dtype)
        index = (row, columns) if len(out_ref.shape) == 2 else (pl.program_id(1), row, columns)
        plt.store(out_ref.at[index], total, mask=columns < num_outputs)


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
    is_row, is_output = rows < num_rows, outputs < num_outputs
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    has_scale_a_step = group_size and group_size % tiles.tile_k == 0

    def load_scale(step):  # f32[tile_n], or f32[tile_n groups] where a step has several
        first = start + step * tiles.tile_k
        if has_scale_a_step:
            # Past the end, in a ragged split, weights are 0 and any scale will do.
            group = jnp.minimum(first, num_inputs - 1) // group_size
            return plt.load(refs[0].at[outputs, group], mask=is_output, other=0.0)
        groups = first // group_size + lax.iota(jnp.int32, tiles.tile_k // group_size)
        mask = is_output[:, None] & (groups < refs[0].shape[1])[None, :]
        return plt.load(refs[0].at[outputs[:, None], groups[None, :]], mask=mask, other=0.0)

    def accumulate(step, carry):
        acc, scales = carry
        inputs = start + step * tiles.tile_k + lax.iota(jnp.int32, tiles.tile_k)
        is_input = inputs < num_inputs
        x = plt.load(x_ref.at[rows[:, None], inputs[None, :]], mask=is_row[:, None] & is_input[None, :], other=0.0)
        mask = is_output[:, None] & is_input[None, :]
        weights = plt.load(w_ref.at[outputs[:, None], inputs[None, :]], mask=mask, other=0)
        if group_size and not has_scale_a_step:
            grouped = weights.reshape(tiles.tile_n, -1, group_size).astype(jnp.float32)
            grouped = grouped * scales[0].astype(jnp.float32)[:, :, None]
            weights = grouped.reshape(tiles.tile_n, tiles.tile_k)
        part = jnp.dot(x, weights.astype(x.dtype).T, precision=precision, preferred_element_type=jnp.float32)
        if has_scale_a_step:
            part = part * scales[0].astype(jnp.float32)[None, :]
        return acc + part, (*scales[1:], load_scale(step + len(scales))) if scales else ()

    # The compiler pipelines weights and x, not the two-byte scales: they are asked for num_stages steps ahead here.
    scales = tuple(load_scale(step) for step in range(tiles.num_stages)) if group_size else ()
    acc = jnp.zeros((tiles.tile_m, tiles.tile_n), jnp.float32)
    acc, _ = lax.fori_loop(0, steps, accumulate, (acc, scales))
    index = (rows[:, None], outputs[None, :])
    index = index if len(out_ref.shape) == 2 else (pl.program_id(2), *index)
    plt.store(out_ref.at[index], acc.astype(out_ref.dtype), mask=is_row[:, None] & is_output[None, :])


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
    if tiles.method == "sum" and group_size and tiles.tile_k % group_size:
        raise KernelUnsupportedError(f"method sum needs tile_k a multiple of {group_size}, got {tiles.tile_k}")


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
    if tiles.method == "sum":
        kernel, grid = _sum_kernel, (pl.cdiv(n, tiles.tile_n), tiles.k_splits)
    else:
        kernel, grid = _dot_kernel, (pl.cdiv(m, tiles.tile_m), pl.cdiv(n, tiles.tile_n), tiles.k_splits)
    call = pl.pallas_call(
        functools.partial(kernel, tiles=tiles, group_size=group_size),
        out_shape=jax.ShapeDtypeStruct((tiles.k_splits, m, n) if is_split else (m, n), jnp.float32 if is_split else x.dtype),
        grid=grid,
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=f"matmul_g{group_size}_{tiles.label}",
    )
    out = call(x, weight) if scale is None else call(x, weight, scale)
    return out.sum(axis=0).astype(x.dtype) if is_split else out
