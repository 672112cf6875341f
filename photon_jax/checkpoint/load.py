"""Loading: a checkpoint on disk -> Params on the device, with what else it says about the model."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from photon_jax.checkpoint.demo import demo_model_path
from photon_jax.checkpoint.gguf_io import GgufCheckpoint, open_gguf
from photon_jax.checkpoint.safetensors_io import SafetensorsCheckpoint, open_safetensors, read_json_object
from photon_jax.checkpoint.weight_map import WeightMap, check_tensors, make_weight_map
from photon_jax.errors import CheckpointError
from photon_jax.models.config import ModelConfig
from photon_jax.models.config_fields import ConfigFields
from photon_jax.models.gguf_config import config_from_gguf
from photon_jax.models.hf_config import config_from_hf
from photon_jax.models.params import Params, abstract_params, num_bytes

DEMO_NAME = "demo"
_ROPE_FACTORS_NAME = "rope_freqs.weight"

OnTensor = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """A model ready to run.

    Attributes:
      params: on the default device.
      config: with the dtype of `params`.
      generation_config: the checkpoint's sampling defaults, empty when it has none.
      eos_token_ids: of the configuration and the generation config together.
      tokenizer_source: the folder that holds tokenizer.json, the fields of a GGUF file, or None for neither.
      path: what was loaded.
      num_bytes: of `params`.
    """

    params: Params
    config: ModelConfig
    generation_config: Mapping[str, object]
    eos_token_ids: tuple[int, ...]
    tokenizer_source: Path | dict[str, object] | None
    path: Path
    num_bytes: int


class _TensorSource(Protocol):
    def num_bytes(self, name: str) -> int: ...

    def read(self, name: str) -> np.ndarray: ...


def load_checkpoint(path: str | Path, *, dtype: str, on_tensor: OnTensor | None = None) -> LoadedCheckpoint:
    """Reads a checkpoint leaf by leaf; each goes to the default device once complete, and the host keeps no copy.

    Args:
      path: "demo", a folder with config.json and safetensors, or a .gguf file.
      dtype: of the parameters: "float32", "bfloat16" or "float16".
      on_tensor: called after each tensor with its name, the bytes read so far and the bytes in all.

    Raises:
      CheckpointError: the checkpoint is missing, damaged, incomplete, or of a kind that isn't supported.
    """
    place = demo_model_path() if path == DEMO_NAME else Path(path)
    if place.is_dir():
        return _load_folder(place, dtype, on_tensor)
    if place.is_file() and place.suffix == ".gguf":
        return _load_gguf(place, dtype, on_tensor)
    found = "it doesn't exist" if not place.exists() else "it is another kind of file"
    raise CheckpointError(
        f"no model at {str(path)!r} ({found}); give {DEMO_NAME!r}, a folder with config.json and safetensors, "
        "or a .gguf file"
    )


def _load_folder(folder: Path, dtype: str, on_tensor: OnTensor | None) -> LoadedCheckpoint:
    config = dataclasses.replace(config_from_hf(read_json_object(folder / "config.json")), dtype=dtype)
    generation_path = folder / "generation_config.json"
    generation_config = read_json_object(generation_path) if generation_path.exists() else {}
    generation_eos = ConfigFields(generation_config, generation_path.name).token_ids("eos_token_id")
    tensors: SafetensorsCheckpoint = open_safetensors(folder)
    weight_map = make_weight_map(config, _leaf_shapes(config), "hf")
    check_tensors(weight_map, tensors.shapes, "hf", str(folder))
    config = dataclasses.replace(config, checkpoint_dtype=tensors.dtype_name(weight_map.leaves[".embedding"][0].name))
    params = _fill_params(weight_map, tensors, on_tensor)
    return LoadedCheckpoint(
        params=params,
        config=config,
        generation_config=generation_config,
        eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *generation_eos))),
        tokenizer_source=folder if (folder / "tokenizer.json").is_file() else None,
        path=folder,
        num_bytes=num_bytes(params),
    )


def _load_gguf(path: Path, dtype: str, on_tensor: OnTensor | None) -> LoadedCheckpoint:
    tensors: GgufCheckpoint = open_gguf(path)
    shapes = tensors.shapes
    rope_factors = tensors.read(_ROPE_FACTORS_NAME) if _ROPE_FACTORS_NAME in shapes else None
    read_config = config_from_gguf(tensors.fields, tensor_names=shapes.keys(), rope_factors=rope_factors)
    config = dataclasses.replace(read_config, dtype=dtype)
    # only converters to the "llama" architecture reorder the rows of queries and keys
    is_interleaved = tensors.fields["general.architecture"] == "llama"
    weight_map = make_weight_map(config, _leaf_shapes(config), "gguf", is_interleaved=is_interleaved)
    check_tensors(weight_map, shapes, "gguf", str(path))
    params = _fill_params(weight_map, tensors, on_tensor)
    return LoadedCheckpoint(
        params=params,
        config=config,
        generation_config={},
        eos_token_ids=config.eos_token_ids,
        tokenizer_source=dict(tensors.fields) if "tokenizer.ggml.tokens" in tensors.fields else None,
        path=path,
        num_bytes=num_bytes(params),
    )


def _leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in leaves}


def _fill_params(weight_map: WeightMap, tensors: _TensorSource, on_tensor: OnTensor | None) -> Params:
    abstract = abstract_params(weight_map.config)
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    names = [source.name for sources in weight_map.leaves.values() for source in sources]
    total_bytes = sum(tensors.num_bytes(name) for name in names)
    done_bytes = 0
    arrays = []
    for path, leaf in leaves:
        buffer = _aligned_empty(leaf.shape, leaf.dtype)
        for source in weight_map.leaves[jax.tree_util.keystr(path)]:
            with np.errstate(over="ignore"):  # overflow of float16 is looked for once the leaf is whole
                weight_map.place(buffer, source, tensors.read(source.name))
            done_bytes += tensors.num_bytes(source.name)
            if on_tensor is not None:
                on_tensor(source.name, done_bytes, total_bytes)
        _check_range(buffer, jax.tree_util.keystr(path))
        arrays.append(_to_device(buffer))
    params: Params = jax.tree.unflatten(tree, arrays)
    return params


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns host memory that starts at a multiple of 64 bytes, which a CPU device takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _to_device(buffer: np.ndarray) -> jax.Array:
    """Returns the leaf on the default device; waits, so that at most one leaf is on its way."""
    array: jax.Array = jax.device_put(buffer, may_alias=True)
    array.block_until_ready()
    return array


def _check_range(buffer: np.ndarray, leaf_path: str) -> None:
    if buffer.dtype == np.float16 and not np.isfinite(buffer).all():
        raise CheckpointError(f"weights of {leaf_path} exceed the range of float16; load them as bfloat16 or float32")
