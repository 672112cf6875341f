"""Bounds of connections: how many there are, and for how long a reader may take nothing."""

import asyncio
import contextlib
import socket

import uvicorn
from helpers.web_process import error_of, status_of

from photon_jax.server.connections import guarded_protocol
from photon_jax.server.limits import MAX_HEADER_BYTES

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
PIECE = b"x" * 1024
SMALL = 4096


@contextlib.asynccontextmanager
async def listening(app, *, timeout_s=30.0, max_connections=10):
    """Serves an application in this event loop, from sockets that buffer little; yields the port."""
    protocol = guarded_protocol(timeout_s=timeout_s, max_connections=max_connections)
    config = uvicorn.Config(app, http=protocol, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        serving = asyncio.create_task(server._serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


def connect(port):
    """Returns a connection that takes little ahead."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    connection.connect(("127.0.0.1", port))
    return connection


class Endless:
    """Writes until its client is gone; counts those that are served right now."""

    def __init__(self):
        self.num_served = 0

    async def __call__(self, scope, receive, send):
        self.num_served += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.create_task(receive())
        await receive()
        while not gone.done():
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            await asyncio.sleep(0)
        self.num_served -= 1


def test_a_reader_that_takes_nothing_is_let_go_and_one_that_reads_is_not():
    async def main():
        app = Endless()
        async with listening(app, timeout_s=1.0) as port:
            with connect(port) as idle:
                idle.sendall(REQUEST)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(REQUEST)
                while app.num_served < 2:
                    await asyncio.sleep(0.01)
                while app.num_served == 2:
                    assert await reader.read(len(PIECE))
                for _ in range(100):
                    assert await reader.read(len(PIECE))
                assert app.num_served == 1
                writer.close()

    asyncio.run(asyncio.wait_for(main(), 100))


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_a_head_is_not_too_long_because_a_long_body_came_with_it():
    body = b"x" * (2 * MAX_HEADER_BYTES)
    first = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    begin, end = REQUEST[:20], REQUEST[20:]

    async def main():
        async with listening(hello) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first + begin)
            assert status_of(await reader.readuntil(b"0\r\n\r\n")) == 200
            writer.write(end)
            assert status_of(await reader.read()) == 200
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 100))


def test_connections_beyond_the_bound_are_refused_until_one_is_closed():
    async def ask(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            return await reader.read()

    async def main():
        async with listening(hello, max_connections=3) as port:
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            answer = await ask(port)
            assert status_of(answer) == 503 and b"retry-after: 1" in answer
            assert "as many connections as it takes" in error_of(answer)["message"]
            for reader, writer in held:
                writer.write(REQUEST)
                assert status_of(await reader.read()) == 200
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            assert status_of(await reader.read()) == 200
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 100))
