"""EventStream: a response of server-sent events that ends when the client leaves, and never is silent for long."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from photon_jax.server.errors import ClientLeftError, error_event
from photon_jax.server.json_answer import json_bytes

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must pass events on as they come
# where Python's splitlines, and so clients over httpx's iter_lines, see a line's end, in the middle of a JSON text
_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
_T = TypeVar("_T")


def event(value: Mapping[str, Any]) -> bytes:
    """Returns a JSON object as one event, in one line."""
    return b"data: " + _line(value) + b"\n\n"


def _line(value: Any) -> bytes:
    data = json_bytes(value)
    for end, escaped in _LINE_ENDS:
        data = data.replace(end, escaped)
    return data


class ChoiceEvents:
    """Makes the events of chunks that differ in their one choice and their usage alone; the rest becomes JSON once."""

    def __init__(self, chunk: Mapping[str, Any]) -> None:
        """Takes a chunk without choices; a usage in it is null, and comes last."""
        before, after = event(chunk).split(b'"choices":[]')  # no text holds that, its quotes are escaped
        self._before, self._after = before + b'"choices":[', b"]" + after
        self._to_usage = self._after.removesuffix(b"null}\n\n")

    def of(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None = None) -> bytes:
        """Returns the event of the chunk with a choice, and with a usage in the place of null."""
        return self._with(_line(choice), usage)

    def of_content(self, index: int, content: str, usage: Mapping[str, Any] | None = None) -> bytes:
        """Returns the event of the chunk with a choice of a chat that goes on with text alone, as most do."""
        text = _line(content)
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (index, text)
        return self._with(choice, usage)

    def _with(self, choice: bytes, usage: Mapping[str, Any] | None) -> bytes:
        if usage is None:
            return self._before + choice + self._after
        return self._before + choice + self._to_usage + json_bytes(usage) + b"}\n\n"


class EventStream(Response):
    """Sends events as they come.

    When the client leaves, `events` is closed, which aborts what makes them. An error in it becomes the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, keep_alive_s: float) -> None:
        """Takes over the events.

        Args:
          events: pieces of the body, each of whole events.
          keep_alive_s: seconds of silence after which a comment line is sent; 0: none is.
        """
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        self._sent_at = time.monotonic()
        writer = asyncio.create_task(self._write(send))
        watcher = asyncio.create_task(until_disconnect(receive))
        watcher.add_done_callback(lambda _: writer.cancel())
        tasks = [writer, watcher]
        silence: asyncio.TimerHandle | None = None
        if self._keep_alive_s:  # most streams end before they need the task
            loop = asyncio.get_running_loop()
            silence = loop.call_later(
                self._keep_alive_s, lambda: tasks.append(asyncio.create_task(self._keep_alive(send)))
            )
        try:
            await asyncio.wait((writer,))
        finally:
            if silence is not None:
                silence.cancel()
            await cancel_all(tasks)
        if not writer.cancelled():
            writer.result()

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with contextlib.suppress(OSError):  # the client left in the middle of a piece
                try:
                    async for piece in events:
                        is_last = piece.endswith(DONE)
                        await self._send(send, piece, is_last=is_last)
                        if is_last:
                            return
                except OSError:
                    raise
                except Exception as error:
                    await self._send(send, event(error_event(error)))
                await self._send(send, b"", is_last=True)

    async def _send(self, send: Send, piece: bytes, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        self._sent_at = time.monotonic()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._sent_at
            if silent_s >= self._keep_alive_s:
                await self._send(send, _KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive_s - silent_s)


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has left; what more of a body comes is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_all(tasks: list["asyncio.Task[Any]"]) -> None:
    """Cancels tasks and waits until each has ended, in whatever way."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of `work`, which is cancelled when the client leaves.

    Args:
      request: its body has been read.

    Raises:
      ClientLeftError: the client left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(until_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        await cancel_all([task, watcher])
