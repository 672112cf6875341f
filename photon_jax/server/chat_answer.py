"""Answers to chats: whole ones, and the chunks of streamed ones."""

import dataclasses
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from photon_jax.outputs import CompletionOutput, RequestOutput
from photon_jax.server.answering import (
    ABORT,
    Asked,
    Head,
    UsageCount,
    events_to_the_end,
    make_progress,
    total_usage,
)
from photon_jax.server.chat_parts import AnswerParts, ToolUse
from photon_jax.server.logprobs import TokenNames, chat_logprobs, prompt_logprob_list
from photon_jax.server.protocol_chat import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatRequest,
    ChoiceLogprobs,
)
from photon_jax.server.streaming import ChoiceEvents, event
from photon_jax.text.reasoning import Start

if TYPE_CHECKING:
    from photon_jax.client.updates import SampleDelta, StreamUpdate


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChatJob:
    """A chat that is being answered."""

    body: ChatRequest
    asked: Asked
    head: Head
    names: TokenNames
    tool_use: ToolUse
    reasoning_start: Start

    @property
    def is_text(self) -> bool:
        """Whether the answer can't be anything but text, and nothing is told beside it until it ends."""
        has_parts = self.tool_use.form is not None or self.reasoning_start != "after"
        return not (has_parts or self.body.return_token_ids or self.asked.params.logprobs is not None)

    def parts(self) -> AnswerParts:
        """Returns what splits the text of one choice; see there."""
        return AnswerParts(self.tool_use, self.reasoning_start)


def whole_answer(job: ChatJob, output: RequestOutput) -> ChatAnswer:
    """Returns the answer to a chat that is not streamed."""
    answer: ChatAnswer = {
        "id": job.head.id,
        "object": "chat.completion",
        "created": job.head.created,
        "model": job.head.model,
        "choices": [_choice(job, completion) for completion in output.outputs],
        "usage": total_usage([output]),
    }
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprob_list(job.names, output.prompt_token_ids, output.prompt_logprobs)
    if job.body.return_token_ids:
        answer["prompt_token_ids"] = list(output.prompt_token_ids)
    return answer


def _choice(job: ChatJob, completion: CompletionOutput) -> ChatChoice:
    parts = job.parts()
    found = parts.push(completion.text, is_last=True)
    message: AnswerMessage = {"role": "assistant", "content": found.content, "refusal": None}
    if found.reasoning:
        message["reasoning"] = found.reasoning
    if parts.has_calls:
        message["content"] = found.content or None
        message["tool_calls"] = found.whole_calls()
    choice: ChatChoice = {
        "index": completion.index,
        "message": message,
        "logprobs": None,
        "finish_reason": _finish_reason(completion.finish_reason, parts),
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        kind = job.asked.params.logprobs_kind
        content = chat_logprobs(job.names, completion.token_ids, completion.logprobs, kind)
        choice["logprobs"] = {"content": content, "refusal": None}
    if job.body.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice


def _finish_reason(reason: str | None, parts: AnswerParts) -> str | None:
    """Returns why an answer ended; None for one that the server cut, which is an error instead."""
    if reason == ABORT:
        return None
    return "tool_calls" if reason == "stop" and parts.has_calls else reason


def chunk_events(
    job: ChatJob, updates: AsyncGenerator[tuple[int, "StreamUpdate"], None]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a streamed chat."""
    return events_to_the_end(_ChatStream(job), updates)


class _ChatStream:
    """What has been sent of a streamed chat."""

    def __init__(self, job: ChatJob) -> None:
        self.usage = UsageCount([job.asked])
        self._job = job
        self._parts: dict[int, AnswerParts] = {}  # of the choices whose role is told
        self._num_computed = -1
        self._tells_usage = job.body.has_continuous_usage
        self._is_text = job.is_text
        chunk = self.chunk([])
        self._events = ChoiceEvents({**chunk, "usage": None} if "usage" in chunk else chunk)

    def chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        """Returns a chunk; the usage so far is in it when it is asked for in each."""
        head = self._job.head
        chunk: ChatChunk = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }
        if self._job.body.has_usage:
            chunk["usage"] = self.usage.usage() if self._job.body.has_continuous_usage else None
        return chunk

    def events_of(self, prompt_index: int, update: "StreamUpdate") -> bytes:
        """Returns the events that tell of an update, all in one."""
        events = b""
        if self._job.body.return_progress and not self._parts and update.num_computed_tokens != self._num_computed:
            self._num_computed = update.num_computed_tokens
            events += event({**self.chunk([]), "prompt_progress": make_progress(update)})
        for delta in update.deltas:
            if delta.index not in self._parts:
                self._parts[delta.index] = self._job.parts()
                events += event(self._first_chunk(delta.index))
        self.usage.add(prompt_index, update)
        usage = self.usage.usage() if self._tells_usage else None
        for delta in update.deltas:
            if self._is_text and delta.finish_reason is None:
                events += self._events.of_content(delta.index, delta.text, usage) if delta.text else b""
                continue
            choice = self._choice(delta)
            if choice is not None:
                events += self._events.of(choice, usage)
        return events

    def last_events(self) -> bytes:
        """Returns the chunk with the usage, if it is asked for."""
        return event({**self.chunk([]), "usage": self.usage.usage()}) if self._job.body.has_usage else b""

    def _first_chunk(self, index: int) -> ChatChunk:
        delta: ChatDelta = {"role": "assistant"}
        if self._job.tool_use.form is None:
            delta["content"] = ""  # as OpenAI begins; an answer that is calls alone has no content
        chunk = self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
        if self._job.body.return_token_ids:
            chunk["prompt_token_ids"] = list(self._job.asked.prompt.token_ids)
        return chunk

    def _choice(self, delta: "SampleDelta") -> ChatChunkChoice | None:
        """Returns what a chunk says of a choice; None when there is nothing to say."""
        parts = self._parts[delta.index]
        added = parts.push(delta.text, is_last=delta.finish_reason is not None).delta()
        finish_reason = _finish_reason(delta.finish_reason, parts)
        logprobs: ChoiceLogprobs | None = None
        if delta.logprobs is not None and delta.token_ids:
            kind = self._job.asked.params.logprobs_kind
            content = chat_logprobs(self._job.names, delta.token_ids, delta.logprobs, kind)
            logprobs = {"content": content, "refusal": None}
        has_ids = self._job.body.return_token_ids and delta.token_ids
        if not (added or logprobs or has_ids or finish_reason):
            return None
        choice: ChatChunkChoice = {
            "index": delta.index,
            "delta": added,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if has_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice
