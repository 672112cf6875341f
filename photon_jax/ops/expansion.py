"""Expansion: int8 weights dequantized once for all steps of many rows, instead of in each of them."""

import dataclasses
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp

from pallas_kernels import int8_dequantize
from photon_jax.models.params import DenseLinear, LayerParams, Params
from photon_jax.quantization.int8 import QuantizedLinear


def expanded_bytes(params: Params, dtype: jnp.dtype) -> int:
    """Returns the memory that the dequantized weights take beside the others."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedLinear))
    sizes: list[int] = [leaf.q.size for leaf in leaves if _is_plain(leaf)]
    return sum(sizes) * int(jnp.dtype(dtype).itemsize)


def expand(params: Params, dtype: jnp.dtype) -> Params:
    """Returns the weights with those that `linear` dequantizes for many rows as what it makes of them, in dtype.

    The embedding stays as it is: of it only the rows of tokens are read.
    """
    head = params.head
    if _is_plain(head):
        head = _dequantized(head, dtype)
    return dataclasses.replace(
        params,
        layers=tuple(_expand_layer(layer, dtype) for layer in params.layers),
        lm_head=None if head is params.embedding else head,
    )


def _expand_layer(layer: LayerParams, dtype: jnp.dtype) -> LayerParams:
    found: dict[str, Any] = {
        name: DenseLinear(weight=_dequantized(each, dtype), bias=each.bias, has_outputs_first=True)
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        if _is_plain(each := getattr(layer, name))
    }
    return dataclasses.replace(layer, **found)


def _is_plain(leaf: object) -> TypeGuard[QuantizedLinear]:
    return isinstance(leaf, QuantizedLinear) and not leaf.int8_activations


def _dequantized(layer: QuantizedLinear, dtype: jnp.dtype) -> jax.Array:
    weight: jax.Array = int8_dequantize(layer.q, layer.scale, group_size=layer.group_size, dtype=dtype)
    return weight
