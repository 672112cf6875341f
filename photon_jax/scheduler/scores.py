"""Scores: the log-probabilities of a prompt's own tokens, put together over its chunks. Host only."""

import numpy as np

from photon_jax.outputs import PromptLogprobs
from photon_jax.scheduler.plan import ScheduledSequence, StepResult
from photon_jax.scheduler.sequence import SequenceState


def take_scores(item: ScheduledSequence, result: StepResult, begin: int) -> None:
    """Writes what the row scored to its sequence.

    Args:
      begin: place of the row's first score in the flat arrays of the result.
    """
    seq, wanted = item.seq, item.scores
    if seq.scores is None:
        seq.scores = _empty_scores(seq)
    if not wanted:
        return
    assert result.score_logprobs is not None, f"the step of {seq.request_id!r} gave no score_logprobs"
    assert result.score_is_greedy is not None, f"the step of {seq.request_id!r} gave no score_is_greedy"
    first = seq.request.score_positions.start
    target = slice(wanted.start - first, wanted.stop - first)
    source = slice(begin, begin + len(wanted))
    seq.scores.logprobs[target] = result.score_logprobs[source]
    seq.scores.is_greedy[target] = result.score_is_greedy[source]
    num_top = seq.scores.top_ids.shape[1]
    if num_top:
        assert result.score_top_ids is not None, f"the step of {seq.request_id!r} gave no score_top_ids"
        assert result.score_top_logprobs is not None, f"the step of {seq.request_id!r} gave no score_top_logprobs"
        seq.scores.top_ids[target] = result.score_top_ids[source, :num_top]
        seq.scores.top_logprobs[target] = result.score_top_logprobs[source, :num_top]
    seq.num_scored = max(seq.num_scored, target.stop)


def _empty_scores(seq: SequenceState) -> PromptLogprobs:
    count, num_top = len(seq.request.score_positions), seq.request.params.prompt_logprobs or 0
    return PromptLogprobs(
        logprobs=np.zeros(count, np.float32),
        is_greedy=np.zeros(count, np.bool_),
        top_ids=np.zeros((count, num_top), np.int32),
        top_logprobs=np.zeros((count, num_top), np.float32),
    )
