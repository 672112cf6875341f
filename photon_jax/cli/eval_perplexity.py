"""photon-eval-perplexity: perplexity of a text file under a model; prints one line of JSON.

  photon-eval-perplexity --model=demo --text=prose.txt --window=1024 --stride=512

A token is scored in the first window that it is in. With --stride below --window it has at least their difference
before it there; with both equal, windows share nothing and the first token of each is not scored.
"""

import dataclasses
import json
from pathlib import Path

from absl import flags

from photon_jax.cli.command import define_common_flags, load_llm, require_flags, run_command, shows_progress
from photon_jax.cli.flags import engine_config_from_flags
from photon_jax.errors import ConfigError
from photon_jax.evals.perplexity import score_text


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines every flag of the command."""
    flags.DEFINE_string("text", None, "Text file, UTF-8.", flag_values=flag_values)
    flags.DEFINE_integer("window", 1024, "Tokens that are read together.", flag_values=flag_values)
    flags.DEFINE_integer(
        "stride", None, "Tokens between the beginnings of windows; unset: the window.", flag_values=flag_values
    )
    flags.DEFINE_integer("max_windows", None, "Windows to read; unset: all.", 1, flag_values=flag_values)
    define_common_flags(flag_values)


def main(flag_values: flags.FlagValues) -> None:
    """Loads the model, scores the text and prints the numbers."""
    require_flags(flag_values, "text")
    try:
        text = Path(flag_values.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text={flag_values.text} can't be read: {error}") from error
    window = flag_values.window
    stride = window if flag_values.stride is None else flag_values.stride
    with load_llm(flag_values, engine_config_from_flags(flag_values)) as llm:
        score = score_text(
            llm,
            text,
            window=window,
            stride=stride,
            max_windows=flag_values.max_windows,
            progress=shows_progress(flag_values),
        )
        card = llm.describe()
    record = {
        "model": str(flag_values.model),
        "dtype": card.dtype,
        "kv_dtype": card.kv_dtype,
        "quantization": None if card.quantization is None else dataclasses.asdict(card.quantization),
        "text": Path(flag_values.text).name,
        "window": window,
        "stride": stride,
        "perplexity": score.perplexity,
        **dataclasses.asdict(score),
    }
    print(json.dumps(record, allow_nan=False))


def run() -> None:
    """Entry point of the installed command."""
    run_command(main, define_flags, __doc__)


if __name__ == "__main__":
    run()
