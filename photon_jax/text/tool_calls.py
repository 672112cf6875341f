"""Tool calls: finds the calls in the text of an answer, whole or as it comes. Host only.

Two formats: that of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them
in the text; and that of Llama 3, an answer that is `{"name": ..., "parameters": {...}}`, or several with `;` between,
maybe after `<|python_tag|>`.
"""

import dataclasses
import uuid
from collections.abc import Callable, Iterable

from photon_jax.errors import ConfigError
from photon_jax.text.call_reader import CallReader
from photon_jax.text.json_scan import SPACE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
      name: by which it is chosen.
      opening, closing: what a call stands between; the closing may be empty.
      arguments_key: under which the arguments stand, as the model was taught.
      is_bare: whether an answer may begin with a call without its opening.
    """

    name: str
    opening: str
    closing: str
    arguments_key: str
    is_bare: bool


HERMES = ToolFormat(
    name="hermes", opening="<tool_call>", closing="</tool_call>", arguments_key="arguments", is_bare=False
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json", opening="<|python_tag|>", closing="", arguments_key="parameters", is_bare=True
)
FORMATS = (HERMES, LLAMA3_JSON)


def find_tool_format(chat_template: str | None, name: str = "auto") -> ToolFormat | None:
    """Returns how a model writes calls, None if its answers are not to be searched for any.

    Args:
      chat_template: the text of its template for conversations with tools, which shows the model the format.
      name: "hermes" or "llama3_json" whatever the template says, "none" for no calls, "auto" to go by the template.

    Raises:
      ConfigError: there is no such format.
    """
    named = {each.name: each for each in FORMATS}
    if name != "auto":
        if name not in named and name != "none":
            raise ConfigError(f"there is no tool format {name!r}; give auto, none, {' or '.join(named)}")
        return named.get(name)
    if chat_template is None:
        return None
    if HERMES.opening in chat_template:
        return HERMES
    return LLAMA3_JSON if "tools" in chat_template and '"parameters"' in chat_template else None


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What came of one call, as the OpenAI API streams it.

    Attributes:
      index: of the call in the answer, from 0.
      id, name: with the first delta of the call alone.
      arguments: the next piece of the arguments' JSON text; all pieces joined are the whole.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AnswerDelta:
    """What a piece of text added to the answer: to its content, and to its calls in their order."""

    content: str
    tool_calls: tuple[ToolCallDelta, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a function; its arguments are the JSON text of an object, or its beginning where the answer was cut."""

    id: str
    name: str
    arguments: str


