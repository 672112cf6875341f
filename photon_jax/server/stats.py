"""Endpoint /api/stats: what the engine does right now, in numbers that a page can draw."""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from photon_jax.server.documents import errors, event_stream
from photon_jax.server.health import describe
from photon_jax.server.state import Phase, ServerState
from photon_jax.server.streaming import EventStream, event

STREAM_S = 0.25  # between two events


class Slot(TypedDict):
    """One running sequence: tokens of prompt and output, and of the output alone."""

    request_id: str
    num_tokens: int
    num_output_tokens: int


class Stats(TypedDict):
    """The engine at a moment; all numbers are 0 while the model loads. See `stats.EngineStats` for what they mean.

    Attributes:
      message: what the server does right now, for people.
      prompt_tokens_per_s, output_tokens_per_s, steps_per_s: over the last `window_s` seconds.
      num_finished: sequences that ended, by reason: stop, length, abort.
      slots: the running sequences in the order of their arrival.
    """

    phase: Phase
    message: str
    model: str
    uptime_s: float
    max_num_seqs: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_finished: dict[str, int]
    num_preemptions: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    window_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    steps_per_s: float
    slots: list[Slot]


_PLAIN = (
    *("max_num_seqs", "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_steps"),
    *("num_prompt_tokens", "num_output_tokens", "num_preemptions", "num_prefix_query_tokens", "num_prefix_hit_tokens"),
)
_RATES = ("window_s", "prompt_tokens_per_s", "output_tokens_per_s", "steps_per_s")


def router(state: ServerState) -> APIRouter:
    """Returns the endpoint."""
    routes = APIRouter(tags=["health"])
    content = event_stream("Each event is a Stats object.")

    @routes.get("/api/stats", response_model=None, responses={200: {"model": Stats, "content": content}, **errors(400)})
    async def stats(stream: bool = False) -> Stats | Response:
        """The engine right now; with stream=true several times a second, until the server ends."""
        return EventStream(_events(state), keep_alive_s=0) if stream else read_stats(state)

    return routes


def read_stats(state: ServerState) -> Stats:
    """Returns the numbers of this moment."""
    if state.engine is None:
        empty = {**dict.fromkeys((*_PLAIN, *_RATES), 0), "num_finished": {}, "slots": []}
        return cast(Stats, {**describe(state), **empty})
    stats = state.engine.stats()
    numbers = {
        **{name: getattr(stats, name) for name in _PLAIN},
        **state.rates.look(stats)._asdict(),
        "num_finished": dict(stats.num_finished),
        "slots": [slot._asdict() for slot in stats.slots],
    }
    return cast(Stats, {**describe(state), **numbers})


async def _events(state: ServerState) -> AsyncGenerator[bytes, None]:
    yield event(read_stats(state))
    while state.phase != "draining":
        await asyncio.sleep(STREAM_S)
        yield event(read_stats(state))
