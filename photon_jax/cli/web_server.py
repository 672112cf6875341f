"""photon-web-server: an OpenAI-compatible server, and a page to chat with the model.

  photon-web-server --model=demo --port=5728
  photon-web-server --model=FOLDER --host=0.0.0.0 --api_key=SECRET --tls_cert=cert.pem --tls_key=key.pem

It answers at once, by default on the loopback address alone, and serves requests when the model is loaded: /health
says when. On a GPU all step programs are compiled first, unless --warmup=lazy says otherwise. SIGTERM or SIGINT ends
it: new requests are refused, running ones get --drain_s seconds; a second signal ends it at once. An API key can stand
in the environment variable PHOTON_API_KEY instead of the command line. Flags can stand in a file, one a line:
--flagfile=FILE.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
from absl import flags

import photon_jax
from photon_jax.cli.command import define_common_flags, run_command, use_compile_cache
from photon_jax.cli.flags import define_fields, engine_config_from_flags, errors_name_flags
from photon_jax.config import EngineConfig
from photon_jax.errors import ConfigError
from photon_jax.progress import OnProgress
from photon_jax.server.state import ServerSettings, ServerState
from photon_jax.text.tokenizer import Tokenizer

_KEY_VARIABLE = "PHOTON_API_KEY"
_ALIASES = {
    "api_key": "api_keys",
    "cors_origin": "cors_origins",
    # as the system before this one wrote them
    "checkpoint": "model",
    "cert": "tls_cert",
    "key": "tls_key",
    "static-dir": "static_dir",
}


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines every flag of the command."""
    flags.DEFINE_string(
        "tokenizer", None, "Folder of a tokenizer, instead of the model's own.", flag_values=flag_values
    )
    flags.DEFINE_string(
        "model_name",
        None,
        "Under which clients ask for the model; unset: the last part of --model.",
        flag_values=flag_values,
    )
    flags.DEFINE_bool(
        "https",
        None,
        "Serve https, as --tls_cert and --tls_key do by themselves; an error without them.",
        flag_values=flag_values,
    )
    define_fields(ServerSettings, flag_values)
    define_common_flags(flag_values)
    for alias, name in _ALIASES.items():
        flags.DEFINE_alias(alias, name, flag_values=flag_values)


def main(flag_values: flags.FlagValues) -> None:
    """Serves until a signal comes."""
    try:
        from photon_jax.server.lifecycle import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}; pip install 'photon_jax[server]'") from error
    config = engine_config_from_flags(flag_values)
    state = ServerState(model_name=model_name(flag_values), settings=settings_from_flags(flag_values))
    use_compile_cache(flag_values)

    def load(on_progress: OnProgress) -> photon_jax.LLM:
        tokenizer = Tokenizer.from_pretrained(Path(flag_values.tokenizer)) if flag_values.tokenizer else None
        engine_config = config_for_serving(config, flag_values, jax.default_backend())
        return photon_jax.LLM(flag_values.model, tokenizer=tokenizer, engine_config=engine_config, progress=on_progress)

    with errors_name_flags(ServerSettings):
        serve(state, load)


def config_for_serving(config: EngineConfig, flag_values: flags.FlagValues, platform: str) -> EngineConfig:
    """Returns the engine's config: off the CPU all step programs are compiled before the first request, unless asked.

    A program that is compiled while requests run holds all of them up.

    Raises:
      ConfigError: the settings are none to serve with.
    """
    if not (flag_values["warmup"].present or platform == "cpu"):
        config = dataclasses.replace(config, warmup="full")
    config.check_serves()
    return config


def model_name(flag_values: flags.FlagValues) -> str:
    """Returns the name that clients use: of a Hugging Face id all of it, of a path its last part."""
    model: str = flag_values.model
    return flag_values.model_name or (os.path.basename(os.path.abspath(model)) if os.path.exists(model) else model)


def settings_from_flags(flag_values: flags.FlagValues) -> ServerSettings:
    """Returns the settings that the flags and the environment describe."""
    names = [field.name for field in dataclasses.fields(ServerSettings)]
    given: dict[str, Any] = {name: flag_values[name].value for name in names}
    key = os.environ.get(_KEY_VARIABLE)
    given["api_keys"] = (*given["api_keys"], *([key] if key else []))
    given["cors_origins"] = tuple(given["cors_origins"])
    if flag_values.https is not None and flag_values.https != (given["tls_cert"] is not None):
        raise ConfigError("--https goes with --tls_cert and --tls_key, --nohttps without; change one, or leave it out")
    with errors_name_flags(ServerSettings):
        return ServerSettings(**given)


def run() -> None:
    """Entry point of the installed command."""
    run_command(main, define_flags, __doc__)


if __name__ == "__main__":
    run()
