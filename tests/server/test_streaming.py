"""EventStream without a server: headers, keep-alive comments, errors, and clients that leave."""

import asyncio
import json

import pytest

from photon_jax.errors import RequestError
from photon_jax.server.errors import ClientLeftError
from photon_jax.server.streaming import DONE, ChoiceEvents, EventStream, event, unless_disconnected


class Client:
    """The other side of a response: it takes what comes, and leaves when it is told to."""

    def __init__(self):
        self.left = asyncio.Event()
        self.messages = []

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.messages.append(message)

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.messages)


def respond(events, *, keep_alive_s=0.0, leaves_after_s=None):
    """Returns what a client gets of the events."""

    async def run():
        client = Client()
        if leaves_after_s is not None:
            asyncio.get_running_loop().call_later(leaves_after_s, client.left.set)
        await asyncio.wait_for(EventStream(events, keep_alive_s=keep_alive_s)({}, client.receive, client.send), 60)
        return client

    return asyncio.run(run())


def test_events_come_whole_after_headers_that_keep_proxies_from_holding_them():
    async def events():
        yield event({"text": "né\ud800"})
        yield event({"text": 2})

    client = respond(events())
    headers = dict(client.messages[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert (headers[b"cache-control"], headers[b"x-accel-buffering"]) == (b"no-cache", b"no")
    assert b"content-length" not in headers
    assert client.body == 'data: {"text":"né?"}\n\ndata: {"text":2}\n\n'.encode()
    assert client.messages[-1]["more_body"] is False


def test_the_mark_of_the_end_ends_the_answer_in_the_same_piece():
    async def events():
        yield b"data: 1\n\n"
        yield b"data: 2\n\n" + DONE

    sent = [(message["body"], message["more_body"]) for message in respond(events()).messages[1:]]
    assert sent == [(b"data: 1\n\n", True), (b"data: 2\n\n" + DONE, False)]


@pytest.mark.parametrize("usage", [{}, {"usage": None}])
def test_events_that_share_all_but_their_choice_are_those_of_whole_chunks(usage):
    chunk = {"id": 'a"choices":[]\u2028', "model": "né", "choices": [], **usage}
    events = ChoiceEvents(chunk)
    for text in ("", 'b"choices":[]', "\ud800\x85😀"):
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        text_choice = {"index": 3, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        assert events.of(choice) == event({**chunk, "choices": [choice]})
        assert events.of_content(3, text) == event({**chunk, "choices": [text_choice]})
        if usage:
            told = {"completion_tokens": len(text), "prompt_tokens_details": {"cached_tokens": 0}}
            assert events.of(choice, told) == event({**chunk, "choices": [choice], "usage": told})
            assert events.of_content(3, text, told) == event({**chunk, "choices": [text_choice], "usage": told})


def test_an_event_is_one_line_also_for_clients_that_split_at_every_line_end_of_unicode():
    value = {"text": "a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1d\x1e\r\n😀é"}
    line, blank = event(value).decode().splitlines()
    assert (json.loads(line.removeprefix("data: ")), blank) == (value, "")
    assert "😀é" in line


def test_a_comment_is_sent_in_silence_alone():
    async def events():
        await asyncio.sleep(0.5)
        yield b"data: 1\n\n"

    assert respond(events(), keep_alive_s=0.1).body.startswith(b": keep-alive\n\n: keep-alive\n\n")
    assert respond(events(), keep_alive_s=5.0).body == b"data: 1\n\n"
    assert respond(events()).body == b"data: 1\n\n"


def test_an_error_is_the_last_event():
    async def events():
        yield b"data: 1\n\n"
        raise RequestError("no more")

    assert b'"message":"no more"' in respond(events()).body.splitlines()[2]


def test_events_are_closed_when_the_client_leaves():
    closed = []

    async def events():
        try:
            while True:
                yield b"data: 1\n\n"
                await asyncio.sleep(0.01)
        finally:
            closed.append(True)

    client = respond(events(), leaves_after_s=0.1)
    assert closed == [True]
    assert client.messages[-1].get("more_body") is True


def test_work_is_cancelled_when_the_client_leaves():
    states = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            states.append("ended")

    async def run():
        client = Client()
        asyncio.get_running_loop().call_later(0.05, client.left.set)
        await unless_disconnected(client, work())

    with pytest.raises(ClientLeftError):
        asyncio.run(run())
    assert states == ["ended"]


def test_the_result_or_the_error_of_work_comes_back_while_the_client_is_there():
    async def result():
        return 7

    async def error():
        raise RequestError("wrong")

    async def run(work):
        return await unless_disconnected(Client(), work)

    assert asyncio.run(run(result())) == 7
    with pytest.raises(RequestError, match="wrong"):
        asyncio.run(run(error()))
