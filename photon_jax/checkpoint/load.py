"""Loading: a checkpoint on disk -> Params on the device, with what else it says about the model."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from photon_jax.checkpoint.demo import demo_model_path
from photon_jax.checkpoint.fill import OnRounded, OnTensor, TensorSource, fill_params
from photon_jax.checkpoint.generation_config import FILE_NAME as GENERATION_CONFIG_NAME
from photon_jax.checkpoint.generation_config import read_sampling_defaults
from photon_jax.checkpoint.hub import CHOICES, find_model
from photon_jax.checkpoint.orbax_io import (
    PARAMS_NAME,
    OrbaxCheckpoint,
    check_arrays,
    is_checkpoint,
    load_params,
    open_checkpoint_folder,
)
from photon_jax.checkpoint.safetensors_io import open_safetensors, read_json_object
from photon_jax.checkpoint.weight_map import Source, WeightMap, check_tensors, make_weight_map
from photon_jax.errors import CheckpointError, ConfigError
from photon_jax.models.config import ModelConfig, QuantizationConfig
from photon_jax.models.config_fields import ConfigFields
from photon_jax.models.gguf_config import config_from_gguf
from photon_jax.models.hf_config import config_from_hf
from photon_jax.models.params import Params, abstract_params, num_bytes

DEMO_NAME = "demo"
_ROPE_FACTORS_NAME = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint whose headers were read and checked, and no weight yet.

    Attributes:
      config: the model's shape, with the dtype that its parameters are to have.
      generation_config: the sampling defaults of the file of that name, checked; empty when it has none.
      eos_token_ids: of the configuration and the generation config together.
      tokenizer_source: the folder that holds tokenizer.json, the fields of a GGUF file, or None for neither.
      path: what was opened.
      weight_map: which tensors fill which leaf of the parameters.
      tensors: where they are read from.
    """

    config: ModelConfig
    generation_config: Mapping[str, object]
    eos_token_ids: tuple[int, ...]
    tokenizer_source: Path | dict[str, object] | None
    path: Path
    weight_map: WeightMap
    tensors: TensorSource


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint(OpenedCheckpoint):
    """A model ready to run.

    Attributes:
      params: on the default device.
      num_bytes: of `params`.
    """

    params: Params
    num_bytes: int


def load_checkpoint(
    path: str | Path,
    *,
    dtype: str,
    quantization: QuantizationConfig | None = None,
    on_tensor: OnTensor | None = None,
    on_rounded: OnRounded | None = None,
    on_config: Callable[[ModelConfig], None] | None = None,
    use_generation_config: bool = True,
) -> LoadedCheckpoint:
    """Reads a checkpoint leaf by leaf; each goes to the default device once complete, and the host keeps no copy.

    Args:
      path: "demo", a folder with config.json and safetensors, a folder that `orbax_io.save_checkpoint` wrote, a .gguf
        file, or a Hugging Face id; see `hub.find_model`.
      dtype: of the parameters: "float32", "bfloat16" or "float16"; "auto": float32 on a CPU, bfloat16 on a GPU.
      quantization: rounds the weights to int8 as they are read; None keeps `dtype`, or what was saved as int8.
      on_tensor: called after each tensor with its name, the bytes read so far and the bytes in all.
      on_rounded: called after each matrix that was rounded, see `fill_params`.
      use_generation_config: whether to read sampling defaults; its end-of-sequence ids count in any case.
      on_config: called before the first weight is read, with the config that the parameters will have.

    Raises:
      CheckpointError: the checkpoint is missing, damaged, incomplete, or of a kind that isn't supported.
      ConfigError: a group of the quantization is larger than a layer's inputs, or the weights are int8 of another kind.
    """
    opened = open_checkpoint(path, dtype=dtype, use_generation_config=use_generation_config)
    saved = opened.config.quantization
    if saved is not None and quantization not in (None, saved):
        raise ConfigError(
            f"{opened.path} holds int8 weights, {saved}; they can't be made {quantization}: leave that out"
        )
    quantization = saved or quantization
    if on_config is not None:
        on_config(opened.config.with_quantization(quantization))
    params = _fill_or_restore(opened, quantization, on_tensor, on_rounded)
    fields = {field.name: getattr(opened, field.name) for field in dataclasses.fields(opened)}
    fields["config"] = opened.config.with_quantization(quantization)
    return LoadedCheckpoint(**fields, params=params, num_bytes=num_bytes(params))


