"""Checks of the arguments that PhotonLM has of its own: what is wrong with one is said before the model is loaded."""

from collections.abc import Callable, Mapping

from photon_jax.errors import ConfigError


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_end(value: object) -> bool:
    return _is_id(value) or (isinstance(value, str) and value != "")


_COUNT = (_is_count, "a whole number of at least 1")
_SWITCH = (lambda value: isinstance(value, bool), "true or false")
_MAPPING = (lambda value: isinstance(value, Mapping), "an object; on the command line give it in a --config file")
_KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "max_length": _COUNT,
    "max_gen_toks": _COUNT,
    "add_bos_token": _SWITCH,
    "prefix_token_id": (_is_id, "a token id"),
    "think_end_token": (_is_end, "a text or a token id"),
    "enable_thinking": _SWITCH,
    "chat_template_args": _MAPPING,
}


def check_arguments(given: Mapping[str, object]) -> None:
    """Raises ConfigError for an argument of another kind than it has; None is as if it were not given."""
    for name, value in given.items():
        is_right, wanted = _KINDS[name]
        if value is not None and not is_right(value):
            raise ConfigError(f"{name} must be {wanted}, got {value!r:.100}")
    if given["enable_thinking"] and given["think_end_token"] is None:
        raise ConfigError("enable_thinking=True needs think_end_token, the text or id that ends the thinking part")


def check_ids(given: Mapping[str, object], vocab_size: int) -> None:
    """Raises ConfigError for an argument that is no id of the tokenizer; those that are no numbers pass."""
    for name, value in given.items():
        if isinstance(value, int) and value >= vocab_size:
            raise ConfigError(f"{name} must be a token id of the tokenizer, 0 to {vocab_size - 1}, got {value}")
