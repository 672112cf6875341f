"""Faults: steps that fail through what a caller brought, and whose requests are told so while the engine goes on."""

from collections.abc import Callable, Sequence

import numpy as np

from photon_jax.controls import LogitsProcessor, ProcessorFailure
from photon_jax.errors import CheckpointError, PhotonError, RequestError
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan, StepResult


class StepFault(Exception):
    """A step failed through a logits_processor or through weights; the engine was restarted and can go on.

    Attributes:
      messages: by request id, what each request that is to blame is told; None where all are to be told.
    """

    def __init__(self, kind: type[PhotonError], message: str, messages: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self._kind = kind
        self._message = message
        self.messages = messages

    def error_for(self, request_id: str) -> PhotonError | None:
        """Returns an error of its own for a request, caused by what JAX raised; None where it isn't to blame."""
        message = self._message if self.messages is None else self.messages.get(request_id)
        if message is None:
            return None
        error = self._kind(message)
        error.__cause__ = self.__cause__
        return error


def find_fault(
    error: Exception,
    plans: Sequence[StepPlan],
    deleted_leaf: str | None,
    calls_out: Callable[[LogitsProcessor], bool],
) -> StepFault | None:
    """Returns whose fault it is that a step failed; None where it is the device's.

    A device does not say which of a step's functions failed: all requests are to blame whose logits_processor ran in
    it and calls something that can fail, a Python function most often. Where none does, all that ran are.

    Args:
      error: what JAX raised, or a processor while it was traced.
      plans: of the steps that may have failed.
      deleted_leaf: which of the weights does not exist any longer.
      calls_out: whether a processor calls what can fail while it runs.
    """
    if deleted_leaf is not None:
        return StepFault(
            CheckpointError,
            f"the weights were deleted: leaf {deleted_leaf}, and maybe others, were donated to a function, or their "
            "delete() was called; update_params() with arrays that exist lets the engine serve again. Give functions "
            "that donate them copies",
        )
    rows = [(row, processor) for plan in plans for row in plan.scheduled if (processor := _processor_of(row))]
    if isinstance(error, ProcessorFailure):
        what = f"failed while a step was compiled: {error.__cause__!r:.500}"
        suspects = [(row, processor) for row, processor in rows if processor.fn is error.fn]
    else:
        what = f"failed while a step ran: {_summary(error)}"
        suspects = [(row, processor) for row, processor in rows if calls_out(processor)] or rows
    if not suspects:
        return None
    messages = {  # those that ended meanwhile, or will run again, are told nothing
        row.seq.request_id: f"logits_processor {processor.name}{_others(processor, suspects)} {what}"
        for row, processor in suspects
        if not row.is_void
    }
    return StepFault(RequestError, "a logits_processor failed", messages)


def find_nan(plan: StepPlan, result: StepResult) -> StepFault | None:
    """Returns whose log-probabilities are NaN, by the weights: those of the model's own distribution; None if none are.

    A processor may make what it likes of the logits: the other two kinds of log-probabilities are not looked at.
    """
    raw, scores = result.logprobs[:, 0], result.score_logprobs
    if not np.isnan(raw).any() and (scores is None or not np.isnan(scores).any()):
        return None
    sampled, end, ids = raw.reshape(plan.num_steps, -1), 0, []
    for row, item in enumerate(plan.scheduled):
        begin, end = end, end + len(item.scores)
        is_nan = np.isnan(sampled[: item.num_sampled, row]).any()
        is_nan |= scores is not None and np.isnan(scores[begin:end]).any()
        if is_nan and not item.is_void:
            ids.append(item.seq.request_id)
    message = (
        "the model's log-probabilities are NaN: its weights hold NaN or infinities, or its numbers are too large for "
        'the dtype; check the checkpoint or the params, or load it with dtype="float32"'
    )
    return StepFault(CheckpointError, message, dict.fromkeys(ids, message)) if ids else None


def _processor_of(row: ScheduledSequence) -> LogitsProcessor | None:
    """Returns what runs for a row."""
    return row.seq.request.params.processor if row.samples else None


def _others(processor: LogitsProcessor, suspects: Sequence[tuple[ScheduledSequence, LogitsProcessor]]) -> str:
    """Returns the functions that may have failed instead, for a message."""
    names = {each.fn: each.name for _, each in suspects if each.fn is not processor.fn}
    return f", or another one of its step ({', '.join(names.values())})," if names else ""


def _summary(error: Exception) -> str:
    """Returns the last line of a message: JAX puts the traceback of a Python function before what it raised."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[-1]
