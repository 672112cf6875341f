"""What chats and completions share: the head of an answer, usage, progress, and generating for several prompts."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from fastapi.requests import Request

from photon_jax.client.submission import Prompt
from photon_jax.errors import RequestError, naming_prompt
from photon_jax.outputs import RequestOutput
from photon_jax.request import SamplingParams
from photon_jax.server.errors import AbortedError
from photon_jax.server.ids import random_id
from photon_jax.server.protocol import PromptProgress, SamplingFields, Usage
from photon_jax.server.state import ServerState
from photon_jax.server.streaming import DONE, cancel_all

if TYPE_CHECKING:
    from photon_jax.client.async_llm import AsyncLLM, RequestStream
    from photon_jax.client.updates import StreamUpdate

ABORT = "abort"
MAX_SHORT_BYTES = 4096  # of a body whose text takes a millisecond to tokenize at most
_Body = TypeVar("_Body", bound=SamplingFields)
_Job = TypeVar("_Job")


class Head(NamedTuple):
    """The fields that an answer and each of its chunks have in common."""

    id: str
    created: int
    model: str


def make_head(kind: str, model: str) -> Head:
    """Returns the head of a new answer; ids of one kind begin with its name."""
    return Head(f"{kind}-{random_id()}", int(time.time()), model)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to be answered, and how."""

    prompt: Prompt
    params: SamplingParams


async def make_job(
    make: Callable[[ServerState, "AsyncLLM", _Body], _Job],
    state: ServerState,
    engine: "AsyncLLM",
    body: _Body,
    request: Request,
) -> _Job:
    """Returns what is to be done for a request.

    It is made in a thread, in one of a few when its answer has a form, as that and a long text take a while. What is
    short is made at once: a thread takes longer to begin, and all that are about to begin keep the event loop waiting.

    Args:
      request: whose body has been read.
    """
    calls = getattr(body, "tool_choice", None)
    has_form = body.structured_outputs or body.response_format or calls not in (None, "none", "auto")
    if not has_form and len(await request.body()) <= MAX_SHORT_BYTES:
        return make(state, engine, body)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(state.forms if has_form else None, make, state, engine, body)


def compile_form(engine: "AsyncLLM", asked: Asked) -> None:
    """Compiles the form that an answer must have, which may take long; the engine keeps it for when it is submitted.

    Raises:
      RequestError: it is not valid.
    """
    if asked.params.structured_outputs is not None:
        engine.llm.client.prepare(asked.prompt, asked.params, score=False)


def make_usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    """Returns the tokens of a request."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def total_usage(outputs: Sequence[RequestOutput]) -> Usage:
    """Returns the tokens of all prompts of a request together."""
    return make_usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
    )


class UsageCount:
    """The usage of a stream of one or several prompts, as far as it has come.

    Attributes:
      num_left: sequences that have not come to their own end.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.num_left = sum([each.params.n for each in asked])
        self._num_prompt_tokens = sum([len(each.prompt.token_ids) for each in asked])
        self._num_output_tokens = 0
        self._num_cached: dict[int, int] = {}

    def add(self, prompt_index: int, update: "StreamUpdate", *, has_output: bool = True) -> None:
        """Counts what an update of one prompt's stream brought.

        Args:
          has_output: whether the tokens that were made are given, and so count.
        """
        for delta in update.deltas:
            if has_output:
                self._num_output_tokens += len(delta.token_ids)
            if delta.finish_reason not in (None, ABORT):
                self.num_left -= 1
        self._num_cached[prompt_index] = update.num_cached_tokens

    def usage(self) -> Usage:
        """Returns the tokens so far."""
        return make_usage(self._num_prompt_tokens, self._num_output_tokens, sum(self._num_cached.values()))


class EventMaker(Protocol):
    """What has been sent of a streamed answer.

    Attributes:
      usage: of what was sent.
    """

    usage: UsageCount

    def events_of(self, prompt_index: int, update: "StreamUpdate") -> bytes:
        """Returns the events that tell of an update of one prompt, all in one."""

    def last_events(self) -> bytes:
        """Returns what comes when all has ended, but for the mark of the end."""


