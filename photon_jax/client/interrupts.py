"""Interrupts: holds signals back while the host is in the middle of its books, and lets them through right after."""

import _signal  # type: ignore[import-not-found]  # `signal` wraps it in enums: 20 us for what takes 1 us here
import threading
from collections.abc import Callable
from types import FrameType

_NUMBERS = tuple(range(1, 32))  # the signals that have a name


class HeldInterrupts:
    """Holds signals back while it is open: one that comes meanwhile is handled, as ever, when it is left.

    Python calls a signal's handler in the main thread, between any two instructions, and the handler may raise there,
    as that of Ctrl-C does, or that of an alarm that ends what takes too long: in the middle of a step it would leave a
    block neither free nor held. Beside the main thread, and where the process ignores or ends at the signal, there is
    nothing to hold back and nothing is done.
    """

    def __init__(self) -> None:
        self._usual: dict[int, Callable[[int, FrameType | None], object]] = {}  # by number of the signal
        self._noted: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handlers = zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True)
        self._usual = {number: usual for number, usual in handlers if callable(usual)}
        try:
            for number in self._usual:
                _signal.signal(number, self._note)
        except BaseException:  # of a signal that was not held yet
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            self._handle_noted()

    def _restore(self) -> None:
        try:
            for number, usual in self._usual.items():
                _signal.signal(number, usual)
        except BaseException:  # of a signal that is not held any longer
            self._restore()
            raise

    def _handle_noted(self) -> None:
        if self._noted:
            number, frame = self._noted.popitem()
            try:
                self._usual[number](number, frame)
            finally:
                self._handle_noted()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted[number] = frame