def open_checkpoint(path: str | Path, *, dtype: str, use_generation_config: bool = True) -> OpenedCheckpoint:
    """Reads what a checkpoint says about its model, and where its tensors lie; arguments as in `load_checkpoint`.

    Raises:
      CheckpointError: the checkpoint is missing, damaged, incomplete, or of a kind that isn't supported.
    """
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    place = demo_model_path() if path == DEMO_NAME else find_model(path)
    if is_checkpoint(place):
        return _open_orbax(place, dtype, use_generation_config)
    if place.is_dir():
        return _open_folder(place, dtype, use_generation_config)
    if place.is_file() and place.suffix == ".gguf":
        return _open_gguf(place, dtype)
    raise CheckpointError(f"no model at {str(path)!r} (it is another kind of file); give {CHOICES}")


def _open_folder(folder: Path, dtype: str, use_generation_config: bool) -> OpenedCheckpoint:
    config = dataclasses.replace(config_from_hf(read_json_object(folder / "config.json")), dtype=dtype)
    generation_config, generation_eos = _read_generation_config(folder, use_generation_config)
    tensors = open_safetensors(folder)
    weight_map = make_weight_map(config, _leaf_shapes(config), "hf")
    check_tensors(weight_map, tensors.shapes, "hf", str(folder))
    return OpenedCheckpoint(
        config=dataclasses.replace(
            config, checkpoint_dtype=tensors.dtype_name(weight_map.leaves[".embedding"][0].name)
        ),
        generation_config=generation_config,
        eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *generation_eos))),
        tokenizer_source=folder if (folder / "tokenizer.json").is_file() else None,
        path=folder,
        weight_map=weight_map,
        tensors=tensors,
    )


def _read_generation_config(folder: Path, use_defaults: bool) -> tuple[dict[str, object], list[int]]:
    """Returns the sampling defaults, empty where they are not wanted, and the end-of-sequence ids."""
    path = folder / GENERATION_CONFIG_NAME
    values = read_json_object(path) if path.exists() else {}
    eos_token_ids = ConfigFields(values, GENERATION_CONFIG_NAME).token_ids("eos_token_id")
    return read_sampling_defaults(values) if use_defaults else {}, list(eos_token_ids)


def _open_orbax(folder: Path, dtype: str, use_generation_config: bool) -> OpenedCheckpoint:
    tensors = open_checkpoint_folder(folder)
    config = dataclasses.replace(tensors.config, dtype=dtype, checkpoint_dtype=tensors.config.dtype)
    generation_config, generation_eos = _read_generation_config(folder, use_generation_config)
    leaves = {
        name: (Source(name, "whole", shape, is_transposed=name.endswith(".weight")),)
        for name, shape in tensors.shapes.items()
    }
    return OpenedCheckpoint(
        config=config,
        generation_config=generation_config,
        eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *generation_eos))),
        tokenizer_source=folder if (folder / "tokenizer.json").is_file() else None,
        path=folder,
        weight_map=WeightMap(config, leaves, is_interleaved=False),
        tensors=tensors,
    )


def _fill_or_restore(
    opened: OpenedCheckpoint,
    quantization: QuantizationConfig | None,
    on_tensor: OnTensor | None,
    on_rounded: OnRounded | None,
) -> Params:
    """Returns the parameters; those of an Orbax checkpoint are restored as they were saved, if that is asked for."""
    tensors = opened.tensors
    if isinstance(tensors, OrbaxCheckpoint):
        check_arrays(tensors)
    if not isinstance(tensors, OrbaxCheckpoint) or opened.config.quantization != quantization:
        return fill_params(
            opened.weight_map, tensors, quantization=quantization, on_tensor=on_tensor, on_rounded=on_rounded
        )
    params = load_params(tensors, opened.config)
    if on_tensor is not None:
        total_bytes = sum(tensors.num_bytes(name) for name in tensors.shapes)
        on_tensor(PARAMS_NAME, total_bytes, total_bytes)
    return params


def _open_gguf(path: Path, dtype: str) -> OpenedCheckpoint:
    from photon_jax.checkpoint.gguf_io import open_gguf

    tensors = open_gguf(path)
    shapes = tensors.shapes
    rope_factors = tensors.read(_ROPE_FACTORS_NAME) if _ROPE_FACTORS_NAME in shapes else None
    read_config = config_from_gguf(tensors.fields, tensor_names=shapes.keys(), rope_factors=rope_factors)
    config = dataclasses.replace(read_config, dtype=dtype)
    # only converters to the "llama" architecture reorder the rows of queries and keys
    is_interleaved = tensors.fields["general.architecture"] == "llama"
    weight_map = make_weight_map(config, _leaf_shapes(config), "gguf", is_interleaved=is_interleaved)
    check_tensors(weight_map, shapes, "gguf", str(path))
    return OpenedCheckpoint(
        config=config,
        generation_config={},
        eos_token_ids=config.eos_token_ids,
        tokenizer_source=dict(tensors.fields) if "tokenizer.ggml.tokens" in tensors.fields else None,
        path=path,
        weight_map=weight_map,
        tensors=tensors,
    )


def _leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in leaves}
