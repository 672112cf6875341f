"""The gated MLP half of a layer, at the size of a fusion: gate and up, then down and the residual."""

import jax

from photon_jax.config import KernelConfig
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import LayerParams, Linear
from photon_jax.ops.linear import linear_add, linear_gated
from photon_jax.ops.norm import normed_rows
from photon_jax.ops.tiles import RowTiles, map_rows


def gate_up(
    x: jax.Array,  # f32[T D]
    layer: LayerParams,
    *,
    config: ModelConfig,
    kernels: KernelConfig,
    tiles: RowTiles | None,
) -> jax.Array:  # [T F]
    """Returns silu(gate) * up of the normed input (SwiGLU, Shazeer, arXiv:2002.05202), rounded once at the end."""

    def compute(x: jax.Array) -> tuple[jax.Array]:
        normed = normed_rows(x, layer.post_attention_norm, eps=config.rms_norm_eps, backend=kernels.linear)
        return (linear_gated(normed, layer.gate_up_proj, backend=kernels.linear),)

    (hidden,) = map_rows(compute, tiles, x)
    return hidden


def down_add(
    hidden: jax.Array,  # [T F]
    residual: jax.Array,  # f32[T D]
    down_proj: Linear,
    *,
    kernels: KernelConfig,
    tiles: RowTiles | None,
) -> jax.Array:  # f32[T D]
    """Returns the residual stream with the down projection added."""

    def compute(hidden: jax.Array, residual: jax.Array) -> tuple[jax.Array]:
        return (linear_add(hidden, down_proj, residual, backend=kernels.linear),)

    (out,) = map_rows(compute, tiles, hidden, residual)
    return out
