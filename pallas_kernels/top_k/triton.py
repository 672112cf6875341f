"""The greatest entries of each row, Pallas with the Triton backend: k maxima of each part of a row, and k of those.

XLA sorts whole rows on a GPU. A maximum that was taken is put below every float, so floats are compared as integers in
the same order.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

PART = 4096  # entries of a program
_TAKEN = -(2**31)


def _flip(bits):
    """Returns integers in the order of the floats whose bits these are, or the other way round."""
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _take_greatest(keys, places, k, write):
    """Calls write(index, key, place) with each of the k greatest keys; of equal ones the lowest place comes first."""

    def take(index, left):
        best = left.max()
        place = jnp.where(left == best, places, 2**31 - 1).min()
        write(index, best, place)
        return jnp.where(places == place, _TAKEN, left)

    lax.fori_loop(0, k, take, keys)


def _part_kernel(
    x_ref,  # f32[M V]
    key_ref,  # i32[M C*k], those of a part, in order
    place_ref,  # i32[M C*k]
    *,
    k: int,
):
    part, row, size = pl.program_id(0), pl.program_id(1), x_ref.shape[1]
    places = part * PART + lax.iota(jnp.int32, PART)
    x = plt.load(x_ref.at[row, places], mask=places < size, other=0.0)
    keys = jnp.where(places < size, _flip(lax.bitcast_convert_type(x, jnp.int32)), _TAKEN)

    def write(index, key, place):
        key_ref[row, part * k + index] = key
        place_ref[row, part * k + index] = place

    _take_greatest(keys, places, k, write)


def _join_kernel(key_ref, place_ref, value_ref, id_ref, *, k: int):
    row, count = pl.program_id(0), key_ref.shape[1]
    lanes = lax.iota(jnp.int32, pl.next_power_of_2(count))
    keys = plt.load(key_ref.at[row, lanes], mask=lanes < count, other=_TAKEN)
    places = plt.load(place_ref.at[row, lanes], mask=lanes < count, other=0)

    def write(index, key, place):
        value_ref[row, index] = lax.bitcast_convert_type(_flip(key), jnp.float32)
        id_ref[row, index] = place

    _take_greatest(keys, places, k, write)


@functools.partial(jax.jit, static_argnames=("k", "interpret"))
def top_k(x: jax.Array, k: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the k greatest entries f32[M k] of each row and their places i32[M k], as `top_k_reference` defines them.

    Where an entry is NaN the values may be any, the places are of the row.

    Args:
      x: f32[M V]
      k: V at most; the time grows with it.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: x is no matrix, or has rows of fewer than k entries.
    """
    if x.ndim != 2 or not 1 <= k <= x.shape[1]:
        raise ValueError(f"expected x [M V] and k from 1 to V, got {x.shape} and {k}")
    num_rows, num_parts = x.shape[0], pl.cdiv(x.shape[1], PART)
    found = jax.ShapeDtypeStruct((num_rows, num_parts * k), jnp.int32)
    keys, places = pl.pallas_call(
        functools.partial(_part_kernel, k=k),
        out_shape=[found, found],
        grid=(num_parts, num_rows),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="top_k",
    )(x)
    values, ids = pl.pallas_call(
        functools.partial(_join_kernel, k=k),
        out_shape=[jax.ShapeDtypeStruct((num_rows, k), dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(num_rows,),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="top_k_join",
    )(keys, places)
    return values, ids
