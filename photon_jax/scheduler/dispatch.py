"""Dispatch: how many decode steps run one after the other without the host, and how long a mixed one is. Host only."""

import itertools
from collections.abc import Collection, Sequence

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import SchedulerConfig
from photon_jax.scheduler.sequence import SequenceState

# of the places in several steps: what sequences that reach their max_tokens in them may leave idle while others wait
MAX_IDLE_SHARE = 1 / 16


def choose_num_steps(
    running: Sequence[SequenceState], config: SchedulerConfig, layout: CacheLayout, num_free: int, *, num_waiting: int
) -> int:
    """Returns the decode steps of the next dispatch, on the assumption that nobody can be admitted now.

    There are several where nobody computes a prompt and no block is missing. Others may wait meanwhile, for a place or
    for blocks, as long as few places fall idle before the dispatch is over: single steps would fill those at once, yet
    each costs a launch. A place that becomes free early, also at a stop id, is filled within the bound that
    `SchedulerConfig.resolve` states.

    Args:
      num_free: blocks that can be allocated.
      num_waiting: sequences that wait.
    """
    num_steps = config.max_steps_per_dispatch or 1
    if num_steps == 1 or any(seq.num_uncomputed_tokens > 1 for seq in running) or not _may_repeat(running):
        return 1
    num_left = [seq.max_num_slots - seq.num_computed_tokens for seq in running]
    is_useful = max(num_left, default=0) >= num_steps
    if is_useful and num_waiting:
        num_idle = sum([num_steps - count for count in num_left if count < num_steps])
        is_useful = num_idle <= MAX_IDLE_SHARE * num_steps * len(running)
    return num_steps if is_useful and not may_lack_blocks(running, num_steps, layout, num_free) else 1


def _may_repeat(running: Sequence[SequenceState]) -> bool:
    """Whether nobody needs the host between two tokens, and there are programs for several steps of them together."""
    others = [seq for seq in running if not seq.is_plain]
    if any(seq.request.wants_scores or seq.request.has_controls for seq in others):
        return False
    return not others or not any(seq.is_random for seq in running)


def may_lack_blocks(running: Sequence[SequenceState], num_steps: int, layout: CacheLayout, num_free: int) -> bool:
    """Whether so many steps of the decoding sequences want more blocks than are free; the others have theirs."""
    if len(running) * layout.blocks_for(num_steps) <= num_free:
        return False
    missing = 0
    for seq in running:
        end = min(seq.num_computed_tokens + num_steps, seq.max_num_slots)
        if end > len(seq.block_ids) * layout.block_size:
            missing += layout.blocks_for(end) - len(seq.block_ids)
    return missing > num_free


def filling_budget(
    max_tokens: int, num_taken: int, waiting: Collection[SequenceState], num_places: int, sizes: Sequence[int]
) -> int:
    """Returns how many of a step's tokens are for those who wait: so many that the step fills one of the sizes.

    Where they want less than is left, and others wait behind them, the next steps will have prompts too. So the last
    prompt leaves its end to them, and no step is longer than what it holds: 5 % of the tokens of long steps were
    padding before. What the prefix cache holds is not known here, so some padding may be left.

    Args:
      max_tokens: of a step.
      num_taken: of them by running sequences.
      num_places: sequences that may start.
      sizes: of steps, padding included, that are worth being filled; ascending.
    """
    budget = max_tokens - num_taken
    if not sizes or len(waiting) <= num_places:
        return budget
    num_wanted = 0
    for seq in itertools.islice(waiting, num_places):
        num_wanted += seq.num_uncomputed_tokens
        if num_wanted >= budget:
            return budget
    filled = max([size for size in sizes if size <= num_taken + num_wanted], default=0)
    return filled - num_taken if filled > num_taken else budget
