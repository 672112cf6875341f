"""Flax: parameters to and from the states of Flax modules, NNX and Linen, whose names are Hugging Face's.

A state is a tree of nested names, such as model / layers / 0 / self_attn / q_proj / kernel. The last one is

    embedding   [V D]           of embed_tokens
    scale       [D] or [d]      of norms
    kernel      [I O]           of linears (q, k, v, gate and up are separate) and of lm_head, where it isn't tied
    bias        [O]             of linears that have one

In NNX `layers` is a list, so the number of a layer is an int in the path, and leaves are `nnx.Param`. Linen variables
are {"params": ...} with arrays as leaves, and a layer is named `layers_0`. All functions work on tracers too.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from photon_jax.checkpoint.weight_map import Part, Source, make_weight_map
from photon_jax.errors import CheckpointError
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params, abstract_params


def to_nnx_state(params: Params, config: ModelConfig) -> nnx.State[Any, Any]:
    """Returns the state of an NNX module with these parameters, for `nnx.update`.

    Raises:
      CheckpointError: they are quantized.
    """
    arrays = _split_leaves(params, config)
    state: nnx.State[Any, Any] = nnx.from_flat_state(
        [(_nnx_path(name), nnx.Param(array)) for name, array in arrays.items()]
    )
    return state


def from_nnx_state(state: nnx.State[Any, Any], config: ModelConfig) -> Params:
    """Returns the parameters of an NNX module, cast to the dtype of the config.

    Args:
      state: `nnx.state(module, nnx.Param)`.

    Raises:
      CheckpointError: a leaf is missing, surplus or of another shape, or the config is of quantized weights.
    """
    flat = traverse_util.flatten_dict(dict(nnx.to_pure_dict(state)))
    return _join_leaves({".".join(map(str, path)): leaf for path, leaf in flat.items()}, config)


def to_linen_variables(params: Params, config: ModelConfig) -> dict[str, Any]:
    """Returns the variables of a Linen module with these parameters, for `module.apply`.

    Raises:
      CheckpointError: they are quantized.
    """
    arrays = _split_leaves(params, config)
    return {"params": traverse_util.unflatten_dict({_linen_path(name): array for name, array in arrays.items()})}


def from_linen_variables(variables: Mapping[str, Any], config: ModelConfig) -> Params:
    """Returns the parameters of a Linen module, cast to the dtype of the config; only "params" is read.

    Raises:
      CheckpointError: a leaf is missing, surplus or of another shape, or the config is of quantized weights.
    """
    if "params" not in variables:
        raise CheckpointError(f"Linen variables must hold 'params', got {sorted(variables)}")
    flat = traverse_util.flatten_dict(dict(variables["params"]))
    names = {re.sub(r"\blayers_(\d+)", r"layers.\1", ".".join(map(str, path))): leaf for path, leaf in flat.items()}
    return _join_leaves(names, config)


def _nnx_path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))


def _linen_path(name: str) -> tuple[str, ...]:
    return tuple(re.sub(r"\blayers\.(\d+)", r"layers_\1", name).split("."))


def _split_leaves(params: Params, config: ModelConfig) -> dict[str, jax.Array]:
    """Returns name -> array of a state, the names joined by dots."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    return {
        _flax_name(source): _take_part(leaves[path], source, config)
        for path, sources in _sources(config).items()
        for source in sources
    }


def _join_leaves(arrays: Mapping[str, Any], config: ModelConfig) -> Params:
    sources = _sources(config)
    expected = {_flax_name(source): _flax_shape(source) for leaf in sources.values() for source in leaf}
    for name, shape in expected.items():
        if name not in arrays:
            raise CheckpointError(f"the Flax state has no {name}, expected shape {list(shape)}")
        if tuple(arrays[name].shape) != shape:
            raise CheckpointError(
                f"the Flax state: {name} has shape {list(arrays[name].shape)}, expected {list(shape)}"
            )
    surplus = sorted(arrays.keys() - expected.keys())
    if surplus:
        raise CheckpointError(f"the Flax state has {surplus[0]}, which {config.architecture} has no place for")
    paths, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    leaves = [
        _join_parts([(source, arrays[_flax_name(source)]) for source in sources[jax.tree_util.keystr(path)]], config)
        for path, _ in paths
    ]
    params: Params = jax.tree.unflatten(tree, [leaf.astype(config.dtype) for leaf in leaves])
    return params


def _sources(config: ModelConfig) -> Mapping[str, tuple[Source, ...]]:
    """Returns key path of each leaf of Params -> the tensors of Hugging Face's layout that it is made of."""
    if config.quantization is not None:
        raise CheckpointError("Flax states hold dense weights, and the config is of int8 ones; use those before")
    paths, _ = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    shapes = {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in paths}
    return make_weight_map(config, shapes, "hf").leaves


def _flax_name(source: Source) -> str:
    stem, _, kind = source.name.rpartition(".")
    if kind == "bias":
        return source.name
    if stem.endswith("norm"):
        return f"{stem}.scale"
    return f"{stem}.embedding" if stem.endswith("embed_tokens") else f"{stem}.kernel"


def _flax_shape(source: Source) -> tuple[int, ...]:
    return source.shape[::-1] if _flax_name(source).endswith(".kernel") else source.shape


def _take_part(leaf: jax.Array, source: Source, config: ModelConfig) -> jax.Array:
    """Returns the part of a leaf of Params; fused outputs are on its last axis."""
    if source.part in ("gate", "up"):
        start = 0 if source.part == "gate" else config.mlp_size
        return leaf[..., start : start + config.mlp_size]
    if source.part != "whole":
        grouped = leaf.reshape(*leaf.shape[:-1], config.num_kv_heads, config.num_groups + 2, config.head_dim)
        return grouped[..., _heads(source.part, config), :].reshape(*leaf.shape[:-1], -1)
    return leaf.T if source.name == "lm_head.weight" else leaf


def _join_parts(parts: list[tuple[Source, Any]], config: ModelConfig) -> jax.Array:
    (first, array), arrays = parts[0], [jnp.asarray(array) for _, array in parts]
    if first.part == "gate":
        return jnp.concatenate(arrays, axis=-1)
    if first.part == "query":
        grouped = [array.reshape(*array.shape[:-1], config.num_kv_heads, -1, config.head_dim) for array in arrays]
        return jnp.concatenate(grouped, axis=-2).reshape(*array.shape[:-1], -1)
    return arrays[0].T if first.name == "lm_head.weight" else arrays[0]


def _heads(part: Part, config: ModelConfig) -> slice:
    """Returns which heads of a KV group the part holds."""
    groups = config.num_groups
    return {"query": slice(groups), "key": slice(groups, groups + 1), "value": slice(groups + 1, groups + 2)}[part]
