"""Updates: what came of a submission since one looked at it last. Host only."""

import dataclasses

from photon_jax.client.submission import Reading, Sample, Submission
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
    """Reads a submission while another thread adds to it, each token once.

    What was not read yet is nothing but what the submission holds: a slow reader costs no further memory.
    """

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._readings: list[Reading | None] = [None] * len(submission.samples)  # the last ones
        self._num_computed_tokens = 0
        self._has_scores = False

    @property
    def is_done(self) -> bool:
        """Whether the end of each sample was read."""
        return all(last is not None and last.end is not None for last in self._readings)

    def take(self) -> StreamUpdate | None:
        """Returns what is new, None if nothing is."""
        submission = self._submission
        found = [self._take_delta(index, sample) for index, sample in enumerate(submission.samples)]
        deltas = tuple([delta for delta in found if delta is not None])
        num_computed = submission.num_computed_tokens
        if not deltas and num_computed == self._num_computed_tokens:
            return None
        self._num_computed_tokens = num_computed
        scores = None if self._has_scores else submission.samples[0].scores
        self._has_scores = self._has_scores or scores is not None
        return StreamUpdate(
            deltas=deltas,
            num_computed_tokens=num_computed,
            num_prompt_tokens=len(submission.prompt.token_ids),
            num_cached_tokens=submission.num_cached_tokens,
            prompt_logprobs=scores,
        )

    def _take_delta(self, index: int, sample: Sample) -> SampleDelta | None:
        before = self._readings[index]
        num_before, text_before = (0, "") if before is None else (before.num_tokens, before.text)
        if before is not None and (before.end is not None or (sample.num_tokens == num_before and sample.end is None)):
            return None
        now = self._readings[index] = sample.read()
        if now.num_tokens == num_before and now.end is None:
            return None
        new, logprobs = slice(num_before, now.num_tokens), None
        if sample.request.params.logprobs is not None:
            known = sample.logprobs(now.num_tokens)
            kinds = {field.name: getattr(known, field.name)[new] for field in dataclasses.fields(TokenLogprobs)}
            logprobs = TokenLogprobs(**kinds)
        return SampleDelta(
            index=index,
            text=now.text[len(text_before) :],
            token_ids=tuple(sample.token_ids[new]),
            logprobs=logprobs,
            finish_reason=None if now.end is None else now.end.finish_reason,
            stop_reason=None if now.end is None else now.end.stop_reason,
        )
