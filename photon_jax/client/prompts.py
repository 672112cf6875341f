"""Prompts as callers write them, made into one shape: a list of token ids and one SamplingParams for each."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from photon_jax.client.submission import Prompt
from photon_jax.errors import RequestError, naming_prompt, shown
from photon_jax.request import SamplingParams
from photon_jax.text.tokenizer import Tokenizer

PromptLike = str | Sequence[int]
_T = TypeVar("_T")
NO_PROMPTS = (Mapping, bytes, bytearray, set, frozenset)  # though they can be iterated over
_Encoded = TypeVar("_Encoded")


def as_list(prompts: PromptLike | Sequence[PromptLike]) -> Sequence[PromptLike]:
    """Returns a list of prompts; one text, or one list of ids, is a single prompt.

    Raises:
      RequestError: it is neither text nor a collection.
    """
    if isinstance(prompts, str):
        return [prompts]
    try:
        if isinstance(prompts, NO_PROMPTS):
            raise TypeError("what has no order, or bytes")
        listed = list(prompts)
    except TypeError as error:
        raise RequestError(f"prompts are a text, token ids or a list of either, got {shown(prompts)}") from error
    return [listed] if listed and is_id(listed[0]) else listed  # type: ignore[list-item,return-value]


def is_id(value: object) -> bool:
    """Returns whether it is one integer."""
    try:
        _as_id(value)
    except TypeError:
        return False
    return True


def _as_id(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError("True and False are no token ids")
    return operator.index(value)  # type: ignore[arg-type]  # an array of several ids refuses here


def encode_each(items: Sequence[_T], encode: Callable[[_T], _Encoded]) -> list[_Encoded]:
    """Returns what `encode` makes of each prompt; a RequestError says which prompt it is about."""
    prompts = []
    for index, item in enumerate(items):
        with naming_prompt(index, len(items)):
            prompts.append(encode(item))
    return prompts


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
        if isinstance(prompt, NO_PROMPTS):
            raise TypeError("what has no order, or bytes")
        ids = tuple(prompt)
        if {*map(type, ids)} != {int}:  # found ten times faster than each is looked at
            ids = tuple(map(_as_id, ids))
        return Prompt(token_ids=ids)
    except TypeError as error:
        raise RequestError(f"a prompt is a text or a list of token ids, got {shown(prompt)}") from error


def params_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Returns one SamplingParams for each prompt.

    Raises:
      RequestError: a list of another length, or of something else, was given.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if not isinstance(sampling_params, Sequence):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, got {shown(sampling_params)}")
    if len(sampling_params) != num_prompts:
        raise RequestError(
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts; give one for all or one for each"
        )
    listed = list(sampling_params)
    wrong = [each for each in listed if not isinstance(each, SamplingParams)]
    if wrong:
        raise RequestError(
            f"sampling_params must be SamplingParams or a list of them, got {shown(wrong[0])} in the list"
        )
    return listed
