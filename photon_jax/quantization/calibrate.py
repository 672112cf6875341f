"""Calibration: what a text's activations say about the weights, and two ways to round better with it.

Both weigh the squared error of a weight by the mean square of the input that it multiplies, the diagonal of the
layer's second moments. `scale_inputs` moves size from weights to the activations before them (after AWQ, Lin et al.,
arXiv:2306.00978); `search_clip` tries scales around the plain one for each group.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.models.config import ModelConfig, QuantizationConfig
from photon_jax.models.decoder import full_layer
from photon_jax.models.params import DenseLinear, LayerParams, Params
from photon_jax.ops.linear import embedding_rows
from photon_jax.ops.norm import rms_norm
from photon_jax.ops.rope import rope_tables
from photon_jax.quantization.int8 import dequantize, group_inputs, num_groups, quantize_int8
from photon_jax.quantization.weights import matrices

STRENGTHS = tuple(np.arange(0.0, 0.65, 0.05).tolist())  # 0 leaves the weights as they are
CLIP_RATIOS = (1.0, *np.arange(0.92, 1.045, 0.01).tolist())

OnItem = Callable[[], None]
Importance = Mapping[str, jax.Array]  # name of a matrix -> mean square of its inputs, f32[I]


def measure_importance(
    params: Params, config: ModelConfig, windows: Sequence[np.ndarray], *, on_window: OnItem | None = None
) -> dict[str, jax.Array]:
    """Returns the mean square of each matrix's inputs over a text.

    Args:
      params: dense.
      config: of the model.
      windows: token ids i32[T] of pieces of the text, each read from position 0, all of one length.
      on_window: called after each.
    """
    totals: dict[str, jax.Array] = {}
    for window in windows:
        x = embedding_rows(params.embedding, jnp.asarray(window))
        for index, layer in enumerate(params.layers):
            x, squares = _observe_layer(layer, x, config=config)
            for name, square in squares.items():
                _add(totals, f"layers[{index}].{name}", square)
        _add(totals, "lm_head", _mean_square(rms_norm(x, params.final_norm, eps=config.rms_norm_eps)))
        jax.block_until_ready(totals)
        if on_window is not None:
            on_window()
    means = {name: total / len(windows) for name, total in totals.items()}
    # a table is read row by row as an embedding; as a tied head it multiplies too, and that decides
    means["embedding"] = means["lm_head"] if params.lm_head is None else jnp.ones_like(means["lm_head"])
    return means


def _add(totals: dict[str, jax.Array], name: str, square: jax.Array) -> None:
    totals[name] = totals[name] + square if name in totals else square


def _mean_square(x: jax.Array) -> jax.Array:  # [T *] -> f32[*]
    return jnp.square(x.astype(jnp.float32)).mean(axis=0)


@functools.partial(jax.jit, static_argnames=("config",))
def _observe_layer(layer: LayerParams, x: jax.Array, *, config: ModelConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    num_tokens = x.shape[0]
    rope = rope_tables(jnp.arange(num_tokens, dtype=jnp.int32), config=config, seq_len=num_tokens, tiles=None)
    out, middle, attended, hidden = full_layer(layer, x, rope, batch=1, config=config)
    return out, {
        "qkv_proj": _mean_square(rms_norm(x, layer.input_norm, eps=config.rms_norm_eps)),
        "o_proj": _mean_square(attended.reshape(num_tokens, -1)),
        "gate_up_proj": _mean_square(rms_norm(middle, layer.post_attention_norm, eps=config.rms_norm_eps)),
        "down_proj": _mean_square(hidden),
    }


def scale_inputs(
    params: Params,
    config: ModelConfig,
    importance: Importance,
    quantization: QuantizationConfig,
    *,
    on_layer: OnItem | None = None,
) -> tuple[Params, dict[str, jax.Array]]:
    """Returns dense parameters of the same function that round better, and their importance.

    Inputs that matter get larger weights, and what makes those inputs is made smaller by as much: a norm, the value
    rows of the QKV projection, or the rows of the up projection. So the step does nothing more. How strongly is tried
    out for each linear.
    """
    scaled = dict(importance)
    layers = []
    for index, layer in enumerate(params.layers):
        for name, fold in _FOLDS.items():
            key, linear = f"layers[{index}].{name}", getattr(layer, name)
            shared = _shared_importance(importance[key], name, config)
            factors = _choose_factors(jnp.transpose(linear.weight), shared, importance[key], quantization.group_size)
            replaced: dict[str, Any] = {name: _scale_rows(linear, factors)}
            layer = fold(dataclasses.replace(layer, **replaced), factors, config)
            scaled[key] = importance[key] / jnp.square(factors)
        layers.append(jax.block_until_ready(layer))
        if on_layer is not None:
            on_layer()
    return dataclasses.replace(params, layers=tuple(layers)), scaled


def _shared_importance(importance: jax.Array, name: str, config: ModelConfig) -> jax.Array:
    """Returns the importance with inputs that one value row makes, those of a group of heads, given their mean."""
    if name != "o_proj":
        return importance
    heads = importance.reshape(config.num_kv_heads, config.num_groups, config.head_dim)
    return jnp.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)


def _choose_factors(weight: jax.Array, shared: jax.Array, importance: jax.Array, group_size: int) -> jax.Array:
    """Returns the factors f32[I] of the inputs with the least weighted error."""
    floor = jnp.maximum(shared, 1e-6 * shared.mean() + 1e-30)
    relative = floor / jnp.exp(jnp.log(floor).mean())
    best, least = jnp.ones_like(relative), jnp.inf
    for strength in STRENGTHS:
        factors = relative ** (strength / 2)
        error = _group_errors(
            weight * jnp.expand_dims(factors, 0), importance / jnp.square(factors), None, group_size=group_size
        ).sum()
        if error < least:
            best, least = factors, error
    return best


def _scale_rows(linear: DenseLinear, factors: jax.Array) -> DenseLinear:
    scaled = linear.weight.astype(jnp.float32) * jnp.expand_dims(factors, 1)
    return dataclasses.replace(linear, weight=scaled.astype(linear.weight.dtype))


def _shrink_outputs(linear: DenseLinear, factors: jax.Array) -> DenseLinear:
    """Returns the linear with its outputs divided by factors f32[O]."""
    weight = linear.weight.astype(jnp.float32) / jnp.expand_dims(factors, 0)
    bias = None if linear.bias is None else (linear.bias.astype(jnp.float32) / factors).astype(linear.bias.dtype)
    return dataclasses.replace(linear, weight=weight.astype(linear.weight.dtype), bias=bias)


def _shrink_norm(norm: jax.Array, factors: jax.Array) -> jax.Array:
    return (norm.astype(jnp.float32) / factors).astype(norm.dtype)


def _fold_into_input_norm(layer: LayerParams, factors: jax.Array, _: ModelConfig) -> LayerParams:
    return dataclasses.replace(layer, input_norm=_shrink_norm(layer.input_norm, factors))


def _fold_into_values(layer: LayerParams, factors: jax.Array, config: ModelConfig) -> LayerParams:
    """Divides the value rows; the factors of a group's heads are equal."""
    per_kv_head = factors.reshape(config.num_kv_heads, config.num_groups, config.head_dim)[:, 0]
    rows = jnp.ones((config.num_kv_heads, config.num_groups + 2, config.head_dim)).at[:, -1].set(per_kv_head)
    return dataclasses.replace(layer, qkv_proj=_shrink_outputs(layer.qkv_proj, rows.reshape(-1)))  # type: ignore[arg-type]