def new_call_id() -> str:
    """Returns an id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def split_tool_calls(
    text: str, form: ToolFormat, *, make_id: Callable[[], str] = new_call_id
) -> tuple[str, tuple[ToolCall, ...]]:
    """Returns the content and the calls of a whole answer: what the deltas of a `ToolCallParser` come to."""
    parser = ToolCallParser(form, make_id=make_id)
    parts = (parser.push(text), parser.flush())
    return "".join(part.content for part in parts), join_calls(delta for part in parts for delta in part.tool_calls)


def join_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Returns the calls that the deltas of one answer come to, in their order."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(id=delta.id, name=delta.name, arguments=delta.arguments))
        else:
            calls[-1] = dataclasses.replace(calls[-1], arguments=calls[-1].arguments + delta.arguments)
    return tuple(calls)


class ToolCallParser:
    """Splits the text of one answer, as it comes, into content and calls.

    However the text is cut into pieces, the deltas joined are the same. White space between content and calls belongs
    to neither. What turns out to be no call is content, to the letter. A call is told as soon as its name is known and
    its arguments begin, and can't be taken back: if it breaks off, its arguments are those that came, and what follows
    is content.
    """

    def __init__(self, form: ToolFormat, *, make_id: Callable[[], str] = new_call_id) -> None:
        """Begins an answer.

        Args:
          make_id: returns an id for a call.
        """
        self._form = form
        self._make_id = make_id
        self._state: Callable[[], bool] = self._begin if form.is_bare else self._in_text
        self._text = ""  # not understood yet
        self._reader = CallReader(is_strict=form.is_bare)
        self._opened = ""  # what stood before the call that is read
        self._raw = ""  # that call so far, while it may be none
        self._is_told = False
        self._num_calls = 0
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    def push(self, text: str) -> AnswerDelta:
        """Returns what the next piece of text adds."""
        self._text += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> AnswerDelta:
        """Returns what the end of the text adds."""
        if self._state == self._after_object:
            self._tell_whole()  # all but its closing
            self._text = ""
        elif self._state == self._in_call and not self._is_told:
            self._content.append(self._opened + self._raw)
        elif self._state == self._after_call:
            self._content.append(self._text if self._text.strip(SPACE) else "")
            self._text = ""
        self._content.append(self._text)
        self._text = ""
        return self._take()

    def _take(self) -> AnswerDelta:
        delta = AnswerDelta(content="".join(self._content), tool_calls=tuple(self._deltas))
        self._content, self._deltas = [], []
        return delta

    # Each state takes what it can from the text, and returns whether another one may go on with what is left.

    def _begin(self) -> bool:
        """Before anything but white space has come, where a call may stand without its opening."""
        stripped = self._text.lstrip(SPACE)
        if not stripped:
            return False
        if stripped[0] == "{":
            self._open_call(len(self._text) - len(stripped))
        else:
            self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        opening = self._form.opening
        at = self._text.find(opening)
        if at >= 0:
            content = self._text[:at].rstrip(SPACE)
            self._content.append(content)
            self._text = self._text[len(content) :]
            self._open_call(at - len(content) + len(opening))
            return True
        cut = len(self._text) - _num_begun(self._text, opening)
        cut = len(self._text[:cut].rstrip(SPACE))
        self._content.append(self._text[:cut])
        self._text = self._text[cut:]
        return False

    def _open_call(self, num_before: int) -> None:
        self._opened, self._text = self._text[:num_before], self._text[num_before:]
        self._raw, self._is_told = "", False
        self._reader = CallReader(is_strict=self._form.is_bare)
        self._state = self._in_call

    def _in_call(self) -> bool:
        for index, char in enumerate(self._text):
            status = self._reader.push(char)
            if status == "open":
                continue
            end = index + (status == "done")
            self._raw, self._text = self._raw + self._text[:end], self._text[end:]
            if status == "done":
                self._state = self._after_object
            else:
                self._break_off()
            return True
        self._raw, self._text = "" if self._is_told else self._raw + self._text, ""
        self._tell()
        return False

    def _break_off(self) -> None:
        """Ends a call that can't go on so: it is content unless it was told."""
        self._tell()
        if self._is_told:
            self._num_calls += 1
        else:
            self._content.append(self._opened + self._raw[:1])
            self._text = self._raw[1:] + self._text  # in which a call may begin
        self._state = self._in_text

    def _after_object(self) -> bool:
        """Where nothing but the closing may come."""
        self._tell()
        closing, rest = self._form.closing, self._text.lstrip(SPACE)
        if rest.startswith(closing):
            self._tell_whole()
            self._text = rest[len(closing) :]
            self._state = self._after_call
            return True
        if closing.startswith(rest):
            return False
        self._break_off()
        return True

    def _after_call(self) -> bool:
        """Where white space is dropped, and where another call may follow without an opening."""
        self._text = self._text.lstrip(SPACE)
        rest = self._text.lstrip(SPACE + ";") if self._form.is_bare else self._text
        if not rest:
            return False
        if self._form.is_bare and rest[0] == "{":
            self._open_call(len(self._text) - len(rest))
        else:
            self._state = self._in_text
        return True

    def _tell(self) -> None:
        """Tells what came of a call."""
        if self._reader.has_begun:
            self._add_delta()

    def _tell_whole(self) -> None:
        self._add_delta()
        self._num_calls += 1

    def _add_delta(self) -> None:
        arguments = self._reader.take_arguments()
        if not self._is_told:
            self._deltas.append(ToolCallDelta(self._num_calls, self._make_id(), self._reader.name, arguments))
        elif arguments:
            self._deltas.append(ToolCallDelta(self._num_calls, None, None, arguments))
        self._is_told = True


def _num_begun(text: str, tag: str) -> int:
    """Returns the length of the longest end of the text that the tag begins with."""
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
