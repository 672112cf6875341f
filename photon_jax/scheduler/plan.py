"""Step plan: what one step will compute. Host only."""

import dataclasses

from photon_jax.scheduler.sequence import SequenceState


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One row of a step."""

    seq: SequenceState
    start: int  # first position computed: num_computed_tokens when the plan was made
    num_new_tokens: int
    samples: bool  # whether the row's last position yields an output token


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step, valid until it is applied."""

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()  # request ids put back to waiting by this call

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(item.num_new_tokens for item in self.scheduled)
