"""Many clients at once: streams that are read together, one that watches whether others disturb it, and rude ones."""

import asyncio
import contextlib
import threading

import httpx
from helpers.web_process import events_of

UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=20)


def text_and_reason(events):
    """Returns the text that a stream of completions brought, and why it ended."""
    choices = [event["choices"][0] for event in events if event.get("choices")]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"] if choices else None


def ask(url, body):
    """Returns the text of a completion that is not streamed, and why it ended."""
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"], choice["finish_reason"]


def stream_all(url, bodies):
    """Streams all bodies at once; returns text and reason of each."""

    async def one(client, body):
        async with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            events, is_done = events_of([line async for line in response.aiter_lines()])
        assert is_done
        return text_and_reason(events)

    async def main():
        async with httpx.AsyncClient(timeout=300, limits=UNLIMITED) as client:
            return await asyncio.gather(*(one(client, body) for body in bodies))

    return asyncio.run(main())


@contextlib.contextmanager
def undisturbed(url, body):
    """Asks the same again and again while others do what they do: every answer must be that of the first time."""
    expected = ask(url, body)
    answers, is_over = [], threading.Event()

    def keep_asking():
        while not is_over.wait(0.02) or not answers:
            try:
                answers.append(ask(url, body))
            except Exception as error:
                answers.append(error)
                return

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert set(map(str, answers)) == {str(expected)}
