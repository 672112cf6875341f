"""Forced tool calls: the grammar of an answer that must call a function. Host only."""

import json
from collections.abc import Mapping, Sequence

from photon_jax.errors import RequestError
from photon_jax.structured_outputs import StructuredOutputs
from photon_jax.text.grammar import JSON_OPTIONS, lark_string
from photon_jax.text.tool_calls import ToolFormat

_NO_PARAMETERS = {"properties": {}, "additionalProperties": False}  # as the OpenAI API reads a function without any


def force_tool_calls(
    form: ToolFormat, tools: Sequence[Mapping[str, object]], *, name: str | None = None, is_parallel: bool = True
) -> StructuredOutputs:
    """Returns the form of an answer that is nothing but calls, whose arguments fit the functions' parameters.

    Args:
      form: how the model writes calls.
      tools: as the OpenAI API has them: {"type": "function", "function": {"name": ..., "parameters": JSON schema}}.
      name: the function that must be called, once; None calls any of them.
      is_parallel: whether several calls may come, where no name is given.

    Raises:
      RequestError: a tool is not described as it must be, or there is none of that name.
    """
    functions = {}
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            raise RequestError(f"tools[{index}] must be a function with a name, got {tool!r:.100}")
        functions[str(function["name"])] = (
            _NO_PARAMETERS if function.get("parameters") is None else function["parameters"]
        )
    if name is not None:
        if name not in functions:
            raise RequestError(f"tool_choice names {name!r:.100}, which is not among the tools; add it to them")
        functions = {name: functions[name]}
    if not functions:
        raise RequestError("tool_choice asks for a call, but there are no tools; give some")
    return StructuredOutputs(grammar=_lark(form, functions, is_parallel=is_parallel and name is None))


def _lark(form: ToolFormat, functions: Mapping[str, object], *, is_parallel: bool) -> str:
    opening, closing, separator = f"{form.opening}\n", f"\n{form.closing}", "\n"
    if form.is_bare:
        opening, closing, separator = "", form.closing, "; "
    call = " ".join([*_literals(opening), "body", *_literals(closing)])
    more = f" ({lark_string(separator)} call)*" if is_parallel else ""
    lines = [f"start: call{more}", f"call: {call}"]
    lines.append("body: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    for index, (name, parameters) in enumerate(functions.items()):
        if not isinstance(parameters, Mapping):
            raise RequestError(f"the parameters of {name!r:.100} must be a JSON schema, got {parameters!r:.100}")
        opened = f'{{"name": {json.dumps(name)}, "{form.arguments_key}": '
        lines.append(f"call_{index}: {lark_string(opened)} arguments_{index} {lark_string('}')}")
        lines.append(f"arguments_{index}: %json {_schema_text(name, parameters)}")
    return "\n".join(lines)


def _literals(text: str) -> list[str]:
    return [lark_string(text)] if text else []


def _schema_text(name: str, parameters: Mapping[str, object]) -> str:
    """Returns a function's parameters as JSON text of one line; its arguments are an object whatever they say."""
    try:
        return json.dumps({"x-guidance": JSON_OPTIONS} | {"type": "object"} | dict(parameters), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"the parameters of {name!r:.100} must be a JSON schema: {error}") from error
