"""A client that leaves ends its requests: their blocks come back, and others go on."""

import asyncio
import socket

import httpx
import pytest
from helpers.web_server import MODEL, serving, tiny_llm, wait_until

from photon_jax.server import completions

LONG = {"ignore_eos": True, "seed": 1}
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me everything"}], "max_tokens": 200},
    "/v1/completions": {"prompt": ["Tell me", "everything"], "max_tokens": 200, "n": 2},
}


@pytest.fixture(scope="module")
def served():
    with serving(tiny_llm(), keep_alive_s=0.2) as served:
        yield served


def is_idle(served):
    stats = served.state.engine.stats()
    return stats.num_running == stats.num_waiting == 0 and served.num_held_blocks() == 0


def send(served, path, body):
    """Sends a request on a socket of its own and returns that."""
    host, port = served.url.removeprefix("http://").split(":")
    payload = httpx.Request("POST", f"{served.url}{path}", json=body)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}Content-Length: {len(payload.content)}\r\n\r\n".encode() + payload.content)
    return connection


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_aborts_its_request(served, path, is_streamed):
    body = {**PATHS[path], **LONG, "stream": is_streamed}
    num_finished = served.state.engine.stats().num_finished["length"]
    with send(served, path, body) as connection:
        wait_until(lambda: served.state.engine.stats().num_running > 0)
        if is_streamed:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: is_idle(served))
    assert served.state.engine.stats().num_finished["length"] == num_finished, "it was computed to its end"


def test_a_client_that_leaves_at_once_aborts_its_request(served):
    for path, body in PATHS.items():
        for is_streamed in (False, True):
            send(served, path, {**body, **LONG, "stream": is_streamed}).close()
    wait_until(lambda: is_idle(served))


def test_those_who_stay_get_their_answers_while_others_leave(served):
    body = {"model": MODEL, "prompt": "Stay", "max_tokens": 40, "seed": 2}
    wanted = served.post("/v1/completions", body).json()["choices"][0]["text"]

    async def stay(client):
        answer = await client.post("/v1/completions", json=body, timeout=300)
        return answer.json()["choices"][0]["text"]

    async def leave(client, number):
        path = list(PATHS)[number % 2]
        payload = {**PATHS[path], **LONG, "stream": number % 4 < 2}
        task = asyncio.create_task(client.post(path, json=payload, timeout=300))
        await asyncio.sleep(0.05 * number)
        task.cancel()

    async def run():
        async with httpx.AsyncClient(base_url=served.url) as client:
            stays = [asyncio.create_task(stay(client)) for _ in range(3)]
            await asyncio.gather(*(leave(client, number) for number in range(12)))
            return await asyncio.gather(*stays)

    assert asyncio.run(run()) == [wanted] * 3
    wait_until(lambda: is_idle(served))


def test_a_comment_comes_while_a_stream_has_nothing_to_say(served, monkeypatch):
    async def silence(*_):
        await asyncio.sleep(1.0)
        yield b"data: [DONE]\n\n"

    monkeypatch.setattr(completions, "chunk_events", silence)
    answer = served.post("/v1/completions", {"prompt": "x", "stream": True})
    assert answer.text.startswith(": keep-alive\n\n")
    assert answer.text.endswith("data: [DONE]\n\n")
    wait_until(lambda: is_idle(served))
