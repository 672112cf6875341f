"""The kernel `sum`: a few rows times streamed weights, on the ordinary cores.

Int8 weights stay as they are where activations have 16 bits: those become whole numbers of two bytes, and `dp4a` (PTX
ISA, "Integer arithmetic instructions: dp4a") multiplies four weights with four bytes and adds, in one instruction. A
conversion of every weight would take 6.6 instructions a weight, which is slower than memory.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.int8_matmul.shared import Surroundings, split_steps
from pallas_kernels.int8_matmul.tiles import TileConfig

MAX_UNROLLED_STEPS = 8
WARP = 32  # threads
WHOLE_BITS = 15  # a whole number's, beside its sign
_EXPONENT, _ONE_UP = 0x7F800000, 1 << 23  # of a float32: the exponent's bits, and one more of it
_STEPS_OF_ONE, _STEPS_OF_ONE_BITS = 1.5 * 2**23, 0x4B400000  # float32 has steps of one around it; and how it is stored


def sum_kernel(
    x_ref,  # [M I]
    w_ref,  # [O I], int8 or dense
    *refs,  # scale [O ceil(I/g)] of int8 weights; the output f32[splits M O] or [M O]
    tiles: TileConfig,
    group_size: int,
    around: Surroundings,
    interpret: bool,
):
    """Computes tile_n outputs (of gated weights twice as many) of all rows, or their part of a split."""
    scale_ref, out_ref = around.take(refs)
    num_rows, (num_weights, num_inputs), num_outputs = x_ref.shape[0], w_ref.shape, out_ref.shape[-1]
    split_inputs, steps = split_steps(num_inputs, tiles)
    is_whole = w_ref.dtype == jnp.int8 and x_ref.dtype != jnp.float32
    # A step's inputs are [A C E]: A groups of C vectors of E inputs. Weights and activations are loaded in this shape,
    # so they have one layout and meet in registers; a thread has whole vectors and adds them before any exchange.
    group = group_size or tiles.tile_k
    vector = min(tiles.vector, group, tiles.tile_k // (WARP * tiles.num_warps))  # no vector is spread over threads
    shape = (tiles.tile_k // group, group // vector, vector)
    starts = _iota(shape[0], 0, 2) * group + _iota(shape[1], 1, 2) * vector
    offsets = _iota(shape[0], 0, 3) * group + _iota(shape[1], 1, 3) * vector + _iota(vector, 2, 3)
    first_input, first_output = pl.program_id(1) * split_inputs, pl.program_id(0) * tiles.tile_n
    is_ragged = num_inputs % (tiles.tile_k * tiles.k_splits) != 0
    # Past the last output that one again, which is not stored.
    outputs = [
        jnp.minimum(first_output + index + half, num_weights - 1)
        for half in ((0, num_outputs) if around.is_gated else (0,))
        for index in range(tiles.tile_n)
    ]

    def load_scales(output, first):  # f32[A C], one for all C
        groups = (first + starts) // group
        mask = groups * group < num_inputs if is_ragged else None
        return _load(scale_ref, (output, groups), mask, 0.0).astype(jnp.float32)

    def accumulate(step, sums):
        first = first_input + step * tiles.tile_k
        inputs = first + offsets
        mask = inputs < num_inputs if is_ragged else None
        weights = [_load(w_ref, (output, inputs), mask, 0) for output in outputs]
        _ask_first(interpret)
        scales = [None if scale_ref is None else load_scales(output, first) for output in outputs]
        _ask_first(interpret)
        found = []
        for row in range(num_rows):
            x = _load(x_ref, (row, inputs), mask, 0.0).astype(jnp.float32)
            x, x_scales = split_vectors(x) if is_whole else (x, None)
            found += [_multiply(*weight, x, x_scales, interpret) for weight in zip(weights, scales, strict=True)]
        return tuple(total + part for total, part in zip(sums, found, strict=True))

    sums = (jnp.zeros(shape[:2], jnp.float32),) * (num_rows * len(outputs))
    if steps > MAX_UNROLLED_STEPS:
        sums = lax.fori_loop(0, steps, accumulate, sums)
    else:
        for step in range(steps):
            sums = accumulate(step, sums)
    totals = [total.sum(axis=1).sum(axis=0) for total in sums]
    for row in range(num_rows):
        _store(totals[row * len(outputs) :][: len(outputs)], row, first_output, out_ref, is_gated=around.is_gated)


def split_vectors(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whole numbers i32[A C E], plus _STEPS_OF_ONE_BITS, and a scale f32[A C] of f32[A C E], inside a kernel.

    The scale is the power of two that gives the largest of a vector its 15 bits. So whole * scale is x for all bfloat16
    of at least 1/128 of the largest (float16: 1/16), and within half a scale of the others. Not finite: stays so.
    """
    largest = (lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF).max(axis=2)  # as a float's, and keeps a NaN
    exponent = jnp.maximum(largest, WHOLE_BITS * _ONE_UP) & _EXPONENT
    scale = exponent - (WHOLE_BITS - 1) * _ONE_UP
    factor = lax.bitcast_convert_type(254 * _ONE_UP - scale, jnp.float32)  # 1 / scale
    whole = lax.bitcast_convert_type(x * jnp.expand_dims(factor, 2) + _STEPS_OF_ONE, jnp.int32)
    scale = jnp.where(exponent == _EXPONENT, _EXPONENT, scale)
    return whole, lax.bitcast_convert_type(scale, jnp.float32)


