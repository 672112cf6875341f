"""A signal at a chosen line of the library's own code, as Python delivers it: through its handler, which raises."""

import signal
import sys
from pathlib import Path

import photon_jax

ROOT = str(Path(photon_jax.__file__).parent)


def interrupt_at(line, call, *, number=signal.SIGINT, error=KeyboardInterrupt):
    """Calls `call` with a signal before the n-th line of the library that this thread runs in it; -1 for none.

    Lines that run for a `__del__` don't count: Python drops what is raised there.

    Args:
      number: of the signal; Ctrl-C is that of SIGINT.
      error: what its handler raises.

    Returns what it gives, and how many lines there were, or None where the error came out of it.
    """
    num_lines = 0

    def trace(frame, event, _):
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            if num_lines == line:
                signal.raise_signal(number)
        return trace

    def trace_call(frame, event, arg):
        is_ours = frame.f_code.co_filename.startswith(ROOT)
        return trace if is_ours and not _is_for_del(frame) else None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        return call(), num_lines
    except error:
        return None
    finally:
        sys.settrace(before)


def _is_for_del(frame):
    while frame is not None and frame.f_code.co_filename.startswith(ROOT):
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
