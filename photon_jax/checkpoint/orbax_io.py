"""Orbax checkpoints: parameters of any of our types, and all that is needed to serve them, in one folder.

    FOLDER/photon_checkpoint.json   model configuration, which gives the tree of the parameters; sizes and
                                    checksums of the files
    FOLDER/params/                  the arrays, written by Orbax
    FOLDER/generation_config.json, tokenizer.json, ...   as in Hugging Face's layout, those that there are

A save writes into a temporary folder beside the target and renames it when it is whole; photon_checkpoint.json is
written last. Orbax is used through its stable handlers; its second interface is still named experimental.
"""

import concurrent.futures
import dataclasses
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.checkpoint.safetensors_io import read_json_object
from photon_jax.errors import CheckpointError
from photon_jax.models.check_params import check_params
from photon_jax.models.config import ModelConfig, QuantizationConfig, RopeConfig
from photon_jax.models.params import Params, abstract_params

METADATA_NAME = "photon_checkpoint.json"
PARAMS_NAME = "params"
_FORMAT = 1
# What Orbax and TensorStore raise on damaged files.
_RESTORE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OSError, RuntimeError)
_MIN_BYTES_IN_FLIGHT = 256 << 20
_CHECKED_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class OrbaxCheckpoint:
    """A folder of this layout whose description was read, and no array yet. A leaf is named by its key path.

    Attributes:
      path: of the folder.
      config: of the model, as it was saved.
      checksums: file -> CRC-32 that it was saved with.
    """

    path: Path
    config: ModelConfig
    checksums: Mapping[str, int]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Leaf -> shape, outputs first as the tensors of other checkpoints have them."""
        return {name: leaf.shape[::-1] if _is_weight(name) else leaf.shape for name, leaf in self._leaves.items()}

    def num_bytes(self, name: str) -> int:
        """Returns the bytes of one leaf."""
        return _num_bytes(self._leaves[name])

    def dtype_name(self, name: str) -> str:
        """Returns the dtype of one leaf as it was saved."""
        return str(self._leaves[name].dtype)

    def read(self, name: str) -> np.ndarray:
        """Returns one leaf, outputs first."""
        import orbax.checkpoint as ocp

        only = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if jax.tree_util.keystr(path) == name else ocp.PLACEHOLDER,
            abstract_params(self.config),
        )
        restored = jax.tree_util.tree_flatten_with_path(restore_params(self.path, only))[0]
        array = np.asarray(next(leaf for path, leaf in restored if jax.tree_util.keystr(path) == name))
        return array.T if _is_weight(name) else array

    def read_q8_0(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Raises CheckpointError: this format has no such tensors."""
        raise CheckpointError(f"{self.path}: {name} isn't Q8_0")

    @property
    def _leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_params(self.config))
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def save_checkpoint(
    folder: str | Path,
    params: Params,
    config: ModelConfig,
    *,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes parameters and what belongs to them; the folder appears whole or not at all.

    Arrays may lie on any devices, sharded or not. Beside them the host holds 256 MiB, or two leaves if those are more.

    Args:
      folder: to be made; its parents are made too.
      params: the tree that `abstract_params(config)` describes, quantized or not.
      config: of the model.
      files: name -> content of what else belongs there: generation_config.json, tokenizer.json and the like.
      overwrite: whether to replace a checkpoint of this layout that the folder holds.

    Raises:
      CheckpointError: the folder exists and may not be replaced, or can't be written; or params don't fit config.
    """
    check_params(params, abstract_params(config))
    target = Path(folder).expanduser().resolve()
    check_target(target, overwrite=overwrite)
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        scratch.mkdir(parents=True)
        _write(scratch, params, config, files or {})
        _move_into_place(scratch, target)
    except OSError as error:
        raise CheckpointError(f"the checkpoint can't be written to {target}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Raises CheckpointError if a checkpoint must not be written there."""
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if not folder.exists() or is_empty:
        return
    if not is_checkpoint(folder):
        raise CheckpointError(f"{folder} exists and is no checkpoint of photon_jax; it isn't replaced, choose another")
    if not overwrite:
        raise CheckpointError(f"{folder} holds a checkpoint; set overwrite to replace it, or choose another folder")


def is_checkpoint(folder: Path) -> bool:
    """Returns whether the folder holds a whole checkpoint of this layout."""
    return (folder / METADATA_NAME).is_file()


def open_checkpoint_folder(folder: Path) -> OrbaxCheckpoint:
    """Returns what a folder says about itself.

    Raises:
      CheckpointError: it is of another layout, or a file is missing, damaged or of another size than it was saved in.
    """
    path = folder / METADATA_NAME
    metadata = read_json_object(path)
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {metadata.get('format')!r}; this release reads {_FORMAT}")
    config = _config_from_json(metadata.get("config"), path)
    files = metadata.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path}: files must map file names to sizes and checksums")
    for name, entry in files.items():
        if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(number, int) for number in entry)):
            raise CheckpointError(f"{path}: files must map file names to sizes and checksums, got {entry!r:.100}")
        num_bytes = entry[0]
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != num_bytes:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{folder / name} {state}, {num_bytes} were saved; the checkpoint is damaged")
    if metadata.pop("checksum", None) != _description_checksum(metadata):
        raise CheckpointError(f"{path} holds another description than was saved: it is damaged")
    return OrbaxCheckpoint(folder, config, {name: checksum for name, (_, checksum) in files.items()})


