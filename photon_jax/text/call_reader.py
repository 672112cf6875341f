"""Call reader: takes the JSON object of one tool call apart while it comes. Host only."""

import json
from collections.abc import Callable

from photon_jax.text.json_scan import SPACE, JsonScanner, Status

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = (_NAME, *_ARGUMENTS, "type", "id")


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}` character by character, its keys in any order.

    The arguments are an object, the text of one in a string, or null for an empty one.

    Attributes:
      name: of the function, once it is known.
    """

    def __init__(self, *, is_strict: bool) -> None:
        """Begins a call.

        Args:
          is_strict: whether other keys than those of calls, or arguments that are left out, show that it is no call.
        """
        self.name: str | None = None
        self._is_strict = is_strict
        self._arguments: list[str] = []  # not taken yet
        self._has_arguments = False  # the arguments have begun
        self._is_growing = True  # what there is of them is final, be there more to come or not
        self._state: Callable[[str], Status] = self._before
        self._scanner = JsonScanner()
        self._key = ""
        self._word: list[str] = []  # the characters of the key or the value that is being read

    @property
    def has_begun(self) -> bool:
        """Whether the function is known and its arguments begin to come."""
        return self.name is not None and self._has_arguments and self._is_growing

    def take_arguments(self) -> str:
        """Returns the text of the arguments that came since the last call; see `has_begun`."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, char: str) -> Status:
        """Takes the next character; returns "open", "done" with the object's last one, or "wrong" if it is no call."""
        return self._state(char)

    def _before(self, char: str) -> Status:
        if char in SPACE:
            return "open"
        self._state = self._before_key
        return "open" if char == "{" else "wrong"

    def _before_key(self, char: str) -> Status:
        if char in SPACE:
            return "open"
        self._begin(self._in_key)
        return self._in_key(char) if char == '"' else "wrong"

    def _in_key(self, char: str) -> Status:
        self._word.append(char)
        status = self._scanner.push(char)
        if status != "done":
            return status
        self._key = json.loads("".join(self._word))
        self._state = self._before_colon
        is_second = (self._key == _NAME and self.name is not None) or (self._key in _ARGUMENTS and self._has_arguments)
        is_other = self._is_strict and self._key not in _CALL_KEYS
        return "wrong" if is_second or is_other else "open"

    def _before_colon(self, char: str) -> Status:
        if char in SPACE:
            return "open"
        self._begin(self._before_value)
        return "open" if char == ":" else "wrong"

    def _begin(self, state: Callable[[str], Status]) -> None:
        self._word, self._scanner, self._state = [], JsonScanner(), state

    def _before_value(self, char: str) -> Status:
        if char in SPACE:
            return "open"
        self._state = self._in_value
        if self._key in _ARGUMENTS:
            self._has_arguments, self._is_growing = True, char == "{"
        starts = {_NAME: '"', **dict.fromkeys(_ARGUMENTS, '{"n')}.get(self._key)
        return self._in_value(char) if starts is None or char in starts else "wrong"

    def _in_value(self, char: str) -> Status:
        status = self._scanner.push(char)
        if status in ("open", "done"):
            is_streamed = self._key in _ARGUMENTS and self._is_growing
            (self._arguments if is_streamed else self._word).append(char)
        if status in ("open", "wrong"):
            return status
        self._state = self._after_value
        if not self._take_value():
            return "wrong"
        return "open" if status == "done" else self._after_value(char)

    def _take_value(self) -> bool:
        """Takes over a whole value; returns False if no call can have it."""
        if self._key == _NAME:
            self.name = json.loads("".join(self._word))
            return bool(self.name) and _is_unicode(self.name)
        if self._key in _ARGUMENTS and not self._is_growing:
            text = json.loads("".join(self._word)) or "{}"
            self._is_growing = _is_unicode(text) and _is_object(text)
            self._arguments.append(text)
            return self._is_growing
        return True

    def _after_value(self, char: str) -> Status:
        if char in SPACE:
            return "open"
        if char == ",":
            self._state = self._before_key
            return "open"
        if char != "}" or self.name is None:
            return "wrong"
        if not self._has_arguments:
            self._arguments.append("{}")
            return "wrong" if self._is_strict else "done"
        return "done"


def _is_unicode(text: str) -> bool:
    """Returns whether no half of a surrogate pair is in a text, which an escape can bring."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
