"""An AsyncLLM over FakeRunner, and how tests read it."""

import asyncio
import threading
import types

from helpers.fake_engine import Play

from photon_jax.client.async_llm import AsyncLLM
from photon_jax.client.submission import Prompt
from photon_jax.request import SamplingParams


class AsyncPlay(Play):
    """A play behind an AsyncLLM, which a test opens in its event loop."""

    def open(self, **fields):
        return AsyncLLM(types.SimpleNamespace(client=self.client), **fields)


def ask(prompt, max_tokens=8, **params):
    return Prompt(token_ids=tuple(prompt)), SamplingParams(max_tokens=max_tokens, **params)


def run(main):
    """Runs a test in an event loop of its own; no thread may be left after it."""
    before = threading.active_count()
    asyncio.run(asyncio.wait_for(main(), 100))
    assert threading.active_count() == before


async def read(stream, index=0):
    """Returns the tokens and the finish reason of a sample, put together from its deltas."""
    tokens, reason = [], None
    async for update in stream:
        for delta in update.deltas:
            if delta.index == index:
                assert reason is None, "more came after the end"
                tokens += delta.token_ids
                reason = delta.finish_reason
    return tuple(tokens), reason


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def in_thread(function, *args):
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)
