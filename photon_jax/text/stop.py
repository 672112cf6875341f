"""Stop strings over a stream of text: find the first, hold back what may begin one. Host only."""

import collections
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StopMatch:
    """What one piece of text led to.

    Attributes:
      text: what may be shown now.
      stop: the stop string that ended the stream; None while it goes on.
    """

    text: str
    stop: str | None = None


class StopMatcher:
    """Watches one stream for stop strings.

    The stop string that is complete first ends the stream; of several complete at the same character, the longest. So
    the result does not depend on how the text was cut into pieces. Held back is exactly the longest end of the text
    that a stop string begins with.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Builds the matcher.

        Args:
          stops: non-empty strings; none at all is allowed.
          include_stop: whether the stop string stays at the end of the text.
        """
        self._include_stop = include_stop
        self._next: list[dict[str, int]] = [{}]  # children of each trie node; node 0 is the root
        self._fail: list[int] = [0]  # node of the longest proper suffix that is a prefix of a stop string
        self._depth: list[int] = [0]
        self._match: list[str | None] = [None]  # longest stop string that ends at the node
        for stop in stops:
            self._insert(stop)
        self._link()
        self._node = 0
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Returns what the new text lets out, and the stop string if it completes one; call no more after that."""
        if len(self._next) == 1:
            return StopMatch(text=text)
        known = self._held + text
        node = self._node
        for index, character in enumerate(text, start=len(self._held)):
            while node and character not in self._next[node]:
                node = self._fail[node]
            node = self._next[node].get(character, 0)
            stop = self._match[node]
            if stop is not None:
                self._node, self._held = 0, ""
                end = index + 1
                return StopMatch(text=known[: end if self._include_stop else end - len(stop)], stop=stop)
        self._node = node
        cut = len(known) - self._depth[node]
        self._held = known[cut:]
        return StopMatch(text=known[:cut])

    def save(self) -> tuple[int, str]:
        """Returns what `restore` takes to go back here."""
        return self._node, self._held

    def restore(self, saved: tuple[int, str]) -> None:
        """Forgets what was pushed since."""
        self._node, self._held = saved

    def flush(self) -> str:
        """Returns the text held back, at the end of a stream that no stop string ended."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
            node = self._next[node][character]
        self._match[node] = stop

    def _link(self) -> None:
        """Sets each node's fallback, nearest to the root first, as in the Aho-Corasick automaton."""
        queue = collections.deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                fall = self._fail[node]
                while fall and character not in self._next[fall]:
                    fall = self._fail[fall]
                self._fail[child] = self._next[fall].get(character, 0)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)
