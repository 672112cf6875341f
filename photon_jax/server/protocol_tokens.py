"""Requests and answers of /tokenize, /detokenize and /tokenizer_info."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from photon_jax.server.protocol import Fields, Json
from photon_jax.server.protocol_chat import ChatMessage, Tool


class TokenizeRequest(Fields):
    """Body of /tokenize: a prompt, or messages for the chat template.

    Attributes:
      add_special_tokens: whether to add what the tokenizer adds by default; of a prompt alone, true by default.
      return_token_strs: whether to give the tokens' texts too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(TypedDict):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class DetokenizeRequest(Fields):
    """Body of /detokenize; special tokens are kept in the text."""

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(TypedDict):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(TypedDict):
    """What a client needs to tokenize as the server does; null for what the tokenizer does not have."""

    tokenizer_class: Literal["photon_jax"]
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    chat_template: str | None
    model_max_length: int