async def events_to_the_end(
    maker: EventMaker, updates: AsyncGenerator[tuple[int, "StreamUpdate"], None]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream, those of an update and of the end in one piece: each costs a system call."""
    events = b""
    async with contextlib.aclosing(updates):
        async for prompt_index, update in updates:
            events = maker.events_of(prompt_index, update)
            if maker.usage.num_left == 0:
                break
            if events:
                yield events
    yield events + maker.last_events() + DONE


def make_progress(update: "StreamUpdate") -> PromptProgress:
    """Returns how far the prompt of a stream is."""
    return {
        "total": update.num_prompt_tokens,
        "cache": update.num_cached_tokens,
        "processed": update.num_computed_tokens,
    }


async def generate_all(engine: "AsyncLLM", asked: Sequence[Asked], request_id: str) -> list[RequestOutput]:
    """Returns the output of each prompt; when one fails, or this is cancelled, all are aborted.

    Raises:
      AbortedError: the server ended one of them.
      RequestError: one can't go on in the form that it must have.
    """

    async def generate(index: int) -> RequestOutput:
        name = _prompt_id(request_id, index, len(asked))
        with naming_prompt(index, len(asked)):
            return await engine.generate(asked[index].prompt, asked[index].params, request_id=name)

    tasks = [asyncio.create_task(generate(index)) for index in range(len(asked))]
    try:
        outputs = await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)
    for each, output in zip(asked, outputs, strict=True):
        for completion in output.outputs:
            _check_not_cut(engine, each, completion.finish_reason)
    return outputs


def _prompt_id(request_id: str, index: int, num_prompts: int) -> str:
    """Returns the engine's name for a prompt of a request; the only one has the request's own."""
    return request_id if num_prompts == 1 else f"{request_id}-{index}"


def _check_not_cut(engine: "AsyncLLM", asked: Asked, finish_reason: str | None) -> None:
    """Raises when a sequence that nobody left was ended: by the server's end, or as its form can't be followed."""
    if finish_reason != ABORT:
        return
    if asked.params.structured_outputs is not None and engine.stats().is_ready:
        raise RequestError("the form that the answer must have grew beyond what can be followed; give a simpler one")
    raise AbortedError("the server ended this answer before it was finished; send the request again")


def _check_none_is_cut(engine: "AsyncLLM", asked: Asked, update: "StreamUpdate") -> None:
    for delta in update.deltas:
        _check_not_cut(engine, asked, delta.finish_reason)


def stream_all(
    engine: "AsyncLLM", asked: Sequence[Asked], request_id: str
) -> AsyncGenerator[tuple[int, "StreamUpdate"], None]:
    """Submits all prompts, or none, and returns their updates as they come, each with the place of its prompt.

    Closing what is returned, or dropping it, aborts what is not finished.

    Raises:
      RequestError, CapacityError: at the call, when one is refused.
      AbortedError, RequestError: after an update that tells of a sequence's end, as `generate_all`.
    """
    streams: list[RequestStream] = []
    try:
        for index, each in enumerate(asked):
            with naming_prompt(index, len(asked)):
                name = _prompt_id(request_id, index, len(asked))
                streams.append(engine.stream(each.prompt, each.params, request_id=name))
    except BaseException:
        _close_all(streams)
        raise
    return _merge(engine, asked, streams)


def _close_all(streams: "Sequence[RequestStream]") -> None:
    for stream in streams:
        stream.close()


async def _merge(
    engine: "AsyncLLM", asked: Sequence[Asked], streams: "Sequence[RequestStream]"
) -> AsyncGenerator[tuple[int, "StreamUpdate"], None]:
    try:
        if len(streams) == 1:  # most requests; another generator would cost each event
            async for update in streams[0]:
                yield 0, update
                _check_none_is_cut(engine, asked[0], update)
            return
        async with contextlib.aclosing(_merge_several(streams)) as updates:
            async for index, update in updates:
                yield index, update
                _check_none_is_cut(engine, asked[index], update)
    finally:
        _close_all(streams)


async def _merge_several(streams: "Sequence[RequestStream]") -> AsyncGenerator[tuple[int, "StreamUpdate"], None]:
    def next_of(index: int) -> "asyncio.Task[StreamUpdate]":
        return asyncio.ensure_future(anext(streams[index]))

    waiting = {next_of(index): index for index in range(len(streams))}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    update = task.result()
                except StopAsyncIteration:
                    continue
                waiting[next_of(index)] = index
                yield index, update
    finally:
        await cancel_all(list(waiting))
