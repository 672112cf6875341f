"""Input builder: turns a step plan into the one packed buffer that is uploaded. NumPy only."""

import functools
from collections.abc import Sequence

import numpy as np

from photon_jax.engine.slot_table import NOBODY, SlotTable
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan
from photon_jax.step_io import Field, StepLayout, host_views, input_fields, packed_size

Views = dict[str, np.ndarray]


class InputBuilder:
    """Builds step inputs; what stays the same while a sequence runs is kept by state slot.

    Attributes:
      block_size: tokens in a cache block.
    """

    def __init__(self, *, block_size: int, max_num_seqs: int) -> None:
        self.block_size = block_size
        self._table = SlotTable(max_num_seqs + 1)
        # what the device's last_token holds: whose token, and its position
        self._sampled_admission = np.full(max_num_seqs + 1, NOBODY, np.int64)
        self._sampled_position = np.zeros(max_num_seqs + 1, np.int64)

    def build(self, plan: StepPlan, layout: StepLayout, processor_ids: Sequence[int] = ()) -> np.ndarray:
        """Returns i32[packed_size(input_fields(layout))] for a plan that fits the layout.

        The step is taken to be launched: its samples are on the device when the next one is built.

        Args:
          processor_ids: of each row, where the layout has controls.
        """
        fields, size = _fields_and_size(layout)
        buffer = np.zeros(size, np.int32)
        views = host_views(buffer, fields)
        rows, num_rows = plan.scheduled, len(plan.scheduled)
        seqs, *numbers = zip(*rows, strict=True)
        starts, counts, num_sampled, admissions = (np.array(column, np.int64) for column in numbers)
        slots = self._table.update(seqs, admissions)
        ends = starts + counts
        if plan.num_steps > 1:
            views["num_steps"][:num_rows] = counts
            views["num_masked_steps"][:num_rows] = self._table.num_masked(slots, starts + 1)
            counts = np.ones_like(counts)  # in the first step
        firsts = np.cumsum(counts) - counts  # of each row's tokens in [0, T)
        self._fill_rows(views, slots, starts + counts, firsts + counts - 1, num_sampled > 0)
        continues = self._continues(slots, starts, counts, admissions)
        views["continues"][:num_rows] = continues
        self._fill_tokens(views, rows, slots, starts, counts, firsts, continues)
        num_scores = _fill_scores(views, rows, firsts)
        num_items = _fill_items(views, counts, firsts, layout.query_tile)
        if layout.has_controls:
            has_controls = [row.samples and row.seq.request.has_controls for row in rows]
            views["control_slots"][:num_rows] = np.where(has_controls, slots, 0)
            views["processor_ids"][:num_rows] = processor_ids
        samples = num_sampled > 0
        views["counts"][:] = (counts.sum(), num_rows if samples.any() else 0, num_items, num_scores)
        self._sampled_admission[slots[samples]] = admissions[samples]
        self._sampled_position[slots[samples]] = ends[samples]
        return buffer

    def _fill_rows(
        self,
        views: Views,
        slots: np.ndarray,
        ends: np.ndarray,  # position after each row's last token
        lasts: np.ndarray,  # place of that token in [0, T)
        samples: np.ndarray,  # bool
    ) -> None:
        table, num_rows = self._table, len(slots)
        for name, values in table.params.items():
            views[name][:num_rows] = values[slots]
        width = min(views["block_tables"].shape[1], table.block_tables.shape[1])
        views["block_tables"][:num_rows, :width] = table.block_tables[slots, :width]
        views["logits_indices"][:num_rows] = lasts
        views["sample_positions"][:num_rows] = ends
        views["masks_stops"][:num_rows] = table.num_masked(slots, ends) > 0
        views["state_slots"][:num_rows] = np.where(samples, slots, 0)

    def _continues(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, admissions: np.ndarray
    ) -> np.ndarray:
        """Returns for each row whether its only token is the last one that its slot sampled."""
        is_on_device = (self._sampled_admission[slots] == admissions) & (self._sampled_position[slots] == starts)
        continues: np.ndarray = is_on_device & (counts == 1)
        return continues

    def _fill_tokens(
        self,
        views: Views,
        rows: Sequence[ScheduledSequence],
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        firsts: np.ndarray,
        continues: np.ndarray,
    ) -> None:
        num_tokens = int(counts.sum())
        row_of = np.repeat(np.arange(len(rows)), counts)
        positions = starts[row_of] + np.arange(num_tokens) - firsts[row_of]
        blocks = self._table.block_tables[slots[row_of], positions // self.block_size]
        views["positions"][:num_tokens] = positions
        views["slot_mapping"][:num_tokens] = blocks * self.block_size + positions % self.block_size
        for row in np.flatnonzero(~continues).tolist():
            seq, start, count, first = rows[row].seq, rows[row].start, counts[row], firsts[row]
            assert start + count <= len(seq.token_ids), f"a token of {seq.request_id!r} is neither here nor there"
            views["token_ids"][first : first + count] = seq.token_ids[start : start + count]


def _fill_scores(views: Views, rows: Sequence[ScheduledSequence], firsts: np.ndarray) -> int:
    """Writes which tokens are scored and with what, if any; returns how many."""
    end = 0
    if views["target_ids"].size:
        for item, first in zip(rows, firsts.tolist(), strict=True):
            scores, offset = item.scores, first - item.start
            begin, end = end, end + len(scores)
            views["score_indices"][begin:end] = np.arange(offset + scores.start, offset + scores.start + len(scores))
            views["target_ids"][begin:end] = item.seq.token_ids[scores.start + 1 : scores.start + 1 + len(scores)]
    return end


@functools.lru_cache(maxsize=256)
def _fields_and_size(layout: StepLayout) -> tuple[tuple[Field, ...], int]:
    fields = input_fields(layout)
    return fields, packed_size(fields)


def _fill_items(views: Views, counts: np.ndarray, firsts: np.ndarray, query_tile: int) -> int:
    """Writes the work list of attention; returns how many items it has."""
    num_tiles = -(-counts // query_tile)
    num_items = int(num_tiles.sum())
    row_of = np.repeat(np.arange(len(counts)), num_tiles)
    offsets = (np.arange(num_items) - (np.cumsum(num_tiles) - num_tiles)[row_of]) * query_tile
    views["item_rows"][:num_items] = row_of
    views["item_starts"][:num_items] = firsts[row_of] + offsets
    views["item_lens"][:num_items] = np.minimum(query_tile, counts[row_of] - offsets)
    return num_items
