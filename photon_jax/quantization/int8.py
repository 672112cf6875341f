"""INT8 weights in groups along the inputs: the PyTree type of a quantized linear, and rounding to it and back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from photon_jax.errors import ConfigError

Q_MAX = 127  # -128 is never used: the range is symmetric
MIN_SCALE = 2.0**-120  # keeps x / scale and scale / 2 normal numbers
_SCALE_MASK = 0xFFFFFF00  # 16 significant bits, so that int8 * scale is exact in float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedLinear:
    """A linear layer with int8 weights: y = x @ dequantize(layer).T + bias.

    Weight [o, i] stands for q[o, i] * scale[o, i // group_size]. Outputs come first, as in checkpoints and as
    `pallas_kernels.int8_matmul` takes them; the inputs of an output lie side by side. An embedding or head [V D] is the
    same type with a token's row as its output.

    Attributes:
      q: values from -127 to 127; a GGUF file may also hold -128, which every op accepts.
      scale: one a group; the last group is short when group_size does not divide the inputs. At most 16 significant
        bits, as `quantize_int8` makes them: products with q are then exact, and their bits don't depend on what a
        compiler fuses them with.
      bias: in the dtype of the activations, or None.
      group_size: inputs per scale: 32, 64 or 128.
      int8_activations: whether the inputs are rounded to int8 too, with scales of their own for each row and group.
    """

    q: jax.Array  # int8[O I]
    scale: jax.Array  # f32[O ceil(I/group_size)]
    bias: jax.Array | None = None  # [O]
    group_size: int = dataclasses.field(metadata={"static": True})
    int8_activations: bool = dataclasses.field(default=False, metadata={"static": True})


def num_groups(num_inputs: int, group_size: int) -> int:
    """Returns how many scales an output has."""
    return -(-num_inputs // group_size)


def check_group_size(group_size: int, num_inputs: int, layer: str) -> None:
    """Raises ConfigError when a group is larger than the dimension that it divides."""
    if group_size > num_inputs:
        raise ConfigError(
            f"layer {layer} has {num_inputs} inputs, fewer than group_size {group_size}; use a smaller group_size"
        )


def dequantize(
    q: jax.Array,  # int8[* I]
    scale: jax.Array,  # f32[* ceil(I/group_size)]
    *,
    group_size: int,
) -> jax.Array:  # f32[* I]
    """Returns q[..., i] * scale[..., i // group_size], each product exact or rounded once."""
    num_inputs = q.shape[-1]
    grouped = group_inputs(q.astype(jnp.float32), group_size) * jnp.expand_dims(scale.astype(jnp.float32), -1)
    return grouped.reshape(*q.shape[:-1], -1)[..., :num_inputs]


def quantize_int8(
    weight: jax.Array,  # [O I]
    *,
    group_size: int,
    clip_ratio: jax.Array | None = None,  # f32[O ceil(I/group_size)]
    layer: str = "weight",
) -> QuantizedLinear:
    """Returns the weights rounded to the nearest multiple of their group's scale, ties to even.

    A scale is the group's largest magnitude / 127, cut to 16 significant bits; so products of int8 and scale are exact
    in float32, none overflows, and without clipping no element is off by more than scale / 2. Scales are at least
    2**-120, also of a group of zeros.

    Args:
      weight: bf16, f16 or f32, finite.
      group_size: inputs per scale; the last group may be short.
      clip_ratio: share of the largest magnitude that 127 stands for, in (0, 1]; None for 1.
      layer: named in the error.

    Raises:
      ConfigError: a group is larger than the inputs.
    """
    check_group_size(group_size, weight.shape[1], layer)
    q, scale = round_groups(weight, clip_ratio, group_size=group_size)
    return QuantizedLinear(q=q, scale=scale, group_size=group_size)


@functools.partial(jax.jit, static_argnames=("group_size",))
def round_groups(weight: jax.Array, clip_ratio: jax.Array | None, *, group_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns q int8[* I] and scale f32[* ceil(I/group_size)] as `quantize_int8` does, of an array of any rank."""
    grouped = group_inputs(weight.astype(jnp.float32), group_size)  # [O G g]
    scale = jnp.abs(grouped).max(axis=-1) / Q_MAX
    if clip_ratio is not None:
        scale = scale * clip_ratio
    bits = lax.bitcast_convert_type(jnp.maximum(scale, MIN_SCALE), jnp.uint32) & jnp.uint32(_SCALE_MASK)
    scale = lax.bitcast_convert_type(bits, jnp.float32)
    step = jnp.expand_dims(scale, -1)
    q = jnp.round(grouped / step)
    error = grouped - q * step  # exact; the quotient was rounded, so q may be one off
    q = q + (error > step / 2).astype(jnp.float32) - (error < -step / 2).astype(jnp.float32)
    q = jnp.clip(q, -Q_MAX, Q_MAX).astype(jnp.int8)
    return q.reshape(*weight.shape[:-1], -1)[..., : weight.shape[-1]], scale


def round_activations(
    x: jax.Array,  # [* I]
    *,
    group_size: int,
) -> jax.Array:  # f32[* I]
    """Returns x as int8 would hold it: each row in groups with a scale of their own, rounded as weights are."""
    q, scale = round_groups(x, None, group_size=group_size)
    return dequantize(q, scale, group_size=group_size)


def group_inputs(
    x: jax.Array,  # [* I]
    group_size: int,
) -> jax.Array:  # [* ceil(I/group_size) group_size]
    """Returns the last axis in groups, the last one filled up with zeros."""
    padding = -x.shape[-1] % group_size
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return padded.reshape(*x.shape[:-1], -1, group_size)
