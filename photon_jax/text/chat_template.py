"""Chat templates: messages to prompt text, by the Jinja rules that checkpoints are written for."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from photon_jax.errors import CheckpointError, RequestError

_FINAL_MARK = "\u2063END-OF-FINAL-MESSAGE\u2063"
# What compiling a template can raise: of Jinja, or of Python on the code that Jinja makes of it.
_COMPILE_ERRORS = (jinja2.TemplateError, SyntaxError, RecursionError, ValueError, OverflowError, MemoryError)
# What an expression of a template can raise on values that it did not expect.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %} ... {% endgeneration %}`, which marks an answer for training, and renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, so that no internals can be put in its place."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.TemplateError(f"a template can't store {name!r} in a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON; Jinja's own filter escapes HTML characters, which a model has never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=_Namespace
    )
    return environment


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages as plain data: text parts joined, missing content made empty, other missing values left out.

    Args:
      messages: each has a `role`, and a `content` that is a string or a list of `{"type": "text", "text": ...}`; only
        an assistant's message with tool_calls may be without content.

    Raises:
      RequestError: a message has another form.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of role and content dicts, got {type(messages).__name__}")
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a dict with role and content, got {type(message).__name__}")
    plain = {str(key): _plain(value, f"{where}.{key}") for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} needs a role such as 'user', got {role!r}")
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(_part_text(part, where) for part in content)
    elif content is None:
        if not (role == "assistant" and plain.get("tool_calls")):
            raise RequestError(f"{where} has no content; only an assistant message with tool_calls may leave it out")
        plain["content"] = ""  # templates look into it without asking whether it is there
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of text parts, got {type(content).__name__}")
    return plain


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(f"{where}.content has a part of type {kind!r}; only text parts are supported")


def _plain(value: Any, where: str) -> Any:
    """Returns a copy in JSON types alone: a template, which is code of the checkpoint, gets no other object."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # of a subclass, such as an enum: only its characters
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    raise RequestError(f"{where} must be JSON data for the chat template, got {type(value).__name__}")


class ChatTemplate:
    """The chat templates of one checkpoint, compiled once; rendering changes nothing in it."""

    def __init__(self, source: str | Mapping[str, str], *, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compiles the template.

        Args:
          source: the template, or several by name; "default" is used, and "tool_use", if there, when tools are given.
          special_tokens: variables such as bos_token and eos_token that every rendering sees.

        Raises:
          CheckpointError: a template is not valid Jinja.
        """
        environment = _make_environment()
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if not sources:
            raise CheckpointError("the chat template list is empty; remove it or add a template named 'default'")
        self._templates: dict[str, jinja2.Template] = {}
        self._special_tokens = dict(special_tokens or {})
        for name, text in sources.items():
            try:
                self._templates[name] = environment.from_string(text)
            except _COMPILE_ERRORS as error:
                place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                raise CheckpointError(
                    f"chat template {name!r} is not valid Jinja{place}: {error}; "
                    "correct it in the checkpoint or remove it"
                ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Returns the prompt text of a conversation.

        Args:
          messages: see `plain_messages`.
          add_generation_prompt: whether the text ends with the header of the assistant's turn.
          continue_final_message: whether the text ends inside the last message, for the model to go on from there.
          tools: JSON schemas of functions that the model may call.
          variables: more values for the template, such as enable_thinking; JSON data.

        Raises:
          RequestError: an argument has the wrong form, or the template refuses the conversation.
        """
        plain = plain_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError("set add_generation_prompt=False with continue_final_message: only one can be")
            plain[-1]["content"] = plain[-1].get("content", "") + _FINAL_MARK + " "
        values = {
            **self._special_tokens,
            "documents": None,
            **{name: _plain(value, name) for name, value in variables.items()},
            "messages": plain,
            "tools": _plain_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._choose(tools).render(values)
        except _RENDER_ERRORS as error:
            raise RequestError(f"the chat template refuses the conversation: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise RequestError(
            f"the checkpoint's chat templates are {sorted(self._templates)}; none is named 'default', "
            "so give a prompt text instead of messages"
        )


def _plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of JSON schemas, each a dict")
    return [_plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _cut_at_mark(text: str) -> str:
    """Returns the text up to the mark; where the template trims a message, its last spaces go too."""
    at = text.rfind(_FINAL_MARK)
    if at < 0:
        raise RequestError("continue_final_message can't be: the chat template leaves out the final message's content")
    kept = text[:at]
    return kept if text.startswith(_FINAL_MARK + " ", at) else kept.rstrip()
