"""The first half of a layer's gated MLP, at the size of a fusion: norm, gate and up projections, and their product."""

from typing import Any

import jax

from photon_jax.config import KernelConfig
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import LayerParams
from photon_jax.ops.linear import linear_gated
from photon_jax.ops.stream import Stream, map_normed
from photon_jax.ops.tiles import RowTiles


def gate_up(
    stream: Stream,
    layer: LayerParams,
    *,
    config: ModelConfig,
    kernels: KernelConfig,
    tiles: RowTiles | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns silu(gate) * up of the normed stream [T F] and the stream as one array f32[T D].

    SwiGLU (Shazeer, arXiv:2002.05202), rounded once at the end.
    """

    def compute(normed: jax.Array) -> tuple[jax.Array]:
        return (linear_gated(normed, layer.gate_up_proj, backend=kernels.linear),)

    options: dict[str, Any] = {"eps": config.rms_norm_eps, "backend": kernels.linear, "tiles": tiles}
    (hidden,), residual = map_normed(compute, stream, layer.post_attention_norm, **options)
    return hidden, residual
