"""Integrity: that the sequences of a scheduler are as they must be. Host only."""

from collections.abc import Iterable, Sequence

from photon_jax.cache.layout import CacheLayout
from photon_jax.scheduler.plan import StepPlan
from photon_jax.scheduler.sequence import SequenceState, SequenceStatus


def check_sequences(
    running: Sequence[SequenceState],
    waiting: Sequence[SequenceState],
    in_flight: Iterable[StepPlan],
    layout: CacheLayout,
) -> None:
    """Raises if a sequence, or the order of all, is not as it must be.

    Args:
      in_flight: plans that were not applied yet.
    """
    order = [seq.arrival for seq in (*running, *waiting)]
    assert order == sorted(set(order)), f"running and waiting ones are out of order of arrival: {order}"
    for seq in waiting:
        clean = not (seq.block_ids or seq.num_computed_tokens or seq.num_pending or seq.state_slot or seq.admission)
        assert clean and seq.status is SequenceStatus.WAITING, f"waiting, not clean: {seq}"
    rows = [row for plan in in_flight for row in plan.scheduled]
    for seq in running:
        assert seq.status is SequenceStatus.RUNNING, f"running, yet {seq.status}: {seq}"
        assert 0 <= seq.num_computed_tokens <= min(seq.num_tokens, seq.max_num_slots), f"computed too much: {seq}"
        num_sampled = [row.num_sampled for row in rows if row.admission == seq.admission]
        assert seq.num_pending == sum(num_sampled), f"{len(num_sampled)} rows in flight: {seq}"
        num_blocks = layout.blocks_for(seq.num_tokens)
        fits = num_blocks - 1 <= len(seq.block_ids) <= min(num_blocks, seq.max_num_blocks)
        assert fits, f"{len(seq.block_ids)} blocks for {seq.num_tokens} tokens, {seq.max_num_blocks} at most: {seq}"


def check_slots(slots: Sequence[int], max_num_seqs: int) -> None:
    """Raises unless the state slots, free and used, are those that there are, each once."""
    assert sorted(slots) == list(range(1, max_num_seqs + 1)), f"state slots, free and used: {sorted(slots)}"
