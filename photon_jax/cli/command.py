"""What the command lines share: flags of every command, start and end of the process, the compile cache, loading."""

import io
import os
import sys
from collections.abc import Callable, Sequence

import jax
from absl import app, flags, logging

import photon_jax
from photon_jax.cli.flags import define_engine_flags, errors_name_flags
from photon_jax.config import EngineConfig
from photon_jax.errors import ConfigError, PhotonError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
DEFAULT_COMPILE_CACHE = "~/.cache/photon_jax/xla"


def define_common_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags that each command has: the model, the engine's settings, the compile cache, progress."""
    flags.DEFINE_string(
        "model",
        "demo",
        "Folder of a Hugging Face checkpoint or of photon-convert, a GGUF file, a Hugging Face id (org/name, "
        "org/name@revision), or demo for the small model that is fetched when needed.",
        flag_values=flag_values,
    )
    define_cache_flag(flag_values)
    define_progress_flag(flag_values)
    define_engine_flags(flag_values)


def define_cache_flag(flag_values: flags.FlagValues) -> None:
    """Defines where compiled programs are kept, for `use_compile_cache`."""
    flags.DEFINE_string(
        "compile_cache_dir",
        DEFAULT_COMPILE_CACHE,
        "Folder where compiled programs are kept for the next start; empty: none are kept.",
        flag_values=flag_values,
    )


def define_progress_flag(flag_values: flags.FlagValues) -> None:
    """Defines whether progress is shown, for `shows_progress`."""
    flags.DEFINE_bool(
        "progress",
        None,
        "Show progress bars on standard error; unset: when that is a terminal.",
        flag_values=flag_values,
    )


def define_rewrite_flags(flag_values: flags.FlagValues) -> None:
    """Defines the flags of a command that reads a model and writes a checkpoint: from where, to where, and how."""
    flags.DEFINE_string("model", None, "Model to read.", flag_values=flag_values)
    flags.DEFINE_string("output", None, "Folder to write.", flag_values=flag_values)
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "float32", "bfloat16", "float16"],
        "Dtype of what is float; auto: the model's own, float32 where that is another kind.",
        flag_values=flag_values,
    )
    flags.DEFINE_bool("overwrite", False, "Replace the checkpoint that --output holds.", flag_values=flag_values)
    define_progress_flag(flag_values)


def require_flags(flag_values: flags.FlagValues, *names: str) -> None:
    """Raises ConfigError for the first flag that is missing."""
    for name in names:
        if not flag_values[name].value:
            raise ConfigError(f"--{name} is missing")


def run_command(
    main: Callable[[flags.FlagValues], None], define_flags: Callable[[flags.FlagValues], None], doc: str
) -> None:
    """Defines the flags, parses the command line, runs `main` and exits.

    A PhotonError ends the process with one line on standard error and exit code 2; a bad flag with absl's usage text
    and exit code 1.

    Args:
      main: the command; gets the parsed flags.
      define_flags: defines every flag of the command.
      doc: what `--help` prints above the flags.
    """
    flag_values = flags.FLAGS
    before = set(flag_values)
    define_flags(flag_values)
    # An installed command's main module is a wrapper without flags or text of its own: --help reads these two.
    for name in sorted(set(flag_values) - before):
        flag_values.register_key_flag_for_module(sys.argv[0], flag_values[name])
    sys.modules["__main__"].__doc__ = doc
    jax.config.config_with_absl()

    def body(arguments: Sequence[str]) -> int:
        if not flag_values["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack what the model writes
        if len(arguments) > 1:
            raise app.UsageError(f"unexpected argument {arguments[1]!r}: everything is given as --flag=value")
        return exit_code_of(lambda: main(flag_values))

    app.run(body)


def exit_code_of(body: Callable[[], None]) -> int:
    """Runs `body` and returns the process's exit code; an error that a person can act on becomes one line."""
    try:
        body()
        sys.stdout.flush()
    except PhotonError as error:
        print(f"{os.path.basename(sys.argv[0])}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left; keep the interpreter's own flush at exit from failing on the same pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return 0


def use_compile_cache(flag_values: flags.FlagValues) -> None:
    """Keeps compiled programs on disk for the next start, unless the caller chose another place or none."""
    directory = flag_values.compile_cache_dir
    chosen_elsewhere = jax.config.values["jax_compilation_cache_dir"] and not flag_values["compile_cache_dir"].present
    if not directory or chosen_elsewhere:
        return
    keep_programs(directory)


def keep_programs(directory: str) -> None:
    """Keeps compiled programs in a folder for the next start."""
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def shows_progress(flag_values: flags.FlagValues) -> bool:
    """Returns whether progress bars are wanted."""
    return sys.stderr.isatty() if flag_values.progress is None else bool(flag_values.progress)


def load_llm(flag_values: flags.FlagValues, config: EngineConfig) -> "photon_jax.LLM":
    """Returns the model that the flags name, loaded with `config`."""
    use_compile_cache(flag_values)
    with errors_name_flags():
        return photon_jax.LLM(flag_values.model, engine_config=config, progress=shows_progress(flag_values))
