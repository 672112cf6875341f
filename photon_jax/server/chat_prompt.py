"""The prompt of a conversation: messages as the API has them become what chat templates expect."""

import json
from collections.abc import Mapping, Sequence

from photon_jax.client.submission import Prompt
from photon_jax.errors import RequestError
from photon_jax.server.protocol import Json
from photon_jax.server.protocol_chat import ChatMessage, ChatRequest
from photon_jax.text.reasoning import Start, reasoning_start, shows_reasoning
from photon_jax.text.tokenizer import Tokenizer

_NUM_END_TOKENS = 32  # in which a template's own tags of reasoning stand, at the end of a prompt
_RESERVED = ("self", "add_generation_prompt", "continue_final_message", "messages", "tools")


def encode_chat(
    tokenizer: Tokenizer | None,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Mapping[str, Json]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Json] | None,
) -> Prompt:
    """Returns the prompt of a conversation.

    Args:
      add_generation_prompt: None for true, unless the final message is continued.
      template_kwargs: more variables for the template.

    Raises:
      RequestError: there is no chat template, or it refuses the conversation.
    """
    if tokenizer is None:
        raise RequestError("the model has no tokenizer, so it has no chat template; use /v1/completions with token ids")
    kwargs = dict(template_kwargs or {})
    taken = next((name for name in _RESERVED if name in kwargs), None)
    if taken is not None:
        raise RequestError(f"chat_template_kwargs can't hold {taken}, which is a field of the request")
    if continue_final_message:
        kwargs["continue_final_message"] = True
    ids = tokenizer.encode_chat(
        [template_message(message) for message in messages],
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        tools=tools,
        **kwargs,
    )
    return Prompt(token_ids=tuple(ids))


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
