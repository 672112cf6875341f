"""Safetensors files: which tensors a folder holds, and each read by name. Nothing stays mapped between two reads."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from photon_jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass(frozen=True, slots=True)
class SafetensorsCheckpoint:
    """The tensors of one file or of the shards that an index lists.

    Attributes:
      files: tensor name -> the file that holds it.
      shapes: tensor name -> its shape.
      dtypes: tensor name -> its dtype, as safetensors writes it ("BF16").
    """

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def num_bytes(self, name: str) -> int:
        """Returns the bytes of one tensor in the file; 0 for a dtype that can't be read."""
        elements = 1
        for size in self.shapes[name]:
            elements *= size
        return elements * _ITEM_BYTES.get(self.dtypes[name], 0)

    def dtype_name(self, name: str) -> str:
        """Returns the dtype of one tensor as NumPy writes it."""
        return _DTYPE_NAMES.get(self.dtypes[name], self.dtypes[name])

    def read(self, name: str) -> np.ndarray:
        """Returns a copy of one tensor; the file is opened for this read alone, so its pages are let go after.

        Raises:
          CheckpointError: the dtype isn't a float of 16, 32 or 64 bits, or the file can't be read.
        """
        path = self.files[name]
        if self.dtypes[name] not in _ITEM_BYTES:
            raise CheckpointError(
                f"{path}: tensor {name} has dtype {self.dtypes[name]}; supported are {', '.join(_ITEM_BYTES)}"
            )
        try:
            with safe_open(path, framework="numpy") as file:
                tensor: np.ndarray = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name} can't be read: {error}") from error
        return tensor


def open_safetensors(folder: Path) -> SafetensorsCheckpoint:
    """Returns the tensors of a folder. With an index, the index alone says which tensors in which files count.

    Raises:
      CheckpointError: there is no checkpoint, or a file is missing, damaged, or contradicts the index.
    """
    if (folder / INDEX_NAME).is_file():
        weight_map = _read_index(folder / INDEX_NAME)
        files = {name: folder / shard for name, shard in weight_map.items()}
    elif (folder / SINGLE_NAME).is_file():
        files = dict.fromkeys(_describe(folder / SINGLE_NAME), folder / SINGLE_NAME)
    else:
        raise CheckpointError(
            f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}; "
            "checkpoints in other formats must be converted to safetensors first"
        )
    shapes, dtypes = {}, {}
    described = {path: _describe(path) for path in sorted(set(files.values()))}
    for name, path in files.items():
        if name not in described[path]:
            raise CheckpointError(f"{path} has no tensor {name}, though {INDEX_NAME} says so")
        shapes[name], dtypes[name] = described[path][name]
    return SafetensorsCheckpoint(files, shapes, dtypes)


def read_json_object(path: Path) -> dict[str, object]:
    """Returns the object that a JSON file holds.

    Raises:
      CheckpointError: the file is missing, isn't JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
    except ValueError as error:  # JSON or UTF-8
        raise CheckpointError(f"{path} isn't valid JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} isn't a usable JSON file: it nests too deep") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must map tensor names to files")
    for name, shard in weight_map.items():
        # a shard is a plain file name: an index must not reach outside its own folder
        if not isinstance(shard, str) or shard in ("", ".", "..") or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(f"{path}: tensor {name} is in {shard!r}, which isn't a file name in the same folder")
    return weight_map


def _describe(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns shape and dtype of each tensor from the file's header, which is checked against the file's size."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {INDEX_NAME} lists it")
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} isn't a whole safetensors file: {error}; fetch it again") from error
