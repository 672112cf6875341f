"""What generating endpoints have in common in their requests and answers: sampling fields, usage, log-probabilities.

A request may hold more fields than are named here: those that would change the answer and aren't supported are refused
(see `unsupported`), others are ignored.
"""

from typing import Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from photon_jax.request import LogprobsKind

Json = Any


class Fields(BaseModel):
    """A JSON object of a request; a value of another type is refused, not converted."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Fields):
    """What a stream says besides its text.

    Attributes:
      include_usage: whether a last chunk without choices has the usage.
      continuous_usage_stats: whether each chunk has the usage so far, with include_usage.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Fields):
    """The schema of a response_format, under the names that clients send."""

    name: str = ""
    json_schema: dict[str, Json] | bool | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """What the whole answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingFields(Fields):
    """Fields of chats and completions alike; a null is as if the field were not there.

    Those named as in SamplingParams mean what they mean there, and it checks their values.
    """

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0 or -1: all tokens.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    logprobs_kind: LogprobsKind | None = None
    prompt_logprobs: int | None = Field(default=None, description="Not in a stream.")
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Json] | None = Field(
        default=None, description="One of json, json_object, regex, choice and grammar."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(default=None, description="The ids of the prompt and of each choice.")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Tokens of log-probabilities are written as token_id:N."
    )
    return_progress: bool | None = Field(
        default=None, description="In a stream: chunks with prompt_progress while the prompt is computed."
    )
    user: str | None = None

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.has_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class PromptTokensDetails(TypedDict):
    """How many of the prompt's tokens the prefix cache held."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a request; of several choices together, the prompt once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptProgress(TypedDict):
    """How far the computation of a prompt is, in tokens."""

    total: int
    cache: int
    processed: int


class PromptLogprob(TypedDict):
    """One token that was possible in a place of the prompt; its rank is 1 for the likeliest, null when not known."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]  # by token id; null for the first token


class ErrorDetail(TypedDict):
    """What went wrong, in the form that OpenAI's clients read."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class Model(TypedDict):
    """A model that the server has."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: NotRequired[int]


class ModelList(TypedDict):
    """All models that the server has: one."""

    object: Literal["list"]
    data: list[Model]
