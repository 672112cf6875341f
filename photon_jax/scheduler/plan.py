"""Step plan: what one step will compute, and what it computed. Host only."""

import dataclasses

import numpy as np

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


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one step computed, on the host; rows and tokens are those of its plan, in the plan's order.

    The flat arrays hold the tokens of row 0, then those of row 1, and so on; an entry scores the token that follows
    its position. They are needed only where the plan has a score request, and read only in its rows.
    """

    token_ids: np.ndarray  # i32[rows]  sampled; anything in a row that does not sample
    logprobs: np.ndarray  # f32[rows 3]  raw, after temperature, of the sampling distribution
    score_logprobs: np.ndarray | None = None  # f32[num_tokens]
    score_is_greedy: np.ndarray | None = None  # bool[num_tokens]
