"""Activations in two int8 limbs: x is scale * (256 * high + low), its scale shared by a row's inputs of one group.

With the groups of int8 weights, products of limbs and weights are whole numbers: cores that multiply int8 take the
weights as they are stored, and only sums over a group are converted.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError

NUM_LIMBS = 2
LARGEST = 127 * 256  # of 256 * high + low, so that high stays within [-127, 127]
SMALLEST = 2.0**-96  # groups with nothing above it are stored as zeros, since 1 / scale would overflow
_WHOLE, _WHOLE_BITS = 1.5 * 2**23, 0x4B400000  # float32 has steps of one around it; and how it is stored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LimbRows:
    """Rows of activations in two int8 limbs.

    Attributes:
      limbs: the high ones first; 256 * high + low is within [-32512, 32512].
      scale: of each row's groups, 0 where all of a group is.
      group_size: inputs that share a scale; the last group may be short.
    """

    limbs: jax.Array  # i8[2 M I]
    scale: jax.Array  # f32[M ceil(I/g)]
    group_size: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and inputs, [M I]."""
        _, num_rows, num_inputs = self.limbs.shape
        return num_rows, num_inputs


def split_groups(x: jax.Array, group_size: int) -> jax.Array:
    """Returns [... G g] of x [... I], the last group filled up with zeros."""
    num_inputs = x.shape[-1]
    num_groups = -(-num_inputs // group_size)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_groups * group_size - num_inputs)]
    return jnp.pad(x, padding).reshape(*x.shape[:-1], num_groups, group_size)


def split_limbs_reference(x: jax.Array, *, group_size: int) -> LimbRows:
    """Returns x in limbs, the specification.

    With s = max|x| / 32512 of a row's group and q = round(x / s): high = floor((q + 128) / 256) in [-127, 127] and
    low = q - 256 * high in [-128, 127]. A group of zeros has s = 0. Then |x - s * q| <= s / 2, to float32's rounding.

    Args:
      x: bf16, f16 or f32[M I]
      group_size: inputs per scale; the last group may be short.
    """
    values = split_groups(x.astype(jnp.float32), group_size)
    largest = jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    largest = jnp.where(largest < SMALLEST, 0.0, largest)
    factor = jnp.where(largest == 0.0, 0.0, LARGEST / largest)
    whole = jnp.round(values * factor).astype(jnp.int32)
    high = (whole + 128) >> 8
    limbs = jnp.stack([high, whole - 256 * high]).astype(jnp.int8)
    limbs = limbs.reshape(NUM_LIMBS, x.shape[0], -1)[:, :, : x.shape[1]]
    return LimbRows(limbs=limbs, scale=jnp.squeeze(largest, axis=-1) * (1.0 / LARGEST), group_size=group_size)


def check_group(group_size: int) -> None:
    """Raises KernelUnsupportedError for groups that the kernels with limbs can't work with."""
    if group_size not in (32, 64, 128):
        raise KernelUnsupportedError(f"limbs need groups of 32, 64 or 128, got {group_size}")


def limb_shapes(num_rows: int, num_inputs: int, group_size: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns what limbs and scales look like as outputs of a kernel."""
    return (
        jax.ShapeDtypeStruct((NUM_LIMBS, num_rows, num_inputs), jnp.int8),
        jax.ShapeDtypeStruct((num_rows, -(-num_inputs // group_size)), jnp.float32),
    )


def group_columns(first_group, num_groups: int, group_size: int) -> jax.Array:
    """Returns i32[num_groups group_size], inside a kernel: the inputs of the groups from first_group on.

    By broadcasts, which keep what the compiler knows of contiguity; a reshape loses it, and loads go byte by byte.
    """

    def iota(size: int, axis: int) -> jax.Array:
        shape = [size if index == axis else 1 for index in range(2)]
        return lax.broadcast_in_dim(lax.iota(jnp.int32, size), shape, (axis,))

    return (first_group + iota(num_groups, 0)) * group_size + iota(group_size, 1)


def _find_limbs(values):
    """Returns high and low i32[A g] and scales f32[A] of f32[A g], inside a kernel; what isn't finite stays so."""
    sizes = jnp.where(values == values, jnp.abs(values), jnp.inf)  # a NaN must not get lost in the maximum
    largest = sizes.max(axis=1)
    largest = jnp.where(largest < SMALLEST, 0.0, largest)
    factor = jnp.where(largest == 0.0, 0.0, LARGEST / largest)
    # At this size float32 has whole steps: the sum rounds to the nearest whole number and its low bits hold it.
    shifted = lax.bitcast_convert_type(values * factor[:, None] + _WHOLE, jnp.int32)
    whole = shifted - _WHOLE_BITS
    high = (whole + 128) >> 8
    return high, whole - 256 * high, largest * (1.0 / LARGEST)


def store_limbs(values, row, first_group, limbs_ref, scale_ref) -> None:
    """Splits f32[A g], the groups from first_group on of a row, and stores limbs and scales, inside a kernel."""
    num_inputs, (num_groups, group_size) = limbs_ref.shape[2], values.shape
    high, low, scale = _find_limbs(values)
    inputs = group_columns(first_group, num_groups, group_size)
    for limb, part in enumerate((high, low)):
        plt.store(limbs_ref.at[limb, row, inputs], part.astype(jnp.int8), mask=inputs < num_inputs)
    groups = first_group + lax.iota(jnp.int32, num_groups)
    plt.store(scale_ref.at[row, groups], scale, mask=groups < scale_ref.shape[1])
