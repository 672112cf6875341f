"""Answers to completions: whole ones, and the chunks of streamed ones."""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from photon_jax.client.submission import Prompt
from photon_jax.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from photon_jax.server.answering import (
    ABORT,
    Asked,
    Head,
    UsageCount,
    events_to_the_end,
    make_progress,
    make_usage,
    total_usage,
)
from photon_jax.server.logprobs import CompletionTokens, TokenNames, joined, prompt_logprob_list
from photon_jax.server.protocol_completions import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from photon_jax.server.streaming import event
from photon_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from photon_jax.client.updates import SampleDelta, StreamUpdate


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompletionJob:
    """Prompts that are being continued.

    Attributes:
      has_output: whether what is made is given; else the echo of the prompts alone is.
    """

    body: CompletionRequest
    asked: Sequence[Asked]
    head: Head
    names: TokenNames
    tokenizer: Tokenizer | None
    has_output: bool

    def echo_text(self, prompt: Prompt) -> str:
        """Returns a prompt's text, as it was given or else decoded."""
        if prompt.text is not None:
            return prompt.text
        return (
            ""
            if self.tokenizer is None
            else self.tokenizer.decode(prompt.token_ids, skip_special_tokens=self._skips_special)
        )

    def tokens(self) -> CompletionTokens:
        """Returns what writes the tokens of one choice."""
        return CompletionTokens(self.names, self.tokenizer, skip_special_tokens=self._skips_special)

    @property
    def _skips_special(self) -> bool:
        return self.asked[0].params.skip_special_tokens


def whole_answer(job: CompletionJob, outputs: Sequence[RequestOutput]) -> CompletionAnswer:
    """Returns the answer to completions that are not streamed."""
    num_samples = job.asked[0].params.n
    choices = [
        _choice(job, asked.prompt, output, completion, index * num_samples)
        for index, (asked, output) in enumerate(zip(job.asked, outputs, strict=True))
        for completion in output.outputs
    ]
    usage = total_usage(outputs)
    if not job.has_output:
        usage = make_usage(usage["prompt_tokens"], 0, usage["prompt_tokens_details"]["cached_tokens"])
    return {**_chunk_of(job.head, choices), "usage": usage}


def _chunk_of(head: Head, choices: list[CompletionChoice]) -> CompletionAnswer:
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
    }


def _choice(
    job: CompletionJob, prompt: Prompt, output: RequestOutput, completion: CompletionOutput, first_index: int
) -> CompletionChoice:
    body, tokens = job.body, job.tokens()
    text, parts = "", []
    if body.echo:
        text = job.echo_text(prompt)
        if body.logprobs is not None:
            parts.append(tokens.of_prompt(prompt.token_ids, output.prompt_logprobs))
    if job.has_output:
        text += completion.text
        if completion.logprobs is not None:
            kind = output.sampling_params.logprobs_kind
            parts.append(tokens.of_output(completion.token_ids, completion.logprobs, kind))
    choice: CompletionChoice = {
        "index": first_index + completion.index,
        "text": text,
        "logprobs": joined(parts) if parts else None,
        "finish_reason": completion.finish_reason if job.has_output else "length",
        "stop_reason": completion.stop_reason if job.has_output else None,
    }
    if output.prompt_logprobs is not None and not (body.echo and body.logprobs is not None):
        choice["prompt_logprobs"] = prompt_logprob_list(job.names, prompt.token_ids, output.prompt_logprobs)
    if body.return_token_ids:
        choice["token_ids"] = list(completion.token_ids) if job.has_output else []
        choice["prompt_token_ids"] = list(prompt.token_ids)
    return choice


def chunk_events(
    job: CompletionJob, updates: AsyncGenerator[tuple[int, "StreamUpdate"], None]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of streamed completions."""
    return events_to_the_end(_CompletionStream(job), updates)


class _CompletionStream:
    """What has been sent of streamed completions."""

    def __init__(self, job: CompletionJob) -> None:
        self.usage = UsageCount(job.asked)
        self._job = job
        self._num_samples = job.asked[0].params.n
        self._tokens: dict[int, CompletionTokens] = {}  # by choice, once it has begun
        self._scores: dict[int, PromptLogprobs] = {}  # by prompt
        self._num_computed: dict[int, int] = {}  # by prompt

    def chunk(self, choices: list[CompletionChoice]) -> CompletionAnswer:
        """Returns a chunk; the usage so far is in it when it is asked for in each."""
        chunk = _chunk_of(self._job.head, choices)
        if self._job.body.has_usage:
            chunk["usage"] = self.usage.usage() if self._job.body.has_continuous_usage else None
        return chunk

    def events_of(self, prompt_index: int, update: "StreamUpdate") -> bytes:
        """Returns the events that tell of an update of one prompt, all in one."""
        if update.prompt_logprobs is not None:
            self._scores[prompt_index] = update.prompt_logprobs
        events = b""
        if self._job.body.return_progress and update.num_computed_tokens != self._num_computed.get(prompt_index):
            self._num_computed[prompt_index] = update.num_computed_tokens
            events += event({**self.chunk([]), "prompt_progress": make_progress(update)})
        self.usage.add(prompt_index, update, has_output=self._job.has_output)
        for delta in update.deltas:
            choices = [self._begin(prompt_index, delta), self._go_on(prompt_index, delta)]
            events += b"".join([event(self.chunk([choice])) for choice in choices if choice is not None])
        return events

    def last_events(self) -> bytes:
        """Returns the chunk with the usage, if it is asked for."""
        return event({**self.chunk([]), "usage": self.usage.usage()}) if self._job.body.has_usage else b""

    def _begin(self, prompt_index: int, delta: "SampleDelta") -> CompletionChoice | None:
        """Returns the echo of a choice, when it has one and just begins."""
        index = prompt_index * self._num_samples + delta.index
        if index in self._tokens:
            return None
        tokens = self._tokens[index] = self._job.tokens()
        body, prompt = self._job.body, self._job.asked[prompt_index].prompt
        if not (body.echo or body.return_token_ids):
            return None
        logprobs: CompletionLogprobs | None = None
        if body.echo and body.logprobs is not None:
            logprobs = tokens.of_prompt(prompt.token_ids, self._scores.get(prompt_index))
        text = self._job.echo_text(prompt) if body.echo else ""
        choice: CompletionChoice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if body.return_token_ids:
            choice["prompt_token_ids"] = list(prompt.token_ids)
        return choice

    def _go_on(self, prompt_index: int, delta: "SampleDelta") -> CompletionChoice | None:
        """Returns what a delta adds to a choice; None when there is nothing to say."""
        index = prompt_index * self._num_samples + delta.index
        finish_reason = None if delta.finish_reason == ABORT else delta.finish_reason
        if not self._job.has_output:
            done: CompletionChoice = {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
            return done if finish_reason is not None else None
        logprobs: CompletionLogprobs | None = None
        if delta.logprobs is not None and delta.token_ids:
            kind = self._job.asked[prompt_index].params.logprobs_kind
            logprobs = self._tokens[index].of_output(delta.token_ids, delta.logprobs, kind)
        has_ids = self._job.body.return_token_ids and delta.token_ids
        if not (delta.text or logprobs or has_ids or finish_reason):
            return None
        choice: CompletionChoice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if has_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice
