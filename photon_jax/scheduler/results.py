"""Results: what the tokens that a step sampled mean for their sequence. Host only."""

import numpy as np

from photon_jax.outputs import FinishReason, TokenDelta
from photon_jax.scheduler.plan import ScheduledSequence, StepResult
from photon_jax.scheduler.sequence import SequenceState


def take_tokens(
    item: ScheduledSequence,
    result: StepResult,
    row: int,
    sampled: list[int],
    logprobs: np.ndarray,  # f32[steps 3]
) -> TokenDelta:
    """Appends the tokens that a row sampled to its sequence, up to the one that ends it, and returns them.

    A grammar ends a sequence where nothing can follow: well if its text may end there, else aborted.

    Args:
      result: as `StepResult.by_row` gives it.
      row: its place in the plan.
      sampled: one token of each of the row's steps.
      logprobs: of its tokens in all steps of the plan.
    """
    seq = item.seq
    request, token_ids = seq.request, seq.token_ids
    is_first = len(token_ids) == seq.num_prompt_tokens
    num_new, reason, stop_token_id = 0, None, None
    for token_id in sampled:
        token_ids.append(token_id)
        num_new += 1
        if token_id in request.stop_token_ids and seq.num_output_tokens > request.params.min_tokens:
            reason, stop_token_id = FinishReason.STOP, token_id
        elif seq.matcher is not None and not seq.matcher.consume(token_id):
            reason = FinishReason.STOP if seq.matcher.is_complete else FinishReason.ABORT
        elif len(token_ids) > seq.max_num_slots:
            reason = FinishReason.LENGTH
        if reason is not None:
            break
    top_ids = top_logprobs = None
    if request.params.logprobs:
        assert result.top_ids is not None, f"the step of {seq.request_id!r} gave no top_ids"
        assert result.top_logprobs is not None, f"the step of {seq.request_id!r} gave no top_logprobs"
        top_ids = result.top_ids[row, :num_new, : request.params.logprobs].copy()
        top_logprobs = result.top_logprobs[row, :num_new, : request.params.logprobs].copy()
    return TokenDelta(
        request.request_id,
        tuple(sampled if num_new == len(sampled) else sampled[:num_new]),
        logprobs if num_new == len(logprobs) else logprobs[:num_new],
        reason,
        stop_token_id,
        top_ids,
        top_logprobs,
        seq.scores if is_first else None,
        seq.num_cached_tokens,
    )


def end_delta(seq: SequenceState, reason: FinishReason) -> TokenDelta:
    """Returns the delta of a request that ends without a new token; a score request brings its scores."""
    return TokenDelta(
        request_id=seq.request_id,
        new_token_ids=(),
        logprobs=np.zeros((0, 3), np.float32),
        finish_reason=reason,
        scores=seq.scores if reason is FinishReason.LENGTH else None,
        num_cached_tokens=seq.num_cached_tokens,
    )