def _fold_into_post_attention_norm(layer: LayerParams, factors: jax.Array, _: ModelConfig) -> LayerParams:
    return dataclasses.replace(layer, post_attention_norm=_shrink_norm(layer.post_attention_norm, factors))


def _fold_into_up(layer: LayerParams, factors: jax.Array, _: ModelConfig) -> LayerParams:
    rows = jnp.concatenate([jnp.ones_like(factors), factors])
    return dataclasses.replace(layer, gate_up_proj=_shrink_outputs(layer.gate_up_proj, rows))  # type: ignore[arg-type]


# A linear is scaled before its own outputs are divided for the next one, which changes no group's rounding.
_FOLDS = {
    "qkv_proj": _fold_into_input_norm,
    "o_proj": _fold_into_values,
    "gate_up_proj": _fold_into_post_attention_norm,
    "down_proj": _fold_into_up,
}


def search_clip(
    params: Params,
    quantization: QuantizationConfig,
    importance: Importance | None = None,
    *,
    on_matrix: OnItem | None = None,
) -> dict[str, jax.Array]:
    """Returns the clip ratio f32[O ceil(I/group_size)] of each matrix with the least weighted squared error.

    Ratios a little above 1 are tried as well: they clip nothing, and the grid may fit better.

    Args:
      params: dense.
      quantization: which matrices, and how.
      importance: of their inputs; None weighs all alike.
    """
    ratios = {}
    for name, weight in matrices(params, quantization):
        weighing = jnp.ones(weight.shape[1]) if importance is None else importance[name]
        best = jnp.ones((weight.shape[0], num_groups(weight.shape[1], quantization.group_size)))
        least = jnp.full(best.shape, jnp.inf)
        for ratio in CLIP_RATIOS:
            tried = jnp.full(best.shape, ratio)
            errors = _group_errors(weight, weighing, tried, group_size=quantization.group_size)
            best, least = jnp.where(errors < least, tried, best), jnp.minimum(errors, least)
        ratios[name] = jax.block_until_ready(best)
        if on_matrix is not None:
            on_matrix()
    return ratios


@functools.partial(jax.jit, static_argnames=("group_size",))
def _group_errors(
    weight: jax.Array,  # [O I]
    importance: jax.Array,  # f32[I]
    clip_ratio: jax.Array | None,  # f32[O ceil(I/group_size)]
    *,
    group_size: int,
) -> jax.Array:  # f32[O ceil(I/group_size)]
    """Returns each group's squared rounding error, weighted."""
    layer = quantize_int8(weight, group_size=group_size, clip_ratio=clip_ratio)
    error = dequantize(layer.q, layer.scale, group_size=group_size) - weight.astype(jnp.float32)
    return group_inputs(jnp.square(error) * jnp.expand_dims(importance, 0), group_size).sum(axis=-1)
