"""JSON scan: follows a JSON value character by character, as far as it has come. Host only."""

import re
from typing import Literal

Status = Literal["open", "done", "over", "wrong"]

SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSERS = {"{": "}", "[": "]"}


class JsonScanner:
    """Tells for each character whether a JSON value (RFC 8259) can go on with it."""

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets that are not closed yet
        self._state = "value"
        self._word = ""  # of a number or a literal
        self._is_key = False
        self._num_hex = 0

    def push(self, char: str) -> Status:
        """Takes the next character.

        Returns "open" while the value goes on; "done" with its last character; "over" where a number had ended before
        this character, which is no part of it; "wrong" where the value can't have this character. No more may follow
        after the last three.
        """
        status: Status = getattr(self, f"_in_{self._state}")(char)
        return status

    def _in_value(self, char: str) -> Status:
        if char in SPACE:
            return "open"
        if char in "{[":
            self._open.append(char)
            return self._go("first_key" if char == "{" else "first_item")
        if char == '"':
            return self._begin_string(is_key=False)
        self._word = char
        if char in "-0123456789":
            return self._go("number")
        return self._go("literal") if char in _LITERALS else "wrong"

    def _in_first_item(self, char: str) -> Status:
        return self._close() if char == "]" else self._in_value(char)

    def _in_first_key(self, char: str) -> Status:
        return self._close() if char == "}" else self._in_key(char)

    def _in_key(self, char: str) -> Status:
        if char in SPACE:
            return "open"
        return self._begin_string(is_key=True) if char == '"' else "wrong"

    def _in_colon(self, char: str) -> Status:
        if char in SPACE:
            return "open"
        return self._go("value") if char == ":" else "wrong"

    def _in_next(self, char: str) -> Status:
        if char in SPACE:
            return "open"
        if char == ",":
            return self._go("key" if self._open[-1] == "{" else "value")
        return self._close() if char == _CLOSERS[self._open[-1]] else "wrong"

    def _in_string(self, char: str) -> Status:
        if char == "\\":
            return self._go("escape")
        if char == '"':
            return self._go("colon") if self._is_key else self._end_value()
        return "open" if char >= " " else "wrong"

    def _in_escape(self, char: str) -> Status:
        self._num_hex = 0
        if char == "u":
            return self._go("hex")
        return self._go("string") if char in '"\\/bfnrt' else "wrong"

    def _in_hex(self, char: str) -> Status:
        self._num_hex += 1
        if char not in "0123456789abcdefABCDEF":
            return "wrong"
        return self._go("string") if self._num_hex == 4 else "open"

    def _in_literal(self, char: str) -> Status:
        self._word += char
        wanted = _LITERALS[self._word[0]]
        if self._word == wanted:
            return self._end_value()
        return "open" if wanted.startswith(self._word) else "wrong"

    def _in_number(self, char: str) -> Status:
        if char in "0123456789+-.eE":
            self._word += char
            return "open"
        if not _NUMBER.fullmatch(self._word):
            return "wrong"
        return "over" if self._end_value() == "done" else self.push(char)

    def _go(self, state: str) -> Status:
        self._state = state
        return "open"

    def _begin_string(self, *, is_key: bool) -> Status:
        self._is_key = is_key
        return self._go("string")

    def _close(self) -> Status:
        self._open.pop()
        return self._end_value()

    def _end_value(self) -> Status:
        return self._go("next") if self._open else "done"
