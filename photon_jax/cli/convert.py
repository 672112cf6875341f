"""photon-convert: writes a model as a folder that loads fast, anywhere, with nothing else needed.

  photon-convert --model=FOLDER --output=NEW_FOLDER --dtype=bfloat16
  photon-generate --model=NEW_FOLDER --prompt="What is the capital of France?"

The model is a Hugging Face folder or id (org/name, org/name@revision), a GGUF file, or demo. The new folder holds the
weights as an Orbax checkpoint, the model's configuration, its tokenizer and its sampling defaults.
"""

from absl import flags

from photon_jax.cli.command import define_rewrite_flags, require_flags, run_command, shows_progress
from photon_jax.convert import convert


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines every flag of the command."""
    define_rewrite_flags(flag_values)


def main(flag_values: flags.FlagValues) -> None:
    """Converts the model and prints what was written."""
    require_flags(flag_values, "model", "output")
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
