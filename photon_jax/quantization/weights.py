"""The matrices of a model by name, outputs first, and dense parameters turned into int8 ones."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import DenseLinear, LayerParams, Linear, Params, Table
from photon_jax.quantization.int8 import QuantizedLinear, dequantize, quantize_int8

LAYER_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

OnMatrix = Callable[[], None]


def matrix_names(params: Params, quantization: QuantizationConfig) -> list[str]:
    """Returns the names of the matrices that become int8, such as "layers[0].qkv_proj", in order."""
    names = [f"layers[{index}].{name}" for index in range(len(params.layers)) for name in LAYER_LINEARS]
    if quantization.has_embedding:
        names += ["embedding"] if params.lm_head is None else ["embedding", "lm_head"]
    return names


def matrices(params: Params, quantization: QuantizationConfig) -> Iterator[tuple[str, jax.Array]]:
    """Yields name and weight [O I] of each matrix that becomes int8, dequantized if it is int8."""
    for name in matrix_names(params, quantization):
        yield name, _matrix(params, name)


def find_matrix(params: Params, name: str) -> Linear | Table:
    """Returns the part of the parameters that a name of `matrix_names` stands for."""
    layer, _, field = name.rpartition(".")
    owner = params.layers[int(layer.removeprefix("layers[").removesuffix("]"))] if layer else params
    found: Linear | Table = getattr(owner, field)
    return found


def _matrix(params: Params, name: str) -> jax.Array:
    value = find_matrix(params, name)
    if isinstance(value, QuantizedLinear):
        return dequantize(value.q, value.scale, group_size=value.group_size)
    return jnp.transpose(value.weight) if isinstance(value, DenseLinear) else value


def quantize_params(
    params: Params,
    quantization: QuantizationConfig,
    *,
    clip_ratios: Mapping[str, jax.Array] | None = None,
    on_matrix: OnMatrix | None = None,
) -> Params:
    """Returns dense parameters with their matrices as int8; norms and biases are shared.

    Args:
      params: dense.
      quantization: which matrices, and how.
      clip_ratios: name of a matrix -> f32[O ceil(I/group_size)], see `quantize_int8`; 1 for those not named.
      on_matrix: called after each matrix.

    Raises:
      ConfigError: a group is larger than a layer's inputs.
    """
    clip_ratios = clip_ratios or {}

    def quantize(name: str) -> QuantizedLinear:
        layer = quantize_int8(
            _matrix(params, name), group_size=quantization.group_size, clip_ratio=clip_ratios.get(name), layer=name
        )
        jax.block_until_ready(layer)
        if on_matrix is not None:
            on_matrix()
        return layer

    def quantize_layer(index: int, layer: LayerParams) -> LayerParams:
        linears: dict[str, Any] = {
            name: dataclasses.replace(quantize(f"layers[{index}].{name}"), bias=getattr(layer, name).bias)
            for name in LAYER_LINEARS
        }
        return dataclasses.replace(layer, **linears)

    quantized = dataclasses.replace(
        params, layers=tuple(quantize_layer(index, layer) for index, layer in enumerate(params.layers))
    )
    if not quantization.has_embedding:
        return quantized
    head = None if params.lm_head is None else quantize("lm_head")
    return dataclasses.replace(quantized, embedding=quantize("embedding"), lm_head=head)


def with_int8_activations(params: Params) -> Params:
    """Returns int8 parameters whose linear layers round their inputs too (W8A8); the head does not."""

    def switch(layer: LayerParams) -> LayerParams:
        linears: dict[str, Any] = {
            name: dataclasses.replace(find, int8_activations=True)
            for name in LAYER_LINEARS
            if isinstance(find := getattr(layer, name), QuantizedLinear)
        }
        return dataclasses.replace(layer, **linears)

    return dataclasses.replace(params, layers=tuple(switch(layer) for layer in params.layers))
