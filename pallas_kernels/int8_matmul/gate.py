"""The gate between two products with limbs, Pallas with the Triton backend: parts come in, limbs go out."""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.limbs import LimbRows, check_group, group_columns, limb_shapes, store_limbs
from pallas_kernels.common.parts import add_parts

_TILE = 512  # features of a program


def _kernel(
    parts_ref,  # f32[S M 2F]
    limbs_ref,  # i8[2 M F]
    scale_ref,  # f32[M ceil(F/g)]
    *,
    group_size: int,
):
    row, size = pl.program_id(0), limbs_ref.shape[2]
    num_groups = _TILE // group_size
    first = pl.program_id(1) * num_groups
    columns = group_columns(first, num_groups, group_size)

    def load(offset):
        index = range(parts_ref.shape[0])
        return [plt.load(parts_ref.at[part, row, columns + offset], mask=columns < size, other=0.0) for part in index]

    gates, ups = load(0), load(size)  # asked for before the first addition waits for one
    gate = add_parts(gates)
    store_limbs(gate * jax.nn.sigmoid(gate) * add_parts(ups), row, first, limbs_ref, scale_ref)


@functools.partial(jax.jit, static_argnames=("group_size", "interpret"))
def silu_mul_limbs(parts: jax.Array, *, group_size: int, interpret: bool = False) -> LimbRows:
    """Returns silu(gate) * up in limbs, [M F]; a row's bits don't depend on how many rows there are.

    Args:
      parts: f32[S M 2F], added in order; the gates come first.
      group_size: features that share a scale.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: gates and the rest aren't equally many.
      KernelUnsupportedError: limbs can't have this group_size.
    """
    if parts.ndim != 3 or parts.shape[2] % 2:
        raise ValueError(f"expected parts [S M 2F], got {parts.shape}")
    check_group(group_size)
    _, num_rows, size = parts.shape
    limbs, scale = pl.pallas_call(
        functools.partial(_kernel, group_size=group_size),
        out_shape=limb_shapes(num_rows, size // 2, group_size),
        grid=(num_rows, pl.cdiv(size // 2, _TILE)),
        compiler_params=plt.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name=f"silu_mul_limbs_s{parts.shape[0]}_g{group_size}",
    )(parts)
    return LimbRows(limbs=limbs, scale=scale, group_size=group_size)
