"""Root-mean-square normalization, Pallas with the Triton backend: one program a row.

A row's bits don't depend on how many rows there are.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.limbs import LimbRows, check_group, group_columns, limb_shapes, store_limbs
from pallas_kernels.common.parts import add_parts


def _kernel(
    x_ref,  # [M D]
    weight_ref,  # [D]
    *refs,  # parts f32[S M D] where there are; the output [M D], or limbs and scales; with parts their sum f32[M D]
    eps: float,
    has_parts: bool,
    group_size: int | None,  # of limbs
):
    row, size = pl.program_id(0), x_ref.shape[1]
    whole = pl.next_power_of_2(size)
    if group_size is None:
        columns = lax.iota(jnp.int32, whole)
    else:
        columns = group_columns(0, max(1, whole // group_size), group_size)
    mask = columns < size

    def load(ref, *index):
        return plt.load(ref.at[(*index, columns)], mask=mask, other=0.0).astype(jnp.float32)

    outs = list(refs)
    # All loads are asked for before the first addition waits for one.
    weight, total = load(weight_ref), load(x_ref, row)
    if has_parts:
        parts_ref, total_ref = outs.pop(0), outs.pop()
        total = total + add_parts([load(parts_ref, part, row) for part in range(parts_ref.shape[0])])
        plt.store(total_ref.at[row, columns], total, mask=mask)
    square = total * total
    for _ in columns.shape:
        square = square.sum(axis=-1)
    normed = total * lax.rsqrt(square / size + eps) * weight
    if group_size is None:
        plt.store(outs[0].at[row, columns], normed.astype(outs[0].dtype), mask=mask)
    else:
        store_limbs(normed, row, 0, *outs)


def _call(
    x: jax.Array,
    weight: jax.Array,
    parts: jax.Array | None,
    *,
    eps: float,
    group_size: int | None,
    interpret: bool,
) -> tuple[jax.Array | LimbRows, jax.Array]:
    """Returns the normed rows, and the sum where there are parts (else x)."""
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"expected x [M D] and weight [D], got {x.shape} and {weight.shape}")
    has_parts = parts is not None
    # With parts fewer elements a thread: the compiler then asks for nearly all loads before the first addition.
    elements = 128 if has_parts else 256  # a warp's
    num_warps = min(16 if has_parts else 8, max(1, pl.next_power_of_2(x.shape[1]) // elements))
    outputs: tuple[jax.ShapeDtypeStruct, ...] = (jax.ShapeDtypeStruct(x.shape, weight.dtype),)
    if group_size is not None:
        check_group(group_size)
        outputs = limb_shapes(x.shape[0], x.shape[1], group_size)
    sums = (jax.ShapeDtypeStruct(x.shape, jnp.float32),) if has_parts else ()
    name = f"add_rms_norm_s{parts.shape[0]}" if parts is not None else "rms_norm"
    found: list[jax.Array] = pl.pallas_call(
        functools.partial(_kernel, eps=eps, has_parts=has_parts, group_size=group_size),
        out_shape=(*outputs, *sums),
        grid=(x.shape[0],),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=name if group_size is None else f"{name}_g{group_size}",
    )(x, weight, *((parts,) if has_parts else ()))
    total = found[-1] if has_parts else x
    if group_size is None:
        return found[0], total
    return LimbRows(limbs=found[0], scale=found[1], group_size=group_size), total


@functools.partial(jax.jit, static_argnames=("eps", "group_size", "interpret"))
def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, group_size: int | None = None, interpret: bool = False
) -> jax.Array | LimbRows:
    """Returns the normed rows [M D] as `rms_norm_reference` defines them, in the weight's dtype or in limbs.

    Args:
      x: [M D]
      weight: [D]
      eps: added to the mean square.
      group_size: where given, the rows are not rounded to a dtype but split into limbs, of so many columns a scale.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes don't fit each other.
      KernelUnsupportedError: limbs can't have this group_size.
    """
    return _call(x, weight, None, eps=eps, group_size=group_size, interpret=interpret)[0]


@functools.partial(jax.jit, static_argnames=("eps", "group_size", "interpret"))
def add_rms_norm(
    x: jax.Array,
    parts: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    group_size: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array | LimbRows, jax.Array]:
    """Returns the normed rows of x + (the sum of parts) [M D], in the weight's dtype or limbs, and that sum f32[M D].

    As `add_rms_norm_reference` defines them: parts are added one after the other, then their sum to x.

    Args:
      x: f32[M D]
      parts: f32[S M D], of a split product.
      weight: [D]
      eps: added to the mean square.
      group_size: where given, the rows are not rounded to a dtype but split into limbs, of so many columns a scale.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes don't fit each other.
      KernelUnsupportedError: limbs can't have this group_size.
    """
    if parts.ndim != 3 or parts.shape[0] < 1 or parts.shape[1:] != x.shape:
        raise ValueError(f"expected parts [S M D] of x [M D], got {parts.shape} and {x.shape}")
    return _call(x, weight, parts, eps=eps, group_size=group_size, interpret=interpret)
