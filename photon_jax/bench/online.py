"""Online latency: requests come at random times, as a Poisson process, and each delivery of tokens is timed."""

import asyncio
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np

from photon_jax.bench.report import quantiles
from photon_jax.bench.workloads import Workload
from photon_jax.client.async_llm import AsyncLLM
from photon_jax.client.submission import Prompt
from photon_jax.errors import ConfigError, EngineDeadError
from photon_jax.request import SamplingParams

# prompt and number of output tokens -> the tokens of each delivery, as they come
Send = Callable[[tuple[int, ...], int], AsyncIterator[int]]

CONNECT_S = 60.0  # that a server may take to accept a connection
MAX_EVENT_BYTES = 1 << 20  # of a streamed answer, which is read line by line
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he")


@dataclasses.dataclass(slots=True)
class Timeline:
    """When what of one request happened, seconds of `time.perf_counter`.

    Attributes:
      deliveries: time and number of tokens of each.
    """

    sent_at: float
    deliveries: list[tuple[float, int]] = dataclasses.field(default_factory=list)


def engine_sender(engine: AsyncLLM) -> Send:
    """Returns what sends requests to an engine in this process: greedy, and ended by their length alone."""

    async def send(prompt: tuple[int, ...], output_len: int) -> AsyncIterator[int]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        async for update in engine.stream(Prompt(token_ids=prompt), params):
            yield sum(len(delta.token_ids) for delta in update.deltas)

    return send


async def run_online(
    send: Send, workload: Workload, rate: float, *, max_concurrency: int | None = None, seed: int = 0
) -> list[Timeline]:
    """Sends each request at its time and waits for all; gaps between requests are exponential with mean 1 / rate.

    Args:
      rate: infinite for all at once.
      max_concurrency: most requests that are on their way at a time, None for no bound; a request that waits for others
        to end counts as sent when they have.
    """
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, len(workload.prompts))
    places = asyncio.Semaphore(len(gaps) if max_concurrency is None else max_concurrency)
    begin = time.perf_counter()

    async def serve(arrival_s: float, prompt: tuple[int, ...], output_len: int) -> Timeline:
        await asyncio.sleep(max(0.0, begin + arrival_s - time.perf_counter()))
        async with places:
            timeline = Timeline(sent_at=time.perf_counter())
            async for num_tokens in send(prompt, output_len):
                if num_tokens:
                    timeline.deliveries.append((time.perf_counter(), num_tokens))
        return timeline

    requests = zip(np.cumsum(gaps).tolist(), workload.prompts, workload.output_lens, strict=True)
    return await asyncio.gather(*(serve(*request) for request in requests))


def describe_online(timelines: Sequence[Timeline], rate: float) -> dict[str, object]:
    """Returns the latencies of a run, seconds.

    The time between two tokens (itl) is that between two deliveries divided by the tokens that the later one brought,
    counted once for each of those tokens.
    """
    timelines = [each for each in timelines if each.deliveries]
    if not timelines:
        raise EngineDeadError("no request got a token; see what the server says")
    pauses, itl = [], []
    for each in timelines:
        for (before, _), (now, num_tokens) in zip(each.deliveries, each.deliveries[1:], strict=False):
            pauses.append(now - before)
            itl += [(now - before) / num_tokens] * num_tokens
    total_s = timelines_s(timelines)
    num_tokens = sum(count for each in timelines for _, count in each.deliveries)
    return {
        "rate": None if math.isinf(rate) else rate,
        "num_served": len(timelines),
        "total_s": round(total_s, 4),
        "requests_per_s": round(len(timelines) / total_s, 3),
        "output_tokens_per_s": round(num_tokens / total_s, 1),
        "ttft_s_quantiles": quantiles([each.deliveries[0][0] - each.sent_at for each in timelines]),
        "itl_s_quantiles": quantiles(itl),
        "delivery_s_quantiles": quantiles(pauses),
        "total_s_quantiles": quantiles([each.deliveries[-1][0] - each.sent_at for each in timelines]),
    }


def timelines_s(timelines: Sequence[Timeline]) -> float:
    """Returns the seconds from the first request to the last token."""
    last = max(each.deliveries[-1][0] for each in timelines if each.deliveries)
    return last - min(each.sent_at for each in timelines)


@contextlib.asynccontextmanager
async def url_sender(url: str, model: str) -> AsyncIterator[Send]:
    """Yields what sends requests to the chat completions of an OpenAI-compatible server.

    A server takes text: a prompt is as many common words as it would have tokens. What an event brings is told by the
    usage so far in it, which is asked for; where a server leaves it out, each event with text counts as one token.

    Args:
      url: up to its version, such as "http://localhost:8000/v1".
      model: the name that the server knows it by.

    Raises:
      ConfigError: aiohttp is not installed; later, where requests are sent, nothing answers there, or not as it should.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError("--url needs aiohttp; pip install 'photon_jax[bench]'") from error

    endpoint = f"{url.rstrip('/')}/chat/completions"

    async def send(prompt: tuple[int, ...], output_len: int) -> AsyncIterator[int]:
        num_tokens = 0
        try:
            async with session.post(endpoint, json=_chat_body(model, prompt, output_len)) as response:
                if response.status != HTTPStatus.OK:
                    raise ConfigError(f"{url} answered {response.status}: {await response.text(errors='replace'):.300}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        so_far = tokens_so_far(json.loads(line.removeprefix(b"data: ")), num_tokens)
                        yield so_far - num_tokens
                        num_tokens = so_far
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"--url={url} can't be measured: {_reason(error)}") from error

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=MAX_EVENT_BYTES) as session:
        yield send


def _reason(error: Exception) -> str:
    """Returns what an error says, and its name where that may be too little, such as an address alone."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _chat_body(model: str, prompt: tuple[int, ...], output_len: int) -> dict[str, Any]:
    text = " ".join([WORDS[token % len(WORDS)] for token in prompt])
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def tokens_so_far(event: dict[str, Any], before: int) -> int:
    """Returns how many output tokens of a stream have come with this event, given those before it."""
    choices, usage = event.get("choices"), event.get("usage")
    if not isinstance(choices, list) or not choices:
        return before
    so_far = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(so_far, int):
        return max(before, so_far)
    return before + any((choice.get("delta") or {}).get("content") for choice in choices)
