"""photon-quantize: writes a model with int8 weights, and says what that costs.

  photon-quantize --model=FOLDER --output=NEW_FOLDER --group_size=128
      --calibration_text=SOME.txt --eval_text=OTHER.txt
  photon-generate --model=NEW_FOLDER --prompt="What is the capital of France?"

The model is a Hugging Face folder or id, a GGUF file, or demo. With a calibration text the scales are searched for,
and sizes move from activations to weights where that rounds better; without one the weights are rounded plainly. With
an evaluation text both models are compared on it. The numbers are kept in the new folder.
"""

from pathlib import Path

from absl import flags

from photon_jax.cli.command import (
    define_cache_flag,
    define_rewrite_flags,
    require_flags,
    run_command,
    shows_progress,
    use_compile_cache,
)
from photon_jax.config import GROUP_SIZES, EngineConfig
from photon_jax.errors import ConfigError
from photon_jax.models.config import QuantizationConfig
from photon_jax.quantization.report import error_table
from photon_jax.quantize import quantize


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines every flag of the command."""
    define_rewrite_flags(flag_values)
    flags.DEFINE_enum(
        "group_size",
        str(EngineConfig().group_size),
        [str(size) for size in GROUP_SIZES],
        "Inputs that share a scale.",
        flag_values=flag_values,
    )
    flags.DEFINE_bool(
        "quantize_embedding", False, "Make the embedding and the output head int8 too.", flag_values=flag_values
    )
    flags.DEFINE_string("calibration_text", None, "Text file to search for scales with.", flag_values=flag_values)
    flags.DEFINE_string("eval_text", None, "Text file to compare both models on.", flag_values=flag_values)
    flags.DEFINE_integer(
        "eval_window", 1024, "Tokens of the evaluation text that are read together.", 2, flag_values=flag_values
    )
    define_cache_flag(flag_values)


def main(flag_values: flags.FlagValues) -> None:
    """Quantizes the model, prints the error of each matrix and what the text says."""
    require_flags(flag_values, "model", "output")
    use_compile_cache(flag_values)
    report = quantize(
        flag_values.model,
        flag_values.output,
        QuantizationConfig(group_size=int(flag_values.group_size), has_embedding=flag_values.quantize_embedding),
        calibration_text=_read(flag_values.calibration_text, "calibration_text"),
        eval_text=_read(flag_values.eval_text, "eval_text"),
        eval_window=flag_values.eval_window,
        dtype=flag_values.dtype,
        overwrite=flag_values.overwrite,
        progress=shows_progress(flag_values),
    )
    print(error_table(report.matrices))
    if report.text_loss is not None:
        print(report.text_loss)


def _read(path: str | None, name: str) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{name}={path} can't be read: {error}") from error


def run() -> None:
    """Entry point of the installed command."""
    run_command(main, define_flags, __doc__)


if __name__ == "__main__":
    run()
