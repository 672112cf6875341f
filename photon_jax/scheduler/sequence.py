"""Sequence: the engine's running state of one request. Host only."""

import dataclasses
import enum

import numpy as np

from photon_jax.request import Request


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # preempted sequences are WAITING with num_preemptions > 0
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class SequenceState:
    """State of one request; the scheduler alone writes it."""

    request: Request
    arrival: int  # counts the requests added; a smaller one came earlier
    token_ids: list[int]  # prompt, then output
    max_num_blocks: int  # blocks held at most, at its greatest length
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache
    block_ids: list[int] = dataclasses.field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache held at the first admission
    state_slot: int = 0  # its own among running sequences, from 1; 0 while it does not run
    block_digests: list[bytes] = dataclasses.field(default_factory=list)  # of its first full blocks, as far as known
    num_offered_blocks: int = 0  # blocks that came from the prefix cache or were offered to it
    prompt_logprobs: np.ndarray | None = None  # f32[num_prompt_tokens - 1] of a score request, filled chunk by chunk
    prompt_is_greedy: np.ndarray | None = None  # bool[num_prompt_tokens - 1]

    @property
    def request_id(self) -> str:
        """Id of its request."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the request gave."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to compute before the next one can be sampled; 1 while it decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def may_grow(self) -> bool:
        """Whether it may need more blocks than it holds."""
        return len(self.block_ids) < self.max_num_blocks
