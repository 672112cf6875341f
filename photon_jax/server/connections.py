"""Connections: HTTP/1.1 with bounds on how many there are, and on how long a client may keep one waiting."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from photon_jax.server.errors import RETRY_AFTER_S, error_response
from photon_jax.server.limits import MAX_HEADER_BYTES

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which by itself waits forever: for a request's head, and for a reader that takes nothing.

    What is refused before there is a request gets its error in the form of all others. Heads that never end are bounded
    here, those that came whole by `limits.HeaderLimits`.

    Attributes:
      timeout_s: seconds that a client has for a request's head, and to take what waits for it.
      max_connections: open ones; further ones are refused.
    """

    timeout_s: float
    max_connections: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the wait for the first request."""
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._has_begun_head = False
        self._is_in_head = False  # the parser is in the middle of one
        self._has_completed = False  # a request since the last data
        self._num_head_bytes = 0
        if len(self.connections) > self.max_connections:
            self._refuse(503, "the server has as many connections as it takes; try again later")
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all waits."""
        self._stop_awaiting_head()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on; from the first byte of a request its head has `timeout_s` to be complete."""
        before = self.cycle
        self._has_begun_head, self._has_completed = True, False
        super().data_received(data)
        if self.cycle is not before:
            self._stop_awaiting_head()
        elif self._head_timer is None and (before is None or before.response_complete):
            self._await_head()
        if self._is_in_head and not self._has_completed:  # else some of it was another request's
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(431, "the request's headers are longer than they may be")

    def on_message_begin(self) -> None:
        """Begins to count a head."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Begins to serve the request."""
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Takes note that the request is here."""
        self._has_completed = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP."""
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        """Gives a reader that takes too little `timeout_s` to take the rest."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Goes on."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.timeout_s, self._end_late_head)

    def _stop_awaiting_head(self) -> None:
        self._has_begun_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_late_head(self) -> None:
        if self._has_begun_head:
            self._refuse(408, f"the request's headers did not come within {self.timeout_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answers without a request, and closes."""
        body = error_response(status, message).body
        retry = b"retry-after: %d\r\n" % RETRY_AFTER_S if status == 503 else b""
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s"
            % (status, _REASONS[status], len(body), retry, bytes(body))
        )
        self.transport.close()


def guarded_protocol(*, timeout_s: float, max_connections: int) -> type[GuardedProtocol]:
    """Returns the protocol with its bounds; uvicorn makes one for each connection."""

    class Bounded(GuardedProtocol):
        pass

    Bounded.timeout_s, Bounded.max_connections = timeout_s, max_connections
    return Bounded
