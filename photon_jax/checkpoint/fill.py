"""Filling: the tensors of a checkpoint -> Params on the default device, one leaf at a time, int8 where asked for."""

import collections
import functools
import logging
import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from photon_jax.checkpoint.finite import check_finite, is_finite
from photon_jax.checkpoint.weight_map import Source, WeightMap
from photon_jax.errors import CheckpointError
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import Params, abstract_params
from photon_jax.quantization.int8 import QuantizedLinear, num_groups, quantize_int8

OnTensor = Callable[[str, int, int], None]
OnRounded = Callable[[str, np.ndarray, QuantizedLinear], None]

FILE_GROUP_SIZE = 32  # inputs per scale of the int8 tensors that a GGUF file can hold
CHUNK_ELEMENTS = 1 << 22  # weights that are in float32 on the device at once


class TensorSource(Protocol):
    """The tensors of a checkpoint by name, read one at a time."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape."""

    def num_bytes(self, name: str) -> int:
        """Returns the bytes of one tensor in its file."""

    def dtype_name(self, name: str) -> str:
        """Returns the dtype, or the kind of quantization, of one tensor in its file."""

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor, dequantized."""

    def read_q8_0(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns int8[O I] and scales f16[O I/32] of a tensor whose dtype_name is Q8_0."""


def fill_params(
    weight_map: WeightMap,
    tensors: TensorSource,
    *,
    quantization: QuantizationConfig | None = None,
    on_tensor: OnTensor | None = None,
    on_rounded: OnRounded | None = None,
) -> Params:
    """Returns the parameters; each leaf goes to the default device once complete, and the host keeps no copy.

    An int8 leaf is rounded on the device from float32 rows, some at a time, so that its dense form is never there
    whole. Q8_0 tensors of a GGUF file are taken as they are when the groups are theirs; other tensors are dequantized.

    Args:
      weight_map: of the dense parameters.
      tensors: where they are read from.
      quantization: of the parameters to return.
      on_tensor: called after each tensor with its name, the bytes read so far and the bytes in all.
      on_rounded: called after each leaf that was rounded with its name as `matrix_names` has it, the weights f32[O I]
        that it was rounded from, and what they became. Nobody else keeps the weights.

    Raises:
      CheckpointError: a tensor can't be read, or holds what the parameters can't.
      ConfigError: a group of the quantization is larger than a layer's inputs.
    """
    target = abstract_params(weight_map.config.with_quantization(quantization))
    reader = _Reader(weight_map, tensors, on_tensor)
    arrays: dict[str, jax.Array] = {}
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(abstract_params(weight_map.config))[0]:
        path = jax.tree_util.keystr(key_path)
        if quantization is None or not _is_quantized(path, quantization):
            arrays[path] = reader.read_dense(path, leaf.shape, leaf.dtype)
        else:
            is_transposed = path.endswith(".weight")
            shape = leaf.shape[::-1] if is_transposed else leaf.shape
            stem = path.removesuffix(".weight")
            rounded = reader.read_int8(path, shape, quantization.group_size, on_rounded)
            arrays[f"{stem}.q"], arrays[f"{stem}.scale"] = rounded.q, rounded.scale
    reader.report_dequantized()
    paths, tree = jax.tree_util.tree_flatten_with_path(target)
    params: Params = jax.tree.unflatten(tree, [arrays[jax.tree_util.keystr(path)] for path, _ in paths])
    return params


def _is_quantized(path: str, quantization: QuantizationConfig) -> bool:
    """Returns whether a leaf of the dense parameters is a weight that becomes int8."""
    return path.endswith(".weight") or (quantization.has_embedding and path in (".embedding", ".lm_head"))


