"""Root-mean-square normalization, Pallas with the Triton backend: one program a row."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def _kernel(x_ref, weight_ref, out_ref, *, eps: float):
    row, size = pl.program_id(0), x_ref.shape[1]
    columns = lax.iota(jnp.int32, pl.next_power_of_2(size))
    mask = columns < size
    x = plt.load(x_ref.at[row, columns], mask=mask, other=0.0).astype(jnp.float32)
    weight = plt.load(weight_ref.at[columns], mask=mask, other=0.0).astype(jnp.float32)
    factor = lax.rsqrt((x * x).sum() / size + eps)
    plt.store(out_ref.at[row, columns], (x * factor * weight).astype(out_ref.dtype), mask=mask)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, interpret: bool = False) -> jax.Array:
    """Returns the normed rows [M D] in the weight's dtype, as `rms_norm_reference` defines them.

    A row's bits don't depend on how many rows there are.

    Args:
      x: [M D]
      weight: [D]
      eps: added to the mean square.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes don't fit each other.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"expected x [M D] and weight [D], got {x.shape} and {weight.shape}")
    num_warps = min(8, max(1, pl.next_power_of_2(x.shape[1]) // 256))
    out: jax.Array = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=jax.ShapeDtypeStruct(x.shape, weight.dtype),
        grid=(x.shape[0],),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="rms_norm",
    )(x, weight)
    return out
