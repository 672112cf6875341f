"""Interrupts: holds Ctrl-C back while the host is in the middle of its books, and lets it through right after."""

import _signal  # type: ignore[import-not-found]  # `signal` wraps it in enums: 20 us for what takes 1 us here
import threading
from collections.abc import Callable
from types import FrameType


class HeldInterrupts:
    """Holds Ctrl-C back while it is open: one that comes meanwhile is handled, as ever, when it is left.

    Python calls a signal's handler in the main thread, between any two instructions, and the usual one raises
    KeyboardInterrupt there: in the middle of a step it would leave a block neither free nor held. Beside the main
    thread, and where the process ignores or ends at the signal, there is nothing to hold back and nothing is done.
    """

    def __init__(self) -> None:
        self._usual: Callable[[int, FrameType | None], object] | None = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            usual = _signal.getsignal(_signal.SIGINT)
            if callable(usual):
                self._usual = usual
                _signal.signal(_signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._usual is not None:
            _signal.signal(_signal.SIGINT, self._usual)
            if self._noted is not None:
                self._usual(*self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame
