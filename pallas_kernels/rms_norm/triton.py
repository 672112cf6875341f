"""Root-mean-square normalization, Pallas with the Triton backend: one program a row.

A row's bits don't depend on how many rows there are.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.parts import add_parts


def _kernel(
    x_ref,  # [M D]
    weight_ref,  # [D]
    *refs,  # parts f32[S M D] where there are; the output [M D]; where there are parts the sum f32[M D]
    eps: float,
):
    has_parts = len(refs) == 3
    out_ref = refs[1] if has_parts else refs[0]
    row, size = pl.program_id(0), x_ref.shape[1]
    columns = lax.iota(jnp.int32, pl.next_power_of_2(size))
    mask = columns < size

    def load(ref, *index):
        return plt.load(ref.at[(*index, columns)], mask=mask, other=0.0).astype(jnp.float32)

    # All loads are asked for before the first addition waits for one.
    weight, total = load(weight_ref), load(x_ref, row)
    if has_parts:
        parts_ref, _, total_ref = refs
        total = total + add_parts([load(parts_ref, part, row) for part in range(parts_ref.shape[0])])
        plt.store(total_ref.at[row, columns], total, mask=mask)
    factor = lax.rsqrt((total * total).sum() / size + eps)
    plt.store(out_ref.at[row, columns], (total * factor * weight).astype(out_ref.dtype), mask=mask)


def _call(x: jax.Array, weight: jax.Array, parts: jax.Array | None, *, eps: float, interpret: bool) -> list[jax.Array]:
    """Returns the normed rows and, where there are parts, the sum."""
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"expected x [M D] and weight [D], got {x.shape} and {weight.shape}")
    has_parts = parts is not None
    # With parts fewer elements a thread: the compiler then asks for nearly all loads before the first addition.
    elements = 128 if has_parts else 256  # a warp's
    num_warps = min(16 if has_parts else 8, max(1, pl.next_power_of_2(x.shape[1]) // elements))
    shapes = [jax.ShapeDtypeStruct(x.shape, weight.dtype), jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    found: list[jax.Array] = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        out_shape=shapes if has_parts else shapes[:1],
        grid=(x.shape[0],),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name=f"add_rms_norm_s{parts.shape[0]}" if parts is not None else "rms_norm",
    )(x, weight, *((parts,) if has_parts else ()))
    return found


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, interpret: bool = False) -> jax.Array:
    """Returns the normed rows [M D] in the weight's dtype, as `rms_norm_reference` defines them.

    Args:
      x: [M D]
      weight: [D]
      eps: added to the mean square.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes don't fit each other.
    """
    (out,) = _call(x, weight, None, eps=eps, interpret=interpret)
    return out


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_rms_norm(
    x: jax.Array, parts: jax.Array, weight: jax.Array, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the normed rows of x + (the sum of parts) [M D] in the weight's dtype, and that sum f32[M D].

    As `add_rms_norm_reference` defines them: parts are added one after the other, then their sum to x.

    Args:
      x: f32[M D]
      parts: f32[S M D], of a split product.
      weight: [D]
      eps: added to the mean square.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes don't fit each other.
    """
    if parts.ndim != 3 or parts.shape[0] < 1 or parts.shape[1:] != x.shape:
        raise ValueError(f"expected parts [S M D] of x [M D], got {parts.shape} and {x.shape}")
    out, total = _call(x, weight, parts, eps=eps, interpret=interpret)
    return out, total
