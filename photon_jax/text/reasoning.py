"""Reasoning: tells what a model thinks, `<think>...</think>` before its answer, from the answer. Host only."""

import dataclasses
from collections.abc import Callable
from typing import Literal

OPENING, CLOSING = "<think>", "</think>"
Start = Literal["before", "inside", "after"]
_SPACE = " \t\n\r"


def shows_reasoning(chat_template: str | None) -> bool:
    """Returns whether a chat template knows of reasoning, so that answers are to be searched for it."""
    return chat_template is not None and CLOSING in chat_template


def reasoning_start(prompt: str, *, continued: str = "") -> Start:
    """Returns where in its reasoning an answer begins.

    Args:
      prompt: text of the prompt, or its end: templates open the reasoning there, or open and close it to forbid it.
      continued: the content of the final message where the answer continues it.

    Returns:
      "before" where the model itself may open its reasoning, "inside" where it is open, "after" where it is over.
    """
    if continued:
        return "inside" if continued.rfind(OPENING) > continued.rfind(CLOSING) else "after"
    end = prompt.rstrip()
    if end.endswith(OPENING):
        return "inside"
    return "after" if end.endswith(CLOSING) else "before"


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What a piece of text added to the reasoning and to the answer."""

    reasoning: str
    content: str


def split_reasoning(text: str, start: Start = "before") -> ReasoningDelta:
    """Returns the reasoning and the content of a whole answer."""
    splitter = ReasoningSplitter(start)
    parts = (splitter.push(text), splitter.flush())
    return ReasoningDelta("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


class ReasoningSplitter:
    """Splits the text of one answer, as it comes, into reasoning and content.

    However the text is cut into pieces, the deltas joined are the same. Reasoning can only stand at the beginning;
    without the end of it, all is reasoning. Line breaks beside the tags belong to neither.
    """

    def __init__(self, start: Start = "before") -> None:
        """Begins an answer; see `reasoning_start`."""
        states = {"before": self._before, "inside": self._at_reasoning, "after": self._in_content}
        self._state: Callable[[], bool] = states[start]
        self._text = ""  # not understood yet
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def push(self, text: str) -> ReasoningDelta:
        """Returns what the next piece of text adds."""
        self._text += text
        while self._state():
            pass
        return self._take()

    def flush(self) -> ReasoningDelta:
        """Returns what the end of the text adds."""
        is_reasoning = self._state in (self._at_reasoning, self._in_reasoning)
        (self._reasoning if is_reasoning else self._content).append(self._text)
        self._text = ""
        return self._take()

    def _take(self) -> ReasoningDelta:
        delta = ReasoningDelta("".join(self._reasoning), "".join(self._content))
        self._reasoning, self._content = [], []
        return delta

    # Each state takes what it can from the text, and returns whether another one may go on with what is left.

    def _before(self) -> bool:
        stripped = self._text.lstrip(_SPACE)
        if stripped.startswith(OPENING):
            self._text = stripped[len(OPENING) :]
            self._state = self._at_reasoning
            return True
        if OPENING.startswith(stripped):
            return False
        self._state = self._in_content
        return True

    def _at_reasoning(self) -> bool:
        self._text = self._text.lstrip("\n")
        if not self._text:
            return False
        self._state = self._in_reasoning
        return True

    def _in_reasoning(self) -> bool:
        at = self._text.find(CLOSING)
        if at >= 0:
            self._reasoning.append(self._text[:at].rstrip("\n"))
            self._text = self._text[at + len(CLOSING) :]
            self._state = self._at_content
            return True
        sizes = range(min(len(self._text), len(CLOSING) - 1), 0, -1)
        num_held = next((size for size in sizes if self._text.endswith(CLOSING[:size])), 0)
        shown = self._text[: len(self._text) - num_held].rstrip("\n")
        self._reasoning.append(shown)
        self._text = self._text[len(shown) :]
        return False

    def _at_content(self) -> bool:
        self._text = self._text.lstrip("\n")
        if not self._text:
            return False
        self._state = self._in_content
        return True

    def _in_content(self) -> bool:
        self._content.append(self._text)
        self._text = ""
        return False
