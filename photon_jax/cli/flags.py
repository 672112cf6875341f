"""Command-line flags made from the fields of config dataclasses, and configs made from the flags."""

import contextlib
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from absl import flags

from photon_jax.config import CacheConfig, EngineConfig, KernelConfig, SchedulerConfig, make_engine_config
from photon_jax.controls import logit_bias_from_json
from photon_jax.errors import ConfigError, RequestError
from photon_jax.request import CODE_FIELDS, SamplingParams
from photon_jax.structured_outputs import StructuredOutputs

_ENGINE_PARTS = (EngineConfig, CacheConfig, SchedulerConfig, KernelConfig)
_SAMPLING_PARTS = (SamplingParams, StructuredOutputs)


def define_engine_flags(flag_values: flags.FlagValues) -> None:
    """Defines one flag for each plain field of EngineConfig and of the configs that it holds."""
    for part in _ENGINE_PARTS:
        define_fields(part, flag_values)


def define_sampling_flags(flag_values: flags.FlagValues) -> None:
    """Defines one flag for each plain field of SamplingParams and of the StructuredOutputs that it holds."""
    for part in _SAMPLING_PARTS:
        define_fields(part, flag_values)


def engine_fields_from_flags(flag_values: flags.FlagValues) -> dict[str, object]:
    """Returns the engine settings that were given on the command line, as flat keyword arguments."""
    names = [field.name for part in _ENGINE_PARTS for field in _plain_fields(part)]
    return {name: flag_values[name].value for name in names if flag_values[name].present}


def engine_config_from_flags(flag_values: flags.FlagValues) -> EngineConfig:
    """Returns the engine config that the flags describe; a flag not given leaves its field at the default."""
    with errors_name_flags():
        return make_engine_config(None, **engine_fields_from_flags(flag_values))


def sampling_params_from_flags(flag_values: flags.FlagValues) -> SamplingParams:
    """Returns the sampling parameters that the flags describe."""
    given: dict[str, Any] = {field.name: flag_values[field.name].value for field in _plain_fields(SamplingParams)}
    form: dict[str, Any] = {field.name: flag_values[field.name].value for field in _plain_fields(StructuredOutputs)}
    with errors_name_flags():
        given["logit_bias"] = _parse_logit_bias(given["logit_bias"])
        given["structured_outputs"] = StructuredOutputs(**form) if any(form.values()) else None
        return SamplingParams(**given)


def _parse_logit_bias(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return logit_bias_from_json(json.loads(text))
    except ValueError as error:
        raise RequestError(f'logit_bias must be JSON such as {{"42": -5}}, got {text!r}: {error}') from error


@contextlib.contextmanager
def errors_name_flags(*owners: type) -> Iterator[None]:
    """Makes an error about a setting that is raised inside name the flag, as --max_num_seqs, not the field.

    Args:
      owners: dataclasses whose fields are flags, besides those of the engine and of sampling.
    """
    try:
        yield
    except (ConfigError, RequestError) as error:
        raise type(error)(_with_flags(str(error), owners)) from error


def _with_flags(message: str, owners: tuple[type, ...]) -> str:
    """Returns a message with fields as flags: names of several words, and others where they open it or get a value."""
    names = {field.name for owner in (*_ENGINE_PARTS, *_SAMPLING_PARTS, *owners) for field in _plain_fields(owner)}
    several = "|".join(sorted(name for name in names if "_" in name))
    every = "|".join(sorted(names))
    return re.sub(rf"(?<![\w-])(?=(?:{several})\b|(?:{every})=)|^(?=(?:{every}) )", "--", message)


def field_help(owner: type) -> dict[str, str]:
    """Returns what each field of a dataclass is for: its "help" metadata, else its entry under `Attributes:`."""
    found: dict[str, str] = {}
    _, _, attributes = (inspect.getdoc(owner) or "").partition("Attributes:\n")
    for entry in re.split(r"\n(?=  \w)", attributes):
        names, _, text = entry.strip().partition(": ")
        for name in names.split(", "):
            found[name] = " ".join(text.split())
    for field in dataclasses.fields(owner):
        if "help" in field.metadata:
            found[field.name] = field.metadata["help"]
    return found


def _plain_fields(owner: type) -> list[dataclasses.Field[object]]:
    """Returns the fields that hold a value, not another config or code, and have no flag of their own kind."""
    hints = typing.get_type_hints(owner)
    fields = [field for field in dataclasses.fields(owner) if field.name not in CODE_FIELDS]
    fields = [field for field in fields if field.metadata.get("has_flag", True)]
    return [field for field in fields if not any(map(dataclasses.is_dataclass, _members(hints[field.name])))]


def _members(hint: object) -> tuple[object, ...]:
    """Returns the types of a union, or the one type that a hint is."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def define_fields(owner: type, flag_values: flags.FlagValues) -> None:
    """Defines one flag for each plain field of a dataclass."""
    hints = typing.get_type_hints(owner)
    helps = field_help(owner)
    for field in _plain_fields(owner):
        _define_flag(field, hints[field.name], helps.get(field.name, ""), flag_values)


def _define_flag(field: dataclasses.Field[object], hint: object, help_text: str, flag_values: flags.FlagValues) -> None:
    """Defines the flag whose kind fits the field's type; a tuple becomes a flag that may be repeated."""
    default: Any = field.default
    member = next(m for m in _members(hint) if m is not types.NoneType)
    if typing.get_origin(member) is typing.Literal:
        flags.DEFINE_enum(field.name, default, list(typing.get_args(member)), help_text, flag_values=flag_values)
    elif typing.get_origin(member) is tuple:
        is_text = typing.get_args(member)[0] is not int
        define = flags.DEFINE_multi_string if is_text else flags.DEFINE_multi_integer
        values = None if default is None else list(default)
        define(field.name, values, help_text, flag_values=flag_values)
    elif member is bool:
        flags.DEFINE_bool(field.name, default, help_text, flag_values=flag_values)
    elif member is int:
        flags.DEFINE_integer(field.name, default, help_text, flag_values=flag_values)
    elif member is float:
        flags.DEFINE_float(field.name, default, help_text, flag_values=flag_values)
    else:
        flags.DEFINE_string(field.name, default, help_text, flag_values=flag_values)
