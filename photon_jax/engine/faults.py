"""Faults: steps that fail through what a caller brought, and whose requests are told so while the engine goes on."""

from collections.abc import Sequence

from photon_jax.errors import CheckpointError, PhotonError, RequestError
from photon_jax.scheduler.plan import StepPlan


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
    error: RuntimeError | ValueError, plans: Sequence[StepPlan], deleted_leaf: str | None
) -> StepFault | None:
    """Returns whose fault it is that a step failed; None where it is the device's.

    A device does not say which of a step's functions failed, nor which of the steps on its way: all requests whose
    logits_processor ran in one of them are to blame.

    Args:
      error: what JAX raised.
      plans: of the steps on their way, the one that is being launched included.
      deleted_leaf: which of the weights does not exist any longer.
    """
    if deleted_leaf is not None:
        return StepFault(
            CheckpointError,
            f"the weights were deleted: leaf {deleted_leaf}, and maybe others, were donated to a function, or their "
            "delete() was called; update_params() with arrays that exist lets the engine serve again. Give functions "
            "that donate them copies",
        )
    rows = [row for plan in plans for row in plan.scheduled if row.samples and row.seq.request.params.processor]
    if not rows:
        return None
    messages = {  # those that ended meanwhile, or will run again, are told nothing
        row.seq.request_id: f"logits_processor {processor.name} failed while a step ran: {_summary(error)}"
        for row in rows
        if not row.is_void and (processor := row.seq.request.params.processor) is not None
    }
    return StepFault(RequestError, "a logits_processor failed", messages)


def _summary(error: RuntimeError | ValueError) -> str:
    """Returns the last line of a message: JAX puts the traceback of a Python function before what it raised."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[-1]
