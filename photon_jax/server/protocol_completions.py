"""Requests and answers of /v1/completions."""

from typing import Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from photon_jax.server.protocol import PromptLogprobList, PromptProgress, SamplingFields, Usage


class CompletionRequest(SamplingFields):
    """Body of a completion."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="A text, the token ids of one prompt, or a list of either."
    )
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = Field(default=None, description="Not supported: anything but null is refused.")
    add_special_tokens: bool | None = None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of the tokens of a choice; null where nothing comes before the token, an echo's first one.

    text_offset counts characters from the start of the choice's text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One of the n continuations of one prompt, in the order of the prompts; in a stream, what a chunk adds to it.

    finish_reason is null in all chunks of a choice but its last. The types of OpenAI's Python client hold neither this
    null nor that of an echo's first token, though OpenAI's server sends both: the client takes them as None, and with
    _strict_response_validation=True, which is off by default, refuses them from any server.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobList]


class CompletionAnswer(TypedDict):
    """Answer to a completion, or one event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    prompt_progress: NotRequired[PromptProgress]
