"""photon-convert: writes a model as a folder that loads fast, anywhere, with nothing else needed.

  photon-convert --model=FOLDER --output=NEW_FOLDER --dtype=bfloat16
  photon-generate --model=NEW_FOLDER --prompt="What is the capital of France?"

The model is a Hugging Face folder or id (org/name, org/name@revision), a GGUF file, or demo. The new folder holds the
weights as an Orbax checkpoint, the model's configuration, its tokenizer and its sampling defaults.
"""

from absl import flags

from photon_jax.cli.command import run_command, shows_progress
from photon_jax.convert import convert
from photon_jax.errors import ConfigError


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines every flag of the command."""
    flags.DEFINE_string("model", None, "Model to convert.", flag_values=flag_values)
    flags.DEFINE_string("output", None, "Folder to write.", flag_values=flag_values)
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "float32", "bfloat16", "float16"],
        "Dtype of the weights; auto: the model's own, float32 where that is another kind.",
        flag_values=flag_values,
    )
    flags.DEFINE_bool("overwrite", False, "Replace the checkpoint that --output holds.", flag_values=flag_values)
    flags.DEFINE_bool(
        "progress", None, "Show progress on standard error; unset: when that is a terminal.", flag_values=flag_values
    )


def main(flag_values: flags.FlagValues) -> None:
    """Converts the model and prints what was written."""
    for name in ("model", "output"):
        if not flag_values[name].value:
            raise ConfigError(f"--{name} is missing")
    converted = convert(
        flag_values.model,
        flag_values.output,
        dtype=flag_values.dtype,
        overwrite=flag_values.overwrite,
        progress=shows_progress(flag_values),
    )
    config = converted.config
    print(f"{flag_values.output}: {config.architecture}, {converted.num_bytes / 2**20:.0f} MiB in {config.dtype}")


def run() -> None:
    """Entry point of the installed command."""
    run_command(main, define_flags, __doc__)


if __name__ == "__main__":
    run()
