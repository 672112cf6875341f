"""Prompts as callers write them, made into one shape: a list of token ids and one SamplingParams for each."""

import operator
from collections.abc import Iterable, Mapping, Sequence

from photon_jax.errors import RequestError
from photon_jax.local_client import Prompt
from photon_jax.request import SamplingParams
from photon_jax.text.tokenizer import Tokenizer

PromptLike = str | Sequence[int]


def as_list(prompts: PromptLike | Sequence[PromptLike]) -> Sequence[PromptLike]:
    """Returns a list of prompts; one text, or one list of ids, is a single prompt.

    Raises:
      RequestError: it is neither text nor a collection.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise RequestError(f"a prompt is a text or a list of token ids, got {prompts!r}")
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts are a text, token ids or a list of either, got {prompts!r}")
    listed = list(prompts)
    return [listed] if listed and _is_id(listed[0]) else listed  # type: ignore[list-item,return-value]


def _is_id(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # an array of several ids has __index__ too, and refuses here
        return False
    return True


def encode_prompt(prompt: PromptLike, tokenizer: Tokenizer | None) -> Prompt:
    """Returns a prompt's token ids.

    Raises:
      RequestError: it is neither text nor ids, or text and there is no tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("the prompt is text and the checkpoint has no tokenizer; give token ids")
        return Prompt(token_ids=tuple(tokenizer.encode(prompt)), text=prompt)
    try:
        return Prompt(token_ids=tuple(operator.index(token_id) for token_id in prompt))
    except TypeError as error:
        raise RequestError(f"a prompt is a text or a list of token ids, got {prompt!r}") from error


def params_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Returns one SamplingParams for each prompt.

    Raises:
      RequestError: a list of another length, or of something else, was given.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if len(sampling_params) != num_prompts:
        raise RequestError(
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts; give one for all or one for each"
        )
    listed = list(sampling_params)
    wrong = next((each for each in listed if not isinstance(each, SamplingParams)), None)
    if wrong is not None:
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {wrong!r} in the list")
    return listed
