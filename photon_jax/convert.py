"""convert(): a checkpoint of any supported kind into a folder of our own layout, ready to be served from there."""

import sys
from pathlib import Path

from photon_jax.checkpoint.generation_config import FILE_NAME as GENERATION_CONFIG_NAME
from photon_jax.checkpoint.load import LoadedCheckpoint, load_checkpoint, open_checkpoint
from photon_jax.checkpoint.orbax_io import check_target, save_checkpoint
from photon_jax.errors import CheckpointError, ConfigError
from photon_jax.models.config import ModelConfig
from photon_jax.progress import loading_bar
from photon_jax.text.gguf_tokenizer import read_gguf_fields
from photon_jax.text.write_tokenizer import tokenizer_files

_PLAIN_DTYPES = ("float32", "bfloat16", "float16")
# what is copied from a folder in Hugging Face's layout: all that the tokenizer and the sampling defaults are read from
_COPIED = (
    *(GENERATION_CONFIG_NAME, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)


def convert(
    model: str | Path,
    folder: str | Path,
    *,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: bool = True,
) -> LoadedCheckpoint:
    """Writes a checkpoint that `LLM(folder)` loads, with nothing else needed; returns what it holds.

    Args:
      model: what `LLM` loads: "demo", a folder, a GGUF file, or a Hugging Face id.
      folder: to be made.
      dtype: of the weights; "auto" is the checkpoint's own, float32 where it holds another kind.
      overwrite: whether to replace a checkpoint of ours that the folder holds.
      progress: whether to show what is going on, on standard error.

    Raises:
      CheckpointError: the checkpoint can't be used, or the folder exists and may not be replaced.
      ConfigError: the model or the folder is neither a string nor a Path.
    """
    for name, value in (("model", model), ("folder", folder)):
        if not isinstance(value, str | Path):
            raise ConfigError(f"{name} must be a string or a Path, got {value!r:.100}")
    target = Path(folder).expanduser()
    check_target(target, overwrite=overwrite)  # before the long part
    opened = open_checkpoint(model, dtype="float32")
    dtype = plain_dtype(opened.config, dtype)
    files = companion_files(opened.path, opened.tokenizer_source)
    with loading_bar(progress) as on_tensor:
        loaded = load_checkpoint(opened.path, dtype=dtype, on_tensor=on_tensor)
    if progress:
        print(f"writing {loaded.num_bytes / 2**20:.0f} MiB to {target} ...", file=sys.stderr)
    save_checkpoint(target, loaded.params, loaded.config, files=files, overwrite=overwrite)
    return loaded


def plain_dtype(config: ModelConfig, dtype: str) -> str:
    """Returns a dtype with "auto" resolved: the checkpoint's own, float32 where it holds another kind."""
    if dtype != "auto":
        return dtype
    return config.checkpoint_dtype if config.checkpoint_dtype in _PLAIN_DTYPES else "float32"


def companion_files(path: Path, tokenizer_source: Path | dict[str, object] | None) -> dict[str, bytes]:
    """Returns name -> content of the files that go with the weights."""
    if isinstance(tokenizer_source, dict):
        return tokenizer_files(read_gguf_fields(tokenizer_source))
    if not path.is_dir():
        return {}
    found = sorted(file for pattern in _COPIED for file in path.glob(pattern))
    try:
        return {file.relative_to(path).as_posix(): file.read_bytes() for file in found}
    except OSError as error:
        raise CheckpointError(f"{path}: a file can't be read: {error}") from error