def vector_sums(weights: jax.Array, whole: jax.Array, *, has_dp4a: bool) -> jax.Array:
    """Returns i32[A C]: the exact sums over E of int8[A C E] times what split_vectors made, inside a kernel."""
    if not has_dp4a:
        return (weights.astype(jnp.int32) * (whole - _STEPS_OF_ONE_BITS)).sum(axis=2)
    size, words = whole.shape[2], whole.shape[2] // 4
    high, low = _pick_bytes(whole, "0x7632"), _pick_bytes(whole, "0x5410")
    # Registers: a result for each of E elements, of which the first gets the sum, then E/4 words of each argument.
    lines = [".reg .s32 high, low;", "mov.b32 high, 0;", "mov.b32 low, 0;"]
    for word in range(size, size + words):
        lines.append(f"dp4a.s32.s32 high, ${word}, ${word + words}, high;")
        lines.append(f"dp4a.s32.u32 low, ${word}, ${word + 2 * words}, low;")
    lines.append("mad.lo.s32 $0, high, 256, low;")
    lines += [f"mov.b32 ${index}, 0;" for index in range(1, size)]
    constraints = ",".join(["=r"] * size + ["r"] * (3 * words))
    return _inline(lines, (weights, high, low), constraints, size, jnp.int32).sum(axis=2)


def _pick_bytes(whole, selector):
    """Returns int8[A C E], of each whole number its second byte (0x7632) or its first (0x5410)."""
    lines = [
        ".reg .b32 a, b;",
        "prmt.b32 a, $1, $2, 0x5140;",
        "prmt.b32 b, $3, $4, 0x5140;",
        f"prmt.b32 $0, a, b, {selector};",
    ]
    return _inline(lines, (whole,), "=r,r,r,r,r", 4, jnp.int8)


def _inline(lines, arguments, constraints, pack, dtype):
    (found,) = plt.elementwise_inline_asm(
        "{ " + " ".join(lines) + " }",
        args=arguments,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arguments[0].shape, dtype)],
    )
    return found


def _ask_first(interpret: bool) -> None:
    """Keeps the compiler from moving the loads before it behind those after it: it would have few in flight."""
    if not interpret:
        plt.debug_barrier()


def _load(ref, index, mask, other):
    return ref[index] if mask is None else plt.load(ref.at[index], mask=mask, other=other)


def _multiply(weights, scales, x, x_scales, interpret):
    """Returns f32[A C]; x is f32[A C E], or whole numbers with scales."""
    if x_scales is None:
        sums = (weights.astype(jnp.float32) * x).sum(axis=2)
        return sums if scales is None else sums * scales
    return vector_sums(weights, x, has_dp4a=not interpret).astype(jnp.float32) * (scales * x_scales)


def _store(totals, row, first_output, out_ref, *, is_gated):
    """Stores a row's scalars f32; of gated outputs the gates come first."""
    num_outputs = out_ref.shape[-1]
    num_stored = len(totals) // 2 if is_gated else len(totals)
    for index in range(num_stored):
        value, output = totals[index], first_output + index
        if is_gated:
            value = value * jax.nn.sigmoid(value) * totals[num_stored + index]
        part = () if out_ref.ndim == 2 else (pl.program_id(1),)
        plt.store(out_ref.at[(*part, jnp.int32(row), output)], value.astype(out_ref.dtype), mask=output < num_outputs)


def _iota(size: int, axis: int, ndim: int) -> jax.Array:
    # A broadcast keeps what the compiler knows of contiguity; a reshape loses it, and the kernel loads byte by byte.
    return lax.broadcast_in_dim(lax.iota(jnp.int32, size), [size if i == axis else 1 for i in range(ndim)], (axis,))