class _Reader:
    """Reads the tensors of one leaf after the other, and counts."""

    def __init__(self, weight_map: WeightMap, tensors: TensorSource, on_tensor: OnTensor | None) -> None:
        self._map = weight_map
        self._tensors = tensors
        self._on_tensor = on_tensor
        names = [source.name for sources in weight_map.leaves.values() for source in sources]
        self._total_bytes = sum(tensors.num_bytes(name) for name in names)
        self._done_bytes = 0
        self._dequantized: collections.Counter[str] = collections.Counter()

    def read_dense(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """Returns a leaf in its dtype."""
        buffer = _aligned_empty(shape, dtype)
        self._place_floats(path, buffer)
        _check_range(buffer, path)
        return _to_device(buffer)

    def read_int8(
        self, path: str, shape: tuple[int, int], group_size: int, on_rounded: OnRounded | None
    ) -> QuantizedLinear:
        """Returns a leaf without its bias."""
        sources = self._map.leaves[path]
        kinds = [self._tensors.dtype_name(source.name) for source in sources]
        if group_size == FILE_GROUP_SIZE and set(kinds) == {"Q8_0"}:
            q, scale = self._read_stored(sources, shape)
            return QuantizedLinear(q=q, scale=scale, group_size=group_size)
        self._dequantized.update(kind for kind in kinds if not kind.lower().startswith(("f", "bf")))
        rows = _aligned_empty(shape, np.dtype(np.float32))
        self._place_floats(path, rows.T if sources[0].is_transposed else rows)
        q, scale = _quantize_rows(rows, group_size)
        rounded = QuantizedLinear(q=q, scale=scale, group_size=group_size)
        if on_rounded is not None:
            on_rounded(path.removeprefix(".").removesuffix(".weight"), rows, rounded)
        return rounded

    def _read_stored(self, sources: tuple[Source, ...], shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        """Returns values and scales as the file holds them, bit for bit; float32 holds each f16 scale."""
        q = _aligned_empty(shape, np.dtype(np.int8))
        scale = _aligned_empty((shape[0], shape[1] // FILE_GROUP_SIZE), np.dtype(np.float32))
        for source in sources:
            values, scales = self._tensors.read_q8_0(source.name)
            check_finite(source.name, scales)
            for buffer, part in ((q, values), (scale, scales)):
                self._map.place(buffer.T if source.is_transposed else buffer, source, part)
            self._count(source)
        return _to_device(q), _to_device(scale)

    def report_dequantized(self) -> None:
        """Says which tensors were quantized in the file and rounded a second time."""
        if self._dequantized:
            kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(self._dequantized.items()))
            logging.warning(
                "int8: tensors that the file holds quantized were dequantized and rounded again: %s "
                "(only Q8_0 with group_size=32 is taken as it is)",
                kinds,
            )

    def _place_floats(self, path: str, buffer: np.ndarray) -> None:
        for source in self._map.leaves[path]:
            tensor = self._tensors.read(source.name)
            check_finite(source.name, tensor)
            with np.errstate(over="ignore"):  # overflow of float16 is looked for once the leaf is whole
                self._map.place(buffer, source, tensor)
            self._count(source)

    def _count(self, source: Source) -> None:
        self._done_bytes += self._tensors.num_bytes(source.name)
        if self._on_tensor is not None:
            self._on_tensor(source.name, self._done_bytes, self._total_bytes)


def _quantize_rows(
    rows: np.ndarray,  # f32[O I]
    group_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns q and scale on the default device, rounded there some rows at a time."""
    num_outputs, num_inputs = rows.shape
    size = min(num_outputs, max(1, CHUNK_ELEMENTS // num_inputs))
    q = jnp.zeros((num_outputs, num_inputs), jnp.int8)
    scale = jnp.zeros((num_outputs, num_groups(num_inputs, group_size)), jnp.float32)
    for start in range(0, num_outputs, size):
        start = min(start, num_outputs - size)  # the last chunk may repeat some rows
        chunk = _to_device(rows[start : start + size])
        q, scale = _quantize_into(q, scale, chunk, jnp.int32(start), group_size=group_size)
        q.block_until_ready()
    return q, scale


@functools.partial(jax.jit, static_argnames=("group_size",), donate_argnums=(0, 1))
def _quantize_into(
    q: jax.Array, scale: jax.Array, chunk: jax.Array, start: jax.Array, *, group_size: int
) -> tuple[jax.Array, jax.Array]:
    part = quantize_int8(chunk, group_size=group_size)
    return (
        lax.dynamic_update_slice_in_dim(q, part.q, start, 0),
        lax.dynamic_update_slice_in_dim(scale, part.scale, start, 0),
    )


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
    if buffer.dtype == np.float16 and not is_finite(buffer):
        raise CheckpointError(f"weights of {leaf_path} exceed the range of float16; load them as bfloat16 or float32")
