"""Results: what the tokens that a step sampled mean for their sequence. Host only."""

import numpy as np

from photon_jax.outputs import FinishReason, TokenDelta
from photon_jax.scheduler.plan import ScheduledSequence, StepResult
from photon_jax.scheduler.sequence import SequenceState


def take_tokens(item: ScheduledSequence, result: StepResult, sampled: list[int], row: int, num_rows: int) -> TokenDelta:
    """Appends the tokens that a row sampled to its sequence, up to the one that ends it, and returns them.

    A grammar ends a sequence where nothing can follow: well if its text may end there, else aborted.

    Args:
      sampled: one token of each step.
      row: its place in the plan of `num_rows` rows; step i of the plan has entry i * num_rows + row in the result.
    """
    seq = item.seq
    request, token_ids = seq.request, seq.token_ids
    num_prompt = len(request.prompt_token_ids)
    is_first = len(token_ids) == num_prompt
    seq.num_pending -= len(sampled)
    num_new, reason, stop_token_id = 0, None, None
    for token_id in sampled:
        token_ids.append(token_id)
        num_new += 1
        if token_id in request.stop_token_ids and len(token_ids) - num_prompt > request.params.min_tokens:
            reason, stop_token_id = FinishReason.STOP, token_id
        elif seq.matcher is not None and not seq.matcher.consume(token_id):
            reason = FinishReason.STOP if seq.matcher.is_complete else FinishReason.ABORT
        elif len(token_ids) > seq.max_num_slots:
            reason = FinishReason.LENGTH
        if reason is not None:
            break
    entries = slice(row, row + num_new * num_rows, num_rows)
    num_top, top_ids, top_logprobs = request.params.logprobs, None, None
    if num_top:
        assert result.top_ids is not None, f"the step of {seq.request_id!r} gave no top_ids"
        assert result.top_logprobs is not None, f"the step of {seq.request_id!r} gave no top_logprobs"
        top_ids = result.top_ids[entries, :num_top].copy()
        top_logprobs = result.top_logprobs[entries, :num_top].copy()
    return TokenDelta(
        request_id=request.request_id,
        new_token_ids=tuple(sampled[:num_new]),
        logprobs=result.logprobs[entries].copy(),
        finish_reason=reason,
        stop_token_id=stop_token_id,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        scores=seq.scores if is_first else None,
        num_cached_tokens=seq.num_cached_tokens,
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
