"""Updates: what came of a submission since one looked at it last. Host only."""

import dataclasses

import numpy as np

from photon_jax.client.submission import Sample, SamplePart, Submission, as_token_logprobs
from photon_jax.outputs import PromptLogprobs, TokenLogprobs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleDelta:
    """What was added to one sample.

    Attributes:
      index: of the sample.
      text: the new text alone; all of them joined are the text of the output. It may be empty: text is held back while
        it may be half a character or the begin of a stop string.
      token_ids: the new tokens alone.
      logprobs: of the new tokens; None when not asked for.
      finish_reason: "stop", "length" or "abort" with the last delta of the sample, else None.
      stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence id or another reason.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamUpdate:
    """What came of a request since the update before, be it of one step or of several.

    Attributes:
      deltas: of the samples that something was added to, by index; none while the prompt is computed.
      num_computed_tokens: tokens of the prompt that are computed so far, those of the prefix cache included.
      num_prompt_tokens: all of them.
      num_cached_tokens: tokens of the prompt that the prefix cache held; known with the first delta.
      prompt_logprobs: of the prompt's tokens, in one update alone; None when not asked for.
    """

    deltas: tuple[SampleDelta, ...]
    num_computed_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: PromptLogprobs | None


class UpdateReader:
    """Reads a submission while another thread adds to it, each part once.

    What was not read yet is nothing but the submission's own parts: a slow reader costs no further memory.
    """

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._num_parts = [0] * len(submission.samples)
        self._num_computed_tokens = 0
        self._has_scores = False
        self._num_ended = 0

    @property
    def is_done(self) -> bool:
        """Whether the last part of each sample was read."""
        return self._num_ended == len(self._num_parts)

    def take(self) -> StreamUpdate | None:
        """Returns what is new, None if nothing is."""
        submission = self._submission
        deltas = []
        for index, sample in enumerate(submission.samples):
            parts = sample.parts[self._num_parts[index] :]
            if parts:
                self._num_parts[index] += len(parts)
                self._num_ended += parts[-1].finish_reason is not None
                deltas.append(_make_delta(index, sample, parts))
        num_computed = submission.num_computed_tokens
        if not deltas and num_computed == self._num_computed_tokens:
            return None
        self._num_computed_tokens = num_computed
        scores = None if self._has_scores else submission.samples[0].scores
        self._has_scores = self._has_scores or scores is not None
        return StreamUpdate(
            deltas=tuple(deltas),
            num_computed_tokens=num_computed,
            num_prompt_tokens=len(submission.prompt.token_ids),
            num_cached_tokens=submission.num_cached_tokens,
            prompt_logprobs=scores,
        )


def _make_delta(index: int, sample: Sample, parts: list[SamplePart]) -> SampleDelta:
    logprobs, num_top = None, sample.request.params.logprobs
    if num_top is not None:
        top_ids = [np.zeros((0, num_top), np.int32), *(p.top_ids for p in parts if p.top_ids is not None)]
        tops = [np.zeros((0, num_top), np.float32), *(p.top_logprobs for p in parts if p.top_logprobs is not None)]
        table = np.concatenate([part.logprobs for part in parts])
        logprobs = as_token_logprobs(
            table,
            np.concatenate(top_ids).reshape(len(table), num_top),
            np.concatenate(tops).reshape(len(table), num_top),
        )
    return SampleDelta(
        index=index,
        text="".join([part.text for part in parts]),
        token_ids=tuple([token_id for part in parts for token_id in part.token_ids]),
        logprobs=logprobs,
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )
