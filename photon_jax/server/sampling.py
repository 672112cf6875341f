"""SamplingParams of a request's fields, and the checks that need the model."""

from collections.abc import Mapping
from typing import Any

from photon_jax.controls import logit_bias_from_json
from photon_jax.errors import RequestError
from photon_jax.request import SamplingParams
from photon_jax.server.errors import ContextLengthError, FieldError, UnknownModelError, about_field
from photon_jax.server.protocol import Json, SamplingFields
from photon_jax.server.state import ServerState
from photon_jax.text.tokenizer import Tokenizer

# Fields that mean what they mean in SamplingParams.
_SAME = (
    *("n", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("allowed_token_ids", "bad_words", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "seed", "logprobs_kind"),
)


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """Returns how the tokens of a request are chosen; a field that is null or not there has its default.

    Args:
      names: of params that the request has under other names.

    Raises:
      RequestError: a value is out of range.
    """
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(fields, name)) is not None}
    if fields.top_k is not None:
        given["top_k"] = 0 if fields.top_k == -1 else fields.top_k
    if fields.logit_bias is not None:
        given["logit_bias"] = logit_bias_from_json(fields.logit_bias)
    given["structured_outputs"] = structured_outputs(fields)
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs don't go with stream; leave one of them out")
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options go with stream; leave them out")
    with about_field(form_field(fields), names):
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def form_field(fields: SamplingFields) -> str:
    """Returns the field that says which form an answer must have."""
    is_format = fields.response_format is not None and fields.response_format.type != "text"
    return "response_format" if is_format else "structured_outputs"


def structured_outputs(fields: SamplingFields) -> Mapping[str, Json] | None:
    """Returns the form that an answer must have, whichever of the two fields it was given in."""
    wanted = fields.response_format
    if wanted is None or wanted.type == "text":
        return fields.structured_outputs
    if fields.structured_outputs is not None:
        raise FieldError(
            "response_format", "response_format and structured_outputs can't be combined; leave one of them out"
        )
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise FieldError("response_format", "response_format of type json_schema needs a json_schema with a schema")
    return {"json": wanted.json_schema.json_schema}


def check_model(state: ServerState, name: str | None) -> None:
    """Raises UnknownModelError unless the request names the server's model, or none."""
    if name is not None and name != state.model_name:
        raise UnknownModelError(f"the model {name[:200]!r} is not here; this server has {state.model_name!r}")


def check_text(tokenizer: Tokenizer, num_chars: int, max_model_len: int, *, param: str) -> None:
    """Raises ContextLengthError for a text that certainly is too long, before the time is taken to tokenize it."""
    longest = tokenizer.max_token_chars
    if longest is not None and num_chars > longest * max_model_len:
        raise ContextLengthError(
            param,
            f"the model's context is {max_model_len} tokens, and the {num_chars} characters of the prompt are more, as "
            f"no token has more than {longest}; shorten the prompt",
        )


def check_length(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, param: str) -> None:
    """Raises ContextLengthError when a prompt and what it asks for are longer than the model's context.

    Args:
      param: the field of the prompt.
    """
    asked = 1 if max_tokens is None else max_tokens
    if num_prompt_tokens + asked > max_model_len:
        raise ContextLengthError(
            param,
            f"the model's context is {max_model_len} tokens, the request needs {num_prompt_tokens + asked}: "
            f"{num_prompt_tokens} of the prompt and {asked} to generate; shorten the prompt or lower max_tokens",
        )
