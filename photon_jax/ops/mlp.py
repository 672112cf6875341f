"""The first half of a layer's gated MLP, at the size of a fusion: norm, gate and up projections, and their product."""

from typing import Any

import jax

from photon_jax.config import KernelConfig
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import LayerParams
from photon_jax.ops.linear import Rows, limb_group, linear_gated
from photon_jax.ops.stream import Stream, map_normed
from photon_jax.ops.tiles import RowTiles


def gate_up(
    stream: Stream,
    layer: LayerParams,
    *,
    config: ModelConfig,
    kernels: KernelConfig,
    tiles: RowTiles | None,
) -> tuple[Rows, jax.Array]:
    """Returns silu(gate) * up of the normed stream [T F] and the stream as one array f32[T D].

    SwiGLU (Shazeer, arXiv:2002.05202), rounded once at the end, or split into limbs where the down projection wants it.
    """
    norm, gates = layer.post_attention_norm, layer.gate_up_proj
    group_size = limb_group(layer.down_proj, stream.base.shape[0], norm.dtype, kernels.linear)

    def compute(normed: Rows) -> tuple[Rows]:
        return (linear_gated(normed, gates, backend=kernels.linear, dtype=norm.dtype, group_size=group_size),)

    options: dict[str, Any] = {"eps": config.rms_norm_eps, "backend": kernels.linear, "tiles": tiles}
    (hidden,), residual = map_normed(compute, stream, norm, reader=gates, **options)
    return hidden, residual
