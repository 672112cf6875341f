"""quantize(): a checkpoint into an int8 one that loads without the original, with what that cost in it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from photon_jax.checkpoint.load import LoadedCheckpoint, OpenedCheckpoint, load_checkpoint, open_checkpoint
from photon_jax.checkpoint.orbax_io import check_target, save_checkpoint
from photon_jax.convert import companion_files, plain_dtype
from photon_jax.errors import ConfigError
from photon_jax.models.config import ModelConfig, QuantizationConfig
from photon_jax.models.params import Params, abstract_params
from photon_jax.progress import count_bar, loading_bar
from photon_jax.quantization.calibrate import measure_importance, scale_inputs, search_clip
from photon_jax.quantization.int8 import QuantizedLinear
from photon_jax.quantization.report import (
    REPORT_NAME,
    MatrixError,
    QuantizationReport,
    TextLoss,
    compare_on_text,
    matrix_error,
    matrix_errors,
    text_windows,
)
from photon_jax.quantization.weights import matrix_names, quantize_params
from photon_jax.text.tokenizer import find_tokenizer

CALIBRATION_WINDOW = 512  # tokens that are read together
MAX_CALIBRATION_WINDOWS = 32


def quantize(
    model: str | Path,
    folder: str | Path,
    quantization: QuantizationConfig,
    *,
    calibration_text: str | None = None,
    eval_text: str | None = None,
    eval_window: int = 1024,
    dtype: str = "auto",
    overwrite: bool = False,
    progress: bool = True,
) -> QuantizationReport:
    """Writes an int8 checkpoint that `LLM(folder)` loads, with nothing else needed; returns what it cost.

    Without texts the model is rounded tensor by tensor, and is never whole but as int8. With one it lies on the device
    whole in float32 while it is calibrated and compared.

    Args:
      model: what `LLM` loads, not int8 yet.
      folder: to be made.
      quantization: which weights, and how.
      calibration_text: scales are searched for with it; None rounds to the plain ones.
      eval_text: another text, on which both models are compared.
      eval_window: tokens that are read together of it.
      dtype: of what is not int8; "auto" is the checkpoint's own, float32 where it holds another kind.
      overwrite: whether to replace a checkpoint of ours that the folder holds.
      progress: whether to show what is going on, on standard error.

    Raises:
      CheckpointError: the checkpoint can't be used, or the folder exists and may not be replaced.
      ConfigError: the weights are int8 already, a group is larger than a layer's inputs, or a text is too short.
    """
    target = Path(folder).expanduser()
    check_target(target, overwrite=overwrite)  # before the long part
    opened = open_checkpoint(model, dtype="float32")
    if opened.config.quantization is not None:
        raise ConfigError(f"{opened.path} is int8 already; quantize the model that it was made of")
    config = dataclasses.replace(opened.config, dtype=plain_dtype(opened.config, dtype), quantization=quantization)
    abstract_params(config)  # raises where a group is too large
    if calibration_text is None and eval_text is None:
        params, report = _stream(opened, config, progress)
    else:
        params, report = _round_whole(opened, quantization, calibration_text, eval_text, eval_window, progress)
    files = {**companion_files(opened.path, opened.tokenizer_source), REPORT_NAME: report.to_json()}
    save_checkpoint(target, _cast(params, config), config, files=files, overwrite=overwrite)
    return report


def _stream(opened: OpenedCheckpoint, config: ModelConfig, progress: bool) -> tuple[Params, QuantizationReport]:
    """Returns the parameters as they are rounded while the file is read, and the errors found on the way."""
    found: dict[str, MatrixError] = {}

    def on_rounded(name: str, weight: np.ndarray, layer: QuantizedLinear) -> None:
        found[name] = matrix_error(name, weight, layer)

    quantization = config.quantization
    assert quantization is not None
    with loading_bar(progress) as on_tensor:
        loaded = load_checkpoint(
            opened.path, dtype=config.dtype, quantization=quantization, on_tensor=on_tensor, on_rounded=on_rounded
        )
    names = matrix_names(loaded.params, quantization)
    errors = [found.get(name) or MatrixError.none(name) for name in names]  # int8 in the file: taken as it is
    return loaded.params, QuantizationReport(is_calibrated=False, matrices=tuple(errors), text_loss=None)


def _round_whole(
    opened: OpenedCheckpoint,
    quantization: QuantizationConfig,
    calibration_text: str | None,
    eval_text: str | None,
    eval_window: int,
    progress: bool,
) -> tuple[Params, QuantizationReport]:
    """Returns the parameters, rounded on the device from float32 ones, and what the texts say about them."""
    if eval_window < 2:
        raise ConfigError(f"eval_window must be at least 2, to predict a token of it, got {eval_window}")
    with loading_bar(progress) as on_tensor:
        loaded = load_checkpoint(opened.path, dtype="float32", on_tensor=on_tensor)
    eval_windows = [] if eval_text is None else _windows(loaded, eval_text, eval_window, "eval_text")
    dense, params = _round(loaded, quantization, calibration_text, progress)
    report = QuantizationReport(
        is_calibrated=calibration_text is not None,
        matrices=tuple(matrix_errors(dense, params, quantization)),
        text_loss=_compare(loaded, params, eval_windows, progress),
    )
    return params, report


def _round(
    loaded: LoadedCheckpoint, quantization: QuantizationConfig, calibration_text: str | None, progress: bool
) -> tuple[Params, Params]:
    """Returns the dense parameters that were rounded, and the int8 ones."""
    dense, ratios = loaded.params, None
    num_matrices = len(matrix_names(dense, quantization))
    if calibration_text is not None:
        windows = _windows(loaded, calibration_text, CALIBRATION_WINDOW, "calibration_text")[:MAX_CALIBRATION_WINDOWS]
        with count_bar("measuring", len(windows), progress) as on_one:
            importance = measure_importance(dense, loaded.config, windows, on_window=on_one)
        with count_bar("scaling", len(dense.layers), progress) as on_one:
            dense, importance = scale_inputs(dense, loaded.config, importance, quantization, on_layer=on_one)
        with count_bar("clipping", num_matrices, progress) as on_one:
            ratios = search_clip(dense, quantization, importance, on_matrix=on_one)
    with count_bar("quantizing", num_matrices, progress) as on_one:
        return dense, quantize_params(dense, quantization, clip_ratios=ratios, on_matrix=on_one)


def _compare(loaded: LoadedCheckpoint, params: Params, windows: list[Any], progress: bool) -> TextLoss | None:
    if not windows:
        return None
    with count_bar("comparing", len(windows), progress) as on_window:
        return compare_on_text(loaded.params, params, loaded.config, windows, on_window=on_window)


def _windows(loaded: LoadedCheckpoint, text: str, size: int, name: str) -> list[Any]:
    tokenizer = find_tokenizer(loaded.tokenizer_source)
    if tokenizer is None:
        raise ConfigError(f"{name} needs a tokenizer, and {loaded.path} has none")
    token_ids = tokenizer.encode(text)
    windows = text_windows(token_ids, size=size)
    if not windows:
        raise ConfigError(f"{name} has {len(token_ids)} tokens; it needs at least {size}")
    return windows


def _cast(params: Params, config: ModelConfig) -> Params:
    """Returns the parameters with what is not int8 in the config's dtype."""
    cast: Params = jax.tree.map(lambda leaf, wanted: leaf.astype(wanted.dtype), params, abstract_params(config))
    return cast
