"""The parts of a chat's answer: its text, as it comes, is reasoning, content and calls of tools."""

import dataclasses
from collections.abc import Mapping

from photon_jax.errors import RequestError
from photon_jax.server.protocol import Json
from photon_jax.server.protocol_chat import ChatDelta, ChatRequest, NamedTool, ToolCall, ToolCallDelta
from photon_jax.structured_outputs import StructuredOutputs
from photon_jax.text import tool_calls
from photon_jax.text.reasoning import ReasoningSplitter, Start
from photon_jax.text.tool_calls import ToolCallParser, ToolFormat
from photon_jax.text.tool_grammar import force_tool_calls


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """How an answer may use tools.

    Attributes:
      form: how the model writes calls; None: the text is not searched for any.
      forced: the form of an answer that must be calls; None: it need not.
      is_parallel: whether it may hold several calls.
    """

    form: ToolFormat | None = None
    forced: StructuredOutputs | None = None
    is_parallel: bool = True


def tool_use(body: ChatRequest, form: ToolFormat | None) -> ToolUse:
    """Returns how the answer to a request may use its tools.

    Args:
      form: how the model writes calls; None when its chat template doesn't show it.

    Raises:
      RequestError: a call is asked for and can't be made.
    """
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if body.tools else "none"
    if choice == "none":
        return ToolUse()
    if not body.tools:
        raise RequestError("tool_choice asks for calls, but there are no tools; give some")
    is_parallel = body.parallel_tool_calls is not False
    if choice == "auto":
        return ToolUse(form=form, is_parallel=is_parallel)
    if form is None:
        raise RequestError("tool_choice can't force a call: the model's chat template shows no format of calls")
    if body.structured_outputs is not None or (body.response_format and body.response_format.type != "text"):
        raise RequestError("tool_choice can't force a call of an answer whose form is given; leave one of them out")
    name = choice.function.name if isinstance(choice, NamedTool) else None
    forced = force_tool_calls(form, template_tools(body) or [], name=name, is_parallel=is_parallel)
    return ToolUse(form=form, forced=forced, is_parallel=is_parallel)


def template_tools(body: ChatRequest) -> list[Mapping[str, Json]] | None:
    """Returns the tools that the model is told of; none where it must call none."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_unset=True) for tool in body.tools]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a piece of text added to the parts of a choice."""

    reasoning: str
    content: str
    calls: tuple[tool_calls.ToolCallDelta, ...]

    def delta(self) -> ChatDelta:
        """Returns it as a stream tells it: without what nothing was added to."""
        delta: ChatDelta = {}
        if self.reasoning:
            delta["reasoning"] = self.reasoning
        if self.calls:
            delta["tool_calls"] = [_call_delta(call) for call in self.calls]
        if self.content:
            delta["content"] = self.content
        return delta

    def whole_calls(self) -> list[ToolCall]:
        """Returns the calls of an answer that came at once."""
        return [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in tool_calls.join_calls(self.calls)
        ]


class AnswerParts:
    """Splits the text of one choice into its parts as it comes."""

    def __init__(self, use: ToolUse, start: Start) -> None:
        """Begins a choice.

        Args:
          start: where in its reasoning the answer begins; "after" where the model doesn't reason.
        """
        self._use = use
        self._reasoning = None if start == "after" else ReasoningSplitter(start)
        self._calls = None if use.form is None else ToolCallParser(use.form)
        self.has_calls = False

    def push(self, text: str, *, is_last: bool) -> Part:
        """Returns what the next piece of text adds; nothing while it is not clear yet what it belongs to."""
        reasoning = ""
        if self._reasoning is not None:
            parts = [self._reasoning.push(text), *([self._reasoning.flush()] if is_last else ())]
            text = "".join(part.content for part in parts)
            reasoning = "".join(part.reasoning for part in parts)
        calls: tuple[tool_calls.ToolCallDelta, ...] = ()
        if self._calls is not None:
            deltas = [self._calls.push(text), *([self._calls.flush()] if is_last else ())]
            text = "".join(delta.content for delta in deltas)
            calls = tuple(call for delta in deltas for call in delta.tool_calls if self._is_kept(call.index))
            self.has_calls |= bool(calls)
        return Part(reasoning=reasoning, content=text, calls=calls)

    def _is_kept(self, index: int) -> bool:
        return self._use.is_parallel or index == 0


def _call_delta(call: tool_calls.ToolCallDelta) -> ToolCallDelta:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function: Json = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
