"""Requests and answers of /v1/chat/completions."""

from typing import Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from photon_jax.server.protocol import Fields, Json, PromptLogprobList, PromptProgress, SamplingFields, Usage


class ChatMessage(Fields):
    """One message; fields that are not named here reach the chat template too."""

    role: str
    content: str | list[dict[str, Json]] | None = None
    tool_calls: list[dict[str, Json]] | None = None


class FunctionTool(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields):
    """Body of a chat completion."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(default=None, description="The same as max_tokens, which is older.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = Field(
        default=None, description="Variables for the chat template, such as enable_thinking."
    )


class TopLogprob(TypedDict):
    """A token that was possible; `bytes` are exact where `token` is text that holds a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, with the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    """Log-probabilities of the tokens of a choice, or of a chunk of it."""

    content: list[TokenLogprob] | None
    refusal: None


class FunctionCall(TypedDict):
    """A call of a function, its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool that the model made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(TypedDict):
    """The model's answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatAnswer(TypedDict):
    """Answer to a chat that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobList]
    prompt_token_ids: NotRequired[list[int]]


class FunctionCallDelta(TypedDict, total=False):
    """What came of a call: its name first, then its arguments in pieces."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict):
    """What came of the index-th call of a choice; id and type stand in its first delta alone."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class ChatDelta(TypedDict, total=False):
    """What a chunk adds to a choice."""

    role: Literal["assistant"]
    content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """What a chunk says of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """One event of a streamed chat; usage and prompt_progress come when asked for, the latter without choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_progress: NotRequired[PromptProgress]
    prompt_token_ids: NotRequired[list[int]]
