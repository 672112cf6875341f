"""GGUF files through the gguf package: metadata fields, and each tensor dequantized by name."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import gguf
import numpy as np

from photon_jax.errors import CheckpointError

_PLAIN_DTYPES = {
    gguf.GGMLQuantizationType.F64: np.float64,
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
}


@dataclasses.dataclass(frozen=True, slots=True)
class _StoredTensor:
    shape: tuple[int, ...]  # rows first, as in NumPy
    type: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class _TensorReader(gguf.GGUFReader):
    """The package's reader, with the tensors located and checked but not mapped."""

    stored: dict[str, _StoredTensor]

    def _build_fields(self, offs: int, count: int) -> int:
        # a vocabulary is a hundred thousand small slices, and a slice of a plain array costs half of a memmap's
        self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
        return super()._build_fields(offs, count)

    def _get(
        self,
        offset: int,
        dtype: np.typing.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> np.ndarray:
        found: np.ndarray = super()._get(offset, dtype, count, override_order)
        # past the end the package reads nothing, and goes on for as many elements as a damaged length claims
        if len(found) != count:
            raise CheckpointError(f"the header goes on past the end of the file, byte {len(self.data)}: fetch it again")
        return found

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        self.stored = {}
        for field in fields:
            _, name_data, _, dims, raw_type, offset = field.parts
            name = bytes(name_data).decode("utf-8")
            if name in self.stored:
                raise CheckpointError(f"tensor {name} is listed twice")
            shape = tuple(int(size) for size in reversed(dims.tolist()))
            self.stored[name] = _locate(name, shape, int(raw_type[0]), int(start_offs) + int(offset[0]), len(self.data))


def _locate(name: str, shape: tuple[int, ...], raw_type: int, offset: int, file_bytes: int) -> _StoredTensor:
    try:
        kind = gguf.GGMLQuantizationType(raw_type)
    except ValueError as error:
        raise CheckpointError(f"tensor {name} has type {raw_type}, which is unknown") from error
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block_size:
        raise CheckpointError(f"tensor {name}: rows of {shape[-1]} are no multiple of {kind.name}'s {block_size}")
    num_bytes = math.prod(shape) // block_size * block_bytes
    if offset + num_bytes > file_bytes:
        raise CheckpointError(
            f"tensor {name} ends at byte {offset + num_bytes}, the file at {file_bytes}: truncated, fetch it again"
        )
    return _StoredTensor(shape, kind, offset, num_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """One GGUF file: its fields, and its tensors by name.

    Attributes:
      path: of the file.
      fields: metadata, numbers and strings as Python values, arrays as lists.
    """

    path: Path
    fields: Mapping[str, object]
    _tensors: Mapping[str, _StoredTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape, outputs first."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def num_bytes(self, name: str) -> int:
        """Returns the bytes of one tensor in the file."""
        return self._tensors[name].num_bytes

    def dtype_name(self, name: str) -> str:
        """Returns the type of one tensor as GGUF writes it, such as Q4_1."""
        return self._tensors[name].type.name

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor dequantized: f16 and f32 as they are, everything else as f32.

        Raises:
          CheckpointError: the gguf package can't dequantize the type.
        """
        tensor, raw = self._tensors[name], self._map(name)
        plain = _PLAIN_DTYPES.get(tensor.type)
        if plain is not None:
            return raw.view(plain).reshape(tensor.shape)
        try:
            rows = raw.reshape(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.type))
            with np.errstate(all="ignore"):  # a damaged scale: whoever loads looks for what isn't finite
                values: np.ndarray = gguf.dequantize(rows, tensor.type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} has type {tensor.type.name}, which can't be dequantized; "
                "use a file in F16, BF16, Q8_0, Q4_0 or Q4_1"
            ) from error
        return values.reshape(tensor.shape)

    def read_q8_0(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns int8[O I] and scales f16[O I/32] of a Q8_0 tensor: blocks of a scale and 32 values in the file."""
        num_outputs, num_inputs = self._tensors[name].shape
        blocks = self._map(name).reshape(num_outputs, num_inputs // 32, 34)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).squeeze(2)
        return blocks[:, :, 2:].reshape(num_outputs, num_inputs).view(np.int8), scales

    def _map(self, name: str) -> np.ndarray:
        """Returns the bytes of one tensor, mapped from the file."""
        tensor = self._tensors[name]
        try:
            return np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=tensor.num_bytes)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} can't be read: {error}") from error


def open_gguf(path: Path) -> GgufCheckpoint:
    """Returns the fields and the tensor table of a GGUF file.

    Raises:
      CheckpointError: the file is missing, damaged, of the other byte order, or has a tensor of unknown type.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or isn't a file")
    try:
        reader = _TensorReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} isn't a whole GGUF file: {error}; fetch it again") from error
    if reader.byte_order == "S":
        raise CheckpointError(f"{path} has the byte order of another machine; convert it first")
    if fields.get("split.count") not in (None, 0, 1):
        raise CheckpointError(
            f"{path} is one of {fields['split.count']} parts of a model; merge them into one file first"
        )
    return GgufCheckpoint(path, fields, reader.stored)


def read_fields(path: Path) -> dict[str, object]:
    """Returns the metadata of a GGUF file: numbers and strings as Python values, arrays as lists.

    Raises:
      CheckpointError: the file is missing or damaged.
    """
    return dict(open_gguf(path).fields)