def check_arrays(checkpoint: OrbaxCheckpoint) -> None:
    """Raises CheckpointError unless the arrays' files hold what was saved; several are read at once.

    To be called before arrays are read: when one of them fails, the restore leaves the reads of the others behind,
    and they were seen to end the process.
    """
    names = [name for name in checkpoint.checksums if name.startswith(f"{PARAMS_NAME}/")]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = dict(zip(names, pool.map(_checksum, (checkpoint.path / name for name in names)), strict=True))
    wrong = [name for name in names if found[name] != checkpoint.checksums[name]]
    if wrong:
        raise CheckpointError(f"{checkpoint.path / wrong[0]} holds other bytes than were saved: it is damaged")


def _description_checksum(metadata: Mapping[str, object]) -> int:
    """Returns the CRC-32 of what photon_checkpoint.json says; its own entry is left out."""
    return zlib.crc32(json.dumps(metadata, sort_keys=True).encode())


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHECKED_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def load_params(checkpoint: OrbaxCheckpoint, config: ModelConfig) -> Params:
    """Returns the parameters on the default device.

    Args:
      config: as saved, maybe with another dtype.

    Raises:
      CheckpointError: some are NaN or infinite, or become so in that dtype.
    """
    params = restore_params(checkpoint.path, abstract_params(config))
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not jnp.isfinite(leaf).all():
            name = jax.tree_util.keystr(path)
            raise CheckpointError(
                f"{checkpoint.path}: {name} has elements that are NaN or infinite in {leaf.dtype}, it was saved as "
                f"{checkpoint.dtype_name(name)}; its training diverged, or the range of {leaf.dtype} is too small"
            )
    return params


def restore_params(folder: Path, abstract: Params) -> Params:
    """Returns the parameters of a checkpoint, as an abstract tree asks for them.

    Each shard is read by itself and goes to its device; beside the arrays the host holds 256 MiB, or two leaves if
    those are more.

    Args:
      folder: of the checkpoint.
      abstract: a tree of `jax.ShapeDtypeStruct` of the structure and shapes that were saved. A leaf may have another
        dtype, which it is cast to, and a sharding over any devices; without one it goes to the default device.
        A leaf that is `orbax.checkpoint.PLACEHOLDER` is not read, and stays.
    """
    import orbax.checkpoint as ocp

    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def place(leaf: Any) -> Any:
        if leaf is ocp.PLACEHOLDER:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default)

    placed = jax.tree.map(place, abstract)
    arguments = ocp.args.PyTreeRestore(item=placed, restore_args=ocp.checkpoint_utils.construct_restore_args(placed))
    try:
        with ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_gigabytes_in_flight(placed))
        ) as restorer:
            params: Params = restorer.restore((folder / PARAMS_NAME).absolute(), args=arguments)
    except _RESTORE_ERRORS as error:
        raise CheckpointError(
            f"{folder / PARAMS_NAME} can't be restored: {error}; the checkpoint is damaged"
        ) from error
    return params


def _write(folder: Path, params: Params, config: ModelConfig, files: Mapping[str, bytes]) -> None:
    import orbax.checkpoint as ocp

    # uncompressed: twice as fast to save and to load (measured), and trained weights hardly shrink
    handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=_gigabytes_in_flight(params), use_compression=False)
    with ocp.Checkpointer(handler) as saver:
        saver.save(folder / PARAMS_NAME, args=ocp.args.PyTreeSave(params))
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    metadata = {
        "format": _FORMAT,
        "config": dataclasses.asdict(config),
        "files": {path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in written},
    }
    metadata["checksum"] = _description_checksum(metadata)
    (folder / METADATA_NAME).write_text(json.dumps(metadata, indent=1), encoding="utf-8")


def _move_into_place(scratch: Path, target: Path) -> None:
    """Renames; what is replaced is set aside first, so that at each moment one of the two is whole."""
    aside = scratch.with_suffix(".old")
    if target.exists():
        os.rename(target, aside)
    os.rename(scratch, target)
    shutil.rmtree(aside, ignore_errors=True)


def _gigabytes_in_flight(tree: Params) -> float:
    """Returns the limit that Orbax is given, in its unit; it must be above the bytes of the largest leaf."""
    import orbax.checkpoint as ocp

    largest = max(_num_bytes(leaf) for leaf in jax.tree.leaves(tree) if leaf is not ocp.PLACEHOLDER)
    return max(2 * largest, _MIN_BYTES_IN_FLIGHT) / 1e9


def _is_weight(name: str) -> bool:
    """Returns whether a leaf is the weight of a dense linear, which is kept inputs first."""
    return name.endswith(".weight")


def _num_bytes(leaf: Any) -> int:
    return int(leaf.size * leaf.dtype.itemsize)


def _config_from_json(value: object, path: Path) -> ModelConfig:
    try:
        fields: dict[str, Any] = dict(value)  # type: ignore[call-overload]
        fields["rope"] = RopeConfig(**fields["rope"])
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        if fields["quantization"] is not None:
            fields["quantization"] = QuantizationConfig(**fields["quantization"])
        return ModelConfig(**fields)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: config doesn't describe a model of this release: {error!r}") from error
