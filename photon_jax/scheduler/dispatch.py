"""Dispatch: how many decode steps run one after the other without the host. Host only."""

from collections.abc import Sequence

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import SchedulerConfig
from photon_jax.scheduler.sequence import SequenceState


def choose_num_steps(
    running: Sequence[SequenceState], config: SchedulerConfig, layout: CacheLayout, num_free: int
) -> int:
    """Returns the decode steps of the next dispatch while nobody waits: several where nobody computes a prompt.

    Args:
      num_free: blocks that can be allocated.
    """
    num_steps = config.max_steps_per_dispatch or 1
    if num_steps == 1 or any(seq.num_uncomputed_tokens > 1 or not seq.is_plain for seq in running):
        return 1
    most = max((seq.max_num_slots - seq.num_computed_tokens for seq in running), default=0)
    is_useful = most >= num_steps and not may_lack_blocks(running, num_steps, layout, num_free)
    return num_steps if is_useful else 1


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
