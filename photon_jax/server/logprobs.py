"""Log-probabilities as the API writes them: tokens as text, and numbers that JSON can hold."""

import codecs
from collections.abc import Sequence

import numpy as np

from photon_jax.outputs import PromptLogprobs, TokenLogprobs
from photon_jax.request import LogprobsKind
from photon_jax.server.protocol import PromptLogprobList
from photon_jax.server.protocol_chat import TokenLogprob, TopLogprob
from photon_jax.server.protocol_completions import CompletionLogprobs
from photon_jax.text.tokenizer import Tokenizer

FLOOR = -9999.0  # stands for the log-probability of a token that can't come, minus infinity, which JSON lacks


def as_json(logprob: float) -> float:
    """Returns a log-probability as a number of JSON: `FLOOR` where it is lower or minus infinity."""
    return max(float(logprob), FLOOR)


class TokenNames:
    """How tokens are written in answers."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        """Prepares names.

        Args:
          tokenizer: None for a checkpoint without one: tokens are written as token_id:N.
          as_ids: whether to write them so anyway.
        """
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def bytes_of(self, token_id: int) -> list[int] | None:
        """Returns the bytes that a token adds to the text; None when they are not known."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))

    def text_of(self, token_id: int) -> str:
        """Returns a token's text; one that holds a part of a character has U+FFFD in its place."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def key_of(self, token_id: int) -> str:
        r"""Returns a token's text, or "bytes:\xe2\x80" where it holds a part of a character: other bytes, other key."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: TokenLogprobs, kind: LogprobsKind
) -> list[TokenLogprob]:
    """Returns the log-probabilities of output tokens in the form of chats."""
    own = _of_kind(logprobs, kind)
    found: list[TokenLogprob] = []
    for index, token_id in enumerate(token_ids):
        tops = zip(logprobs.top_ids[index].tolist(), logprobs.top_logprobs[index].tolist(), strict=True)
        top_logprobs = [_chat_entry(names, top_id, logprob) for top_id, logprob in tops]
        found.append({**_chat_entry(names, token_id, own[index]), "top_logprobs": top_logprobs})
    return found


def _chat_entry(names: TokenNames, token_id: int, logprob: float) -> TopLogprob:
    return {"token": names.text_of(token_id), "logprob": as_json(logprob), "bytes": names.bytes_of(token_id)}


def _of_kind(logprobs: TokenLogprobs, kind: LogprobsKind) -> np.ndarray:
    values: np.ndarray = getattr(logprobs, kind)
    return values


class CompletionTokens:
    """The tokens of one choice of a completion as they come, in the form of completions."""

    def __init__(self, names: TokenNames, tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> None:
        self._names = names
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def of_prompt(self, token_ids: Sequence[int], scores: PromptLogprobs | None) -> CompletionLogprobs:
        """Returns an echoed prompt's tokens; nothing comes before the first, so it has no log-probability."""
        found = _no_tokens()
        for index, token_id in enumerate(token_ids):
            if index == 0 or scores is None:
                self._append(found, token_id, None, None)
            else:
                tops = _tops(scores, index - 1)
                self._append(found, token_id, float(scores.logprobs[index - 1]), tops)
        return found

    def of_output(self, token_ids: Sequence[int], logprobs: TokenLogprobs, kind: LogprobsKind) -> CompletionLogprobs:
        """Returns the next output tokens."""
        found = _no_tokens()
        own = _of_kind(logprobs, kind)
        for index, token_id in enumerate(token_ids):
            self._append(found, token_id, float(own[index]), _tops(logprobs, index))
        return found

    def _append(
        self, found: CompletionLogprobs, token_id: int, logprob: float | None, tops: list[tuple[int, float]] | None
    ) -> None:
        found["tokens"].append(self._names.text_of(token_id))
        found["token_logprobs"].append(None if logprob is None else as_json(logprob))
        found["text_offset"].append(self._num_characters)
        self._advance(token_id)
        if logprob is None or tops is None:
            found["top_logprobs"].append(None)
            return
        keyed: dict[str, float] = {}
        for top_id, top_logprob in dict([*tops, (token_id, logprob)]).items():
            key = self._names.key_of(top_id)
            keyed[f"token_id:{top_id}" if key in keyed else key] = as_json(top_logprob)
        found["top_logprobs"].append(keyed)

    def _advance(self, token_id: int) -> None:
        """Counts the characters that a token adds to the text."""
        if self._tokenizer is None or (self._skips_special and self._tokenizer.is_special(token_id)):
            return
        self._num_characters += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))


def _no_tokens() -> CompletionLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _tops(scores: PromptLogprobs | TokenLogprobs, index: int) -> list[tuple[int, float]]:
    return list(zip(scores.top_ids[index].tolist(), scores.top_logprobs[index].tolist(), strict=True))


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Returns the tokens of several parts, one after the other."""
    found = _no_tokens()
    for part in parts:
        found["tokens"] += part["tokens"]
        found["token_logprobs"] += part["token_logprobs"]
        found["top_logprobs"] += part["top_logprobs"]
        found["text_offset"] += part["text_offset"]
    return found


def prompt_logprob_list(names: TokenNames, token_ids: Sequence[int], scores: PromptLogprobs) -> PromptLogprobList:
    """Returns for each token of a prompt its log-probability and the likeliest in its place; null for the first."""
    found: PromptLogprobList = [None]
    for index, token_id in enumerate(token_ids[1:]):
        own = (token_id, float(scores.logprobs[index]))
        ranks = {top_id: rank for rank, (top_id, _) in enumerate(_tops(scores, index), 1)}
        if scores.is_greedy[index]:
            ranks[token_id] = 1
        found.append(
            {
                str(each): {"logprob": as_json(logprob), "rank": ranks.get(each), "decoded_token": names.text_of(each)}
                for each, logprob in dict([own, *_tops(scores, index)]).items()
            }
        )
    return found
