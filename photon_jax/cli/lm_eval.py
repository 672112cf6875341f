"""photon-lm-eval: the command line of lm-evaluation-harness, with photon_jax among its models.

  photon-lm-eval run --model_args model=demo dtype=float32 --tasks hellaswag --limit 100

All arguments are the harness's own; --model is photon_jax where none is given. What --model_args may hold is in
`photon_jax.evals.lm_eval_model.PhotonLM`. Releases after lm-eval 0.4.13 find the model by themselves.
"""

import logging
import sys
from collections.abc import Sequence

import jax

from photon_jax.cli.command import DEFAULT_COMPILE_CACHE, exit_code_of, keep_programs

_OTHER_COMMANDS = ("ls", "validate")
_CHOOSES_MODEL = ("--model", "-M", "--config", "-C", "-h", "--help")


def with_model(arguments: Sequence[str]) -> list[str]:
    """Returns the harness's arguments with our model, unless they name one, a file that may, or another command."""
    given = list(arguments)
    names = {argument.partition("=")[0] for argument in given}
    if not given or given[0] in _OTHER_COMMANDS or names & set(_CHOOSES_MODEL):
        return given
    return [*(given if given[0] == "run" else ["run", *given]), "--model", "photon_jax"]


def main() -> None:
    """Registers the model and hands over to the harness."""
    # Here, so that the error that says how to install the harness is one line. The second import registers the model.
    from photon_jax.evals.harness import cli_evaluate
    from photon_jax.evals.lm_eval_model import PhotonLM

    sys.argv[1:] = with_model(sys.argv[1:])
    if not jax.config.values["jax_compilation_cache_dir"]:
        keep_programs(DEFAULT_COMPILE_CACHE)
    logging.info("evaluating with %s", PhotonLM.__name__)
    cli_evaluate()


def run() -> None:
    """Entry point of the installed command."""
    sys.exit(exit_code_of(main))


if __name__ == "__main__":
    run()
