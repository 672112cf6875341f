"""Dequantization, Pallas with the Triton backend: each program a few rows by some groups of inputs."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError

TILE_ROWS, TILE_INPUTS = 4, 2048


def _kernel(q_ref, scale_ref, out_ref, *, group_size: int, num_groups: int):
    num_outputs, num_inputs = q_ref.shape
    shape = (TILE_ROWS, num_groups, group_size)
    rows = pl.program_id(0) * TILE_ROWS + lax.broadcasted_iota(jnp.int32, shape[:2], 0)
    groups = pl.program_id(1) * num_groups + lax.broadcasted_iota(jnp.int32, shape[:2], 1)
    inputs = groups[:, :, None] * group_size + lax.broadcasted_iota(jnp.int32, shape, 2)
    is_group = (rows < num_outputs) & (groups * group_size < num_inputs)
    mask = (rows < num_outputs)[:, :, None] & (inputs < num_inputs)
    index = (jnp.broadcast_to(rows[:, :, None], shape), inputs)
    weights = plt.load(q_ref.at[index], mask=mask, other=0).astype(jnp.float32)
    scales = plt.load(scale_ref.at[rows, groups], mask=is_group, other=0.0).astype(jnp.float32)
    plt.store(out_ref.at[index], (weights * scales[:, :, None]).astype(out_ref.dtype), mask=mask)


@functools.partial(jax.jit, static_argnames=("group_size", "dtype", "interpret"))
def int8_dequantize(
    q: jax.Array, scale: jax.Array, *, group_size: int, dtype: jnp.dtype, interpret: bool = False
) -> jax.Array:
    """Returns the weights [O I] in dtype, as `int8_dequantize_reference` defines them.

    Args:
      q: int8[O I]
      scale: f16 or f32[O ceil(I/group_size)]
      group_size: inputs per scale, a power of two of at least 16.
      dtype: of the result.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the group size is another.
    """
    if group_size & (group_size - 1) or group_size < 16:
        raise KernelUnsupportedError(
            f"the Triton backend needs a power-of-two group_size of at least 16, got {group_size}"
        )
    if q.dtype != jnp.int8 or q.ndim != 2 or scale.shape != (q.shape[0], pl.cdiv(q.shape[1], group_size)):
        raise ValueError(
            f"expected q int8[O I] and scale [O ceil(I/{group_size})], got {q.dtype}{q.shape} and {scale.shape}"
        )
    num_groups = max(1, min(pl.next_power_of_2(scale.shape[1]), TILE_INPUTS // group_size))
    out: jax.Array = pl.pallas_call(
        functools.partial(_kernel, group_size=group_size, num_groups=num_groups),
        out_shape=jax.ShapeDtypeStruct(q.shape, dtype),
        grid=(pl.cdiv(q.shape[0], TILE_ROWS), pl.cdiv(scale.shape[1], num_groups)),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=f"int8_dequantize_g{group_size}",
    )(q, scale)
    return out
