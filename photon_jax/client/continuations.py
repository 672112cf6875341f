"""Continuations to score as callers write them, made into one shape: for each prompt a list of prompts to score."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from photon_jax.client.prompts import NO_PROMPTS, PromptLike, as_list, encode_each, encode_prompt, is_id
from photon_jax.client.submission import Prompt
from photon_jax.errors import RequestError, shown
from photon_jax.text.tokenizer import Tokenizer

Continuations = PromptLike | Sequence[PromptLike] | Sequence[Sequence[PromptLike]]


def encode_continuations(
    prompts: PromptLike | Sequence[PromptLike], continuations: Continuations, tokenizer: Tokenizer | None
) -> tuple[list[list[Prompt]], bool]:
    """Returns for each prompt its continuations, each together with it, and whether they came as lists of several.

    A text continuation is tokenized together with its prompt; it begins after as many tokens as the prompt has alone.

    Raises:
      RequestError: there is not one entry for each prompt, or one can't be scored; the message says which.
    """
    prompts = list(prompts) if isinstance(prompts, Iterator) else prompts
    listed = as_list(prompts)
    is_single = len(listed) == 1 and _is_one(prompts)
    if isinstance(continuations, str) and not is_single:
        raise RequestError(f"continuations are one text for a list of prompts, got {shown(continuations)}; give a list")
    entries = encode_each([continuations] if is_single else _listed(continuations), _listed)
    if len(entries) != len(listed):
        raise RequestError(
            f"{len(entries)} continuations for {len(listed)} prompts; give each prompt one, or a list of its own"
        )
    kinds = {_is_one(entry) for entry in entries}
    if len(kinds) > 1:
        raise RequestError("some prompts have one continuation and some a list of several; give each of them a list")
    has_several = kinds == {False}
    groups = [entry if has_several else [entry] for entry in entries]
    pairs = list(zip(listed, groups, strict=True))
    return encode_each(pairs, lambda pair: _join_all(*pair, tokenizer)), has_several


def _listed(value: object) -> Any:
    """Returns a text as it is, and what has an order as a list."""
    if isinstance(value, str):
        return value
    try:
        if isinstance(value, NO_PROMPTS):
            raise TypeError("what has no order, or bytes")
        return list(value)  # type: ignore[call-overload]
    except TypeError as error:
        raise RequestError(
            f"continuations are for each prompt a text, token ids or a list of either, got {shown(value)}"
        ) from error


def _is_one(value: object) -> bool:
    """Returns whether it is one text or one list of ids, rather than a list of such."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return True
    listed = list(value)
    return not listed or is_id(listed[0])


def _join_all(prompt: PromptLike, continuations: Sequence[PromptLike], tokenizer: Tokenizer | None) -> list[Prompt]:
    context = encode_prompt(prompt, tokenizer).token_ids
    if not context:
        raise RequestError(
            "the prompt is empty, so nothing comes before the continuation; begin with a token, such as the model's "
            "beginning-of-sequence id"
        )
    return [_join(prompt, context, continuation, tokenizer) for continuation in continuations]


def _join(
    prompt: PromptLike, context: tuple[int, ...], continuation: PromptLike, tokenizer: Tokenizer | None
) -> Prompt:
    if not isinstance(continuation, str):
        token_ids = (*context, *encode_prompt(continuation, None).token_ids)
        return Prompt(token_ids=token_ids, score_start=len(context))
    if not isinstance(prompt, str):
        raise RequestError(
            f"the continuation {shown(continuation)} is text and its prompt is token ids; give both as text or as ids"
        )
    token_ids = encode_prompt(prompt + continuation, tokenizer).token_ids
    if continuation and len(token_ids) <= len(context):
        raise RequestError(
            f"the continuation {shown(continuation)} has no token of its own: the prompt alone is {len(context)} "
            f"tokens, with it {len(token_ids)}; give token ids, or move the border between the two"
        )
    return Prompt(token_ids=token_ids, text=prompt + continuation, score_start=len(context))
