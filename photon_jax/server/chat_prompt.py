"""The prompt of a conversation: messages as the API has them become what chat templates expect."""

import json
from collections.abc import Mapping, Sequence

from photon_jax.client.submission import Prompt
from photon_jax.server.errors import ContextLengthError, FieldError, about_field
from photon_jax.server.protocol import Json
from photon_jax.server.protocol_chat import ChatMessage, ChatRequest
from photon_jax.server.sampling import check_text
from photon_jax.text.reasoning import Start, reasoning_start, shows_reasoning
from photon_jax.text.tokenizer import Tokenizer

_NUM_END_TOKENS = 32  # in which a template's own tags of reasoning stand, at the end of a prompt
_RESERVED = ("self", "add_generation_prompt", "continue_final_message", "messages", "tools")


def encode_chat(
    tokenizer: Tokenizer | None,
    messages: Sequence[ChatMessage],
    *,
    max_model_len: int | None = None,
    tools: Sequence[Mapping[str, Json]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Json] | None,
) -> Prompt:
    """Returns the prompt of a conversation.

    Args:
      max_model_len: for which a conversation may be too long; None for no bound.
      add_generation_prompt: None for true, unless the final message is continued.
      template_kwargs: more variables for the template.

    Raises:
      FieldError: there is no chat template, or it refuses the conversation.
      ContextLengthError: the conversation is much too long.
    """
    if tokenizer is None:
        raise FieldError(
            "messages", "the model has no tokenizer, so it has no chat template; use /v1/completions with token ids"
        )
    kwargs = dict(template_kwargs or {})
    taken = next((name for name in _RESERVED if name in kwargs), None)
    if taken is not None:
        raise FieldError("chat_template_kwargs", f"chat_template_kwargs can't hold {taken}, a field of the request")
    if continue_final_message:
        kwargs["continue_final_message"] = True
    if tools is not None:
        kwargs["tools"] = tools
    kwargs["add_generation_prompt"] = (
        not continue_final_message if add_generation_prompt is None else add_generation_prompt
    )
    plain = [template_message(message) for message in messages]
    with about_field("messages"):
        if max_model_len is not None:
            _check_chars(tokenizer, plain, kwargs, max_model_len)
        return Prompt(token_ids=tuple(tokenizer.encode_chat(plain, **kwargs)))


def _check_chars(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Json]], kwargs: Mapping[str, Json], max_model_len: int
) -> None:
    """Raises ContextLengthError where a conversation has too many characters, also as its template writes it."""
    try:
        check_text(tokenizer, len(json.dumps(messages, ensure_ascii=False)), max_model_len, param="messages")
    except ContextLengthError:  # the template may leave some out
        text = tokenizer.apply_chat_template(messages, **kwargs)
        check_text(tokenizer, len(text), max_model_len, param="messages")


def where_reasoning_is(tokenizer: Tokenizer | None, body: ChatRequest, prompt: Prompt) -> Start:
    """Returns where in its reasoning the answer to a prompt begins; "after" where the model doesn't reason."""
    if tokenizer is None or not shows_reasoning(tokenizer.chat_template):
        return "after"
    continued = body.messages[-1].content if body.continue_final_message else None
    end = tokenizer.decode(prompt.token_ids[-_NUM_END_TOKENS:], skip_special_tokens=False)
    return reasoning_start(end, continued=continued if isinstance(continued, str) else "")


def template_message(message: ChatMessage) -> dict[str, Json]:
    """Returns a message for a template: "developer" is "system", arguments of calls are objects, not their text."""
    plain: dict[str, Json] = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    reasoning = plain.pop("reasoning", None) or plain.get("reasoning_content")
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if "tool_calls" in plain:
        plain["tool_calls"] = [_template_call(call) for call in plain["tool_calls"]]
    return plain


def _template_call(call: dict[str, Json]) -> dict[str, Json]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call  # the model that wrote it may have been cut short
    return {**call, "function": {**function, "arguments": arguments}}
