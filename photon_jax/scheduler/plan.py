"""Step plan: what one step will compute, and what it computed. Host only."""

import dataclasses
from typing import NamedTuple

import numpy as np

from photon_jax.scheduler.sequence import SequenceState


class ScheduledSequence(NamedTuple):
    """One row of a step.

    Attributes:
      seq: whose tokens are computed.
      start: first position computed: num_computed_tokens when the plan was made.
      num_new_tokens: tokens computed; where the plan has several steps, one in each of so many.
      num_sampled: output tokens that the row yields: one for its last position, or one in each step, or none.
      admission: of the sequence when the plan was made; the row is void once the sequence has another.
    """

    seq: SequenceState
    start: int
    num_new_tokens: int
    num_sampled: int
    admission: int

    @property
    def samples(self) -> bool:
        """Whether the row yields an output token."""
        return self.num_sampled > 0

    @property
    def is_void(self) -> bool:
        """Whether its sequence has ended or was preempted since the plan was made."""
        return self.seq.admission != self.admission

    @property
    def scores(self) -> range:
        """Positions of the row at which the next token is scored."""
        wanted = self.seq.request.score_positions
        return range(max(wanted.start, self.start), min(wanted.stop, self.start + self.num_new_tokens))

    @property
    def wants_top(self) -> bool:
        """Whether more than the likeliest token is asked for at the sampled place, or any at a scored one."""
        request = self.seq.request
        return bool((self.samples and request.wants_top) or (self.scores and request.params.prompt_logprobs))


def make_row(seq: SequenceState, num_new_tokens: int, num_left: int, num_steps: int) -> ScheduledSequence:
    """Returns the row of a sequence in a plan.

    Args:
      num_left: tokens to compute before the next one can be sampled.
      num_steps: of the plan.
    """
    num_sampled = num_new_tokens
    if num_steps == 1:
        num_sampled = 1 if num_new_tokens == num_left and not seq.request.score else 0
    return ScheduledSequence(seq, seq.num_computed_tokens, num_new_tokens, num_sampled, seq.admission)


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one dispatch, valid until it is applied.

    Attributes:
      scheduled: one row for each sequence that takes part.
      preempted: request ids put back to waiting by this call.
      num_steps: decode steps that run one after the other without the host; a row takes part in its first ones.
      prompt_rows: those of the rows that compute tokens of a prompt, or the first ones since an admission.
      num_tokens: computed by the step.
    """

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()
    num_steps: int = 1
    prompt_rows: tuple[ScheduledSequence, ...] = ()
    num_tokens: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum([item[2] for item in self.scheduled]))

    @property
    def is_decode(self) -> bool:
        """Whether each row computes one token a step."""
        return self.num_steps > 1 or self.num_tokens == len(self.scheduled)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one step computed, on the host; rows are those of its plan, in the plan's order.

    The flat arrays hold the scores of row 0, then those of row 1, and so on, one for each position in its `scores`, and
    maybe more that mean nothing. They are needed only where a row has scores; the most likely tokens (W of them, or one
    where no row wants more) only where a row asks for them.
    """

    token_ids: np.ndarray  # i32[steps*rows]  sampled, step by step; anything where nothing was to be sampled
    logprobs: np.ndarray  # f32[steps*rows 3]  raw, after temperature, of the sampling distribution
    top_ids: np.ndarray | None = None  # i32[steps*rows W]
    top_logprobs: np.ndarray | None = None  # f32[steps*rows W]
    score_logprobs: np.ndarray | None = None  # f32[num_scores]
    score_is_greedy: np.ndarray | None = None  # bool[num_scores]
    score_top_ids: np.ndarray | None = None  # i32[num_scores W]
    score_top_logprobs: np.ndarray | None = None  # f32[num_scores W]

    def by_row(self, num_rows: int) -> "StepResult":
        """Returns the same with the sampled tokens' arrays as [rows steps *]."""
        sampled = {name: getattr(self, name) for name in ("token_ids", "logprobs", "top_ids", "top_logprobs")}
        return dataclasses.replace(
            self,
            **{
                name: np.ascontiguousarray(array.reshape(-1, num_rows, *array.shape[1:]).swapaxes(0, 1))
                for name, array in sampled.items()
                if array is not None
            },
        )
