"""Where a model lies: a path of this machine, or a Hugging Face id that huggingface_hub's cache holds or fetches."""

import re
from pathlib import Path

from photon_jax.errors import CheckpointError, ConfigError

CHOICES = (
    "'demo', a folder with config.json and safetensors, or a .gguf file, a folder that photon-convert wrote, "
    "or a Hugging Face id (org/name or org/name@revision)"
)
# "org/name" or "org/name@revision", by the hub's own rules for names
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
# fnmatch's * crosses folders: what lies in one is left out, but for the extra chat templates
_WANTED = ("*.json", "model*.safetensors", "*.jinja")
_UNWANTED = ("*/*.json", "*/*.safetensors", "onnx/*", "original/*")


def find_model(name: str | Path, *, cache_dir: Path | None = None) -> Path:
    """Returns the file or folder of a model.

    A path that exists is taken, `~` is the home folder. Otherwise "org/name" or "org/name@revision", where a revision
    is a branch, a tag or a commit, names a model of the Hugging Face hub: its configuration, tokenizer and safetensors
    are fetched into the hub's cache when they are not there. With no network, or HF_HUB_OFFLINE=1, the cache serves.

    Args:
      name: a path or an id.
      cache_dir: of the hub; None is its own default, which HF_HUB_CACHE and HF_HOME move.

    Raises:
      CheckpointError: nothing is there, or it can't be fetched.
      ConfigError: huggingface_hub is not installed.
    """
    if not str(name):
        raise CheckpointError(f"the model's name is empty; give {CHOICES}")
    path = Path(name).expanduser()
    if path.exists():
        return path
    match = _HUB_ID.fullmatch(str(name))
    if match is None:
        raise CheckpointError(
            f"no model at {str(name)!r}: {path.absolute()} doesn't exist, and it is no Hugging Face id; give {CHOICES}"
        )
    return _fetch(match["repo"], match["revision"], path, cache_dir)


def _fetch(repo: str, revision: str | None, path: Path, cache_dir: Path | None) -> Path:
    try:
        # here, for a local model needs neither the package nor the time that its import takes
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ConfigError(
            f"{path.absolute()} doesn't exist, and to look for {repo!r} on the Hugging Face hub the package "
            "huggingface_hub is needed: pip install huggingface_hub"
        ) from error
    # the hub's own errors, and that of its HTTP library, which a connection that fails may raise as it is
    expected: tuple[type[Exception], ...] = (ValueError, OSError, *HfHubHTTPError.__bases__)
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    except expected as error:
        raise CheckpointError(
            f"no model {repo!r}{f' at revision {revision!r}' if revision else ''}: {path.absolute()} doesn't exist, "
            f"and the Hugging Face hub gave {type(error).__name__}: {_first_line(error)}; check the name, the network "
            "and, for a model behind a licence, `hf auth login`"
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
