"""Safetensors files: which tensors a folder holds, and each mapped by name for as long as it is used."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from photon_jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies, and what it is."""

    path: Path
    dtype: str  # as safetensors writes it, such as "BF16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class SafetensorsCheckpoint:
    """The tensors of one file, or of the shards that an index lists, by name."""

    tensors: Mapping[str, StoredTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def num_bytes(self, name: str) -> int:
        """Returns the bytes of one tensor in its file."""
        return self.tensors[name].num_bytes

    def dtype_name(self, name: str) -> str:
        """Returns the dtype of one tensor as NumPy writes it."""
        dtype = self.tensors[name].dtype
        return _DTYPES[dtype].name if dtype in _DTYPES else dtype

    def read_q8_0(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Raises CheckpointError: this format has no such tensors."""
        raise CheckpointError(f"{self.tensors[name].path}: tensor {name} isn't Q8_0")

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor mapped from its file; its pages are let go with the array.

        Raises:
          CheckpointError: the dtype isn't a float of 16, 32 or 64 bits, or the file can't be read.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has dtype {tensor.dtype}; supported are {', '.join(_DTYPES)}"
            )
        if tensor.num_bytes == 0:  # can't be mapped
            return np.empty(tensor.shape, _DTYPES[tensor.dtype])
        try:
            raw = np.memmap(tensor.path, np.uint8, "r", offset=tensor.offset, shape=tensor.num_bytes)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{tensor.path}: tensor {name} can't be read: {error}") from error
        return raw.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)


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
    described = {path: _describe(path) for path in sorted(set(files.values()))}
    for name, path in files.items():
        if name not in described[path]:
            raise CheckpointError(f"{path} has no tensor {name}, though {INDEX_NAME} says so")
    return SafetensorsCheckpoint({name: described[path][name] for name, path in files.items()})


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


def _describe(path: Path) -> dict[str, StoredTensor]:
    """Returns what a file holds. The library checks the header against itself and the file's size."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {INDEX_NAME} lists it")
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header: dict[str, dict[str, Any]] = json.loads(file.read(header_bytes))
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} isn't a whole safetensors file: {error}; fetch it again") from error
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            found[name] = StoredTensor(
                path, entry["dtype"], tuple(entry["shape"]), 8 + header_bytes + start, end - start
            )
    return found
