"""Where a request's work is prepared: what is short in the event loop, what may take a while in a thread."""

import asyncio
import threading
import types

import pytest

from photon_jax.server.answering import MAX_SHORT_BYTES, make_job


class Sent:
    """A request whose body has come."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes

    async def body(self):
        return b"x" * self.num_bytes


def thread_of(num_bytes, **asked):
    """Returns the thread that prepares a request of so many bytes."""
    body = types.SimpleNamespace(**({"structured_outputs": None, "response_format": None} | asked))
    state = types.SimpleNamespace(forms=None)
    return asyncio.run(make_job(lambda *_: threading.current_thread(), state, None, body, Sent(num_bytes)))


@pytest.mark.parametrize(
    ("num_bytes", "asked", "is_at_once"),
    [
        (MAX_SHORT_BYTES, {}, True),
        (MAX_SHORT_BYTES, {"tool_choice": "auto"}, True),
        (MAX_SHORT_BYTES + 1, {}, False),
        (10, {"response_format": {"type": "json_object"}}, False),
        (10, {"structured_outputs": {"regex": "a"}}, False),
        (10, {"tool_choice": "required"}, False),
    ],
)
def test_a_short_request_is_prepared_at_once_and_a_long_one_or_one_with_a_form_in_a_thread(
    num_bytes, asked, is_at_once
):
    assert (thread_of(num_bytes, **asked) is threading.main_thread()) == is_at_once
