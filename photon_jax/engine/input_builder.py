"""Input builder: turns a step plan into the one packed buffer that is uploaded. NumPy only."""

import zlib

import numpy as np

from photon_jax.scheduler.plan import ScheduledSequence, StepPlan
from photon_jax.scheduler.sequence import SequenceState
from photon_jax.step_io import STOP_IDS_WIDTH, StepLayout, host_views, input_fields, packed_size

_NOBODY = -1


class InputBuilder:
    """Builds step inputs; keeps by state slot what stays the same while a sequence runs.

    Attributes:
      block_size: tokens in a cache block.
    """

    def __init__(self, *, block_size: int, max_num_seqs: int) -> None:
        self.block_size = block_size
        slots = max_num_seqs + 1
        self._arrival = np.full(slots, _NOBODY, np.int64)  # whose parameters the rows below hold
        self._params = {
            "temperature": np.zeros(slots, np.float32),
            "top_p": np.ones(slots, np.float32),
            "min_p": np.zeros(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "seeds": np.zeros((slots, 2), np.uint32),
            "prompt_digests": np.zeros(slots, np.uint32),
            "sample_indices": np.zeros(slots, np.int32),
            "num_stop_ids": np.zeros(slots, np.int32),
            "stop_ids": np.zeros((slots, STOP_IDS_WIDTH), np.int32),
        }
        # what the device's last_token holds: whose token, and its position
        self._sampled_arrival = np.full(slots, _NOBODY, np.int64)
        self._sampled_position = np.zeros(slots, np.int64)

    def build(self, plan: StepPlan, layout: StepLayout) -> np.ndarray:
        """Returns i32[packed_size(input_fields(layout))] for a plan that fits the layout.

        The step is taken to be launched: its samples are on the device when the next one is built.
        """
        fields = input_fields(layout)
        buffer = np.zeros(packed_size(fields), np.int32)
        views = host_views(buffer, fields)
        start, item_index = 0, 0
        for row, item in enumerate(plan.scheduled):
            self._fill_tokens(views, item, start)
            self._fill_row(views, row, item, start)
            item_index = self._fill_items(views, row, item.num_new_tokens, start, item_index, layout.query_tile)
            start += item.num_new_tokens
        num_rows = len(plan.scheduled)
        slots = np.fromiter((item.seq.state_slot for item in plan.scheduled), np.int64, num_rows)
        for name, values in self._params.items():
            views[name][:num_rows] = values[slots]
        views["counts"][:] = (start, num_rows, item_index)
        return buffer

    def _fill_tokens(self, views: dict[str, np.ndarray], item: ScheduledSequence, start: int) -> None:
        seq, first, count = item.seq, item.start, item.num_new_tokens
        span = slice(start, start + count)
        positions = np.arange(first, first + count, dtype=np.int32)
        views["token_ids"][span] = seq.token_ids[first : first + count]
        views["positions"][span] = positions
        blocks = np.asarray(seq.block_ids, np.int32)
        views["slot_mapping"][span] = (
            blocks[positions // self.block_size] * self.block_size + positions % self.block_size
        )
        if seq.request.score:
            targets = seq.token_ids[first + 1 : first + 1 + count]  # nothing follows the last token
            views["target_ids"][start : start + len(targets)] = targets

    def _fill_row(self, views: dict[str, np.ndarray], row: int, item: ScheduledSequence, start: int) -> None:
        seq = item.seq
        self._refresh(seq)
        end = item.start + item.num_new_tokens
        views["block_tables"][row, : len(seq.block_ids)] = seq.block_ids
        views["logits_indices"][row] = start + item.num_new_tokens - 1
        views["sample_positions"][row] = end
        views["masks_stops"][row] = seq.num_output_tokens < seq.request.params.min_tokens
        slot = seq.state_slot
        is_on_device = self._sampled_arrival[slot] == seq.arrival and self._sampled_position[slot] == item.start
        views["continues"][row] = is_on_device and item.num_new_tokens == 1
        if item.samples:
            views["state_slots"][row] = slot
            self._sampled_arrival[slot], self._sampled_position[slot] = seq.arrival, end

    @staticmethod
    def _fill_items(
        views: dict[str, np.ndarray], row: int, num_tokens: int, start: int, item_index: int, query_tile: int
    ) -> int:
        """Adds the row's attention items to the work list; returns the next free place."""
        offsets = np.arange(0, num_tokens, query_tile, dtype=np.int32)
        span = slice(item_index, item_index + len(offsets))
        views["item_rows"][span] = row
        views["item_starts"][span] = start + offsets
        views["item_lens"][span] = np.minimum(query_tile, num_tokens - offsets)
        return item_index + len(offsets)

    def _refresh(self, seq: SequenceState) -> None:
        """Writes the sequence's parameters to its slot, unless they are there."""
        slot, request = seq.state_slot, seq.request
        if self._arrival[slot] == seq.arrival:
            return
        self._arrival[slot] = seq.arrival
        params, values = request.params, self._params
        for name in ("temperature", "top_p", "min_p", "top_k"):
            values[name][slot] = getattr(params, name)
        values["seeds"][slot] = request.seed
        values["prompt_digests"][slot] = zlib.crc32(np.asarray(request.prompt_token_ids, np.int32).tobytes())
        values["sample_indices"][slot] = request.sample_index
        stop_ids = request.stop_token_ids
        values["num_stop_ids"][slot] = len(stop_ids)
        values["stop_ids"][slot, : len(stop_ids)] = stop_ids
