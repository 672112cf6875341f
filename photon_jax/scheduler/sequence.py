"""Sequence: the engine's running state of one request. Host only."""

import dataclasses
import enum

from photon_jax.controls import TokenMatcher
from photon_jax.outputs import PromptLogprobs
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
    max_num_slots: int  # tokens of the cache that it takes at its greatest length
    max_num_blocks: int  # blocks held then
    num_computed_tokens: int = 0  # tokens whose K and V are in the cache once the planned steps are done
    admission: int = 0  # its own each time that it starts to run; 0 while it does not
    block_ids: list[int] = dataclasses.field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache held at the first admission
    state_slot: int = 0  # its own among running sequences, from 1; 0 while it does not run
    block_digests: list[bytes] = dataclasses.field(default_factory=list)  # of its first full blocks, as far as known
    num_offered_blocks: int = 0  # blocks that came from the prefix cache or were offered to it
    scores: PromptLogprobs | None = None  # of the prompt's tokens where asked for, filled chunk by chunk
    num_scored: int = 0  # entries of `scores` that are there
    num_prompt_tokens: int = dataclasses.field(init=False)  # that the request gave
    num_tokens: int = dataclasses.field(init=False)  # of prompt and output, pending ones included
    is_plain: bool = dataclasses.field(init=False)  # asks for no scores, no more than the likeliest token, no controls
    is_random: bool = dataclasses.field(init=False)  # whether its tokens are drawn
    matcher: TokenMatcher | None = dataclasses.field(init=False)  # has taken its output tokens; None without a grammar

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.matcher = None if request.grammar is None else request.grammar.start()
        self.is_random = bool(request.params.temperature)
        self.is_plain = not (request.wants_scores or request.wants_top or request.has_controls)

    @property
    def request_id(self) -> str:
        """Id of its request."""
        return self.request.request_id

    @property
    def num_pending(self) -> int:
        """Tokens that planned steps sample; they come after token_ids, and are not known yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, pending ones not included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while it decodes, 0 when all is planned."""
        return min(self.num_tokens, self.max_num_slots) - self.num_computed_tokens

    @property
    def first_needed(self) -> int:
        """The first position that must be computed even if its K and V are known: for a score or for the next token."""
        unscored = self.request.score_positions[self.num_scored :]
        return unscored.start if unscored else min(self.num_tokens, self.max_num_slots) - 1

    @property
    def awaits_token(self) -> bool:
        """Whether its next token can't be sampled before the host knows the one on its way, which its grammar needs."""
        return self.matcher is not None and self.num_pending > 0

    @property
    def may_grow(self) -> bool:
        """Whether it may need more blocks than it holds."""
        return len(self.block_ids) < self.max_num_blocks
