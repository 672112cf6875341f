"""Slot table: what of a running sequence stays the same from step to step, as arrays by state slot. NumPy only."""

import zlib
from collections.abc import Sequence

import numpy as np

from photon_jax.scheduler.sequence import SequenceState
from photon_jax.step_io import STOP_IDS_WIDTH, TOP_KINDS

NOBODY = -1
_FIRST_WIDTH = 16  # blocks; the tables widen when a sequence has more


class SlotTable:
    """Rows of sampling parameters and block tables; a step's rows are gathered from it by slot.

    Attributes:
      params: arrays [slots *] of the StepInputs fields that a request determines.
      first_stops: i64[slots], the first position at which the sequence may have a stop id.
      block_tables: i32[slots width], padded with the null block.
    """

    def __init__(self, num_slots: int) -> None:
        self.params = {
            "temperature": np.zeros(num_slots, np.float32),
            "top_p": np.ones(num_slots, np.float32),
            "min_p": np.zeros(num_slots, np.float32),
            "top_k": np.zeros(num_slots, np.int32),
            "seeds": np.zeros((num_slots, 2), np.uint32),
            "prompt_digests": np.zeros(num_slots, np.uint32),
            "sample_indices": np.zeros(num_slots, np.int32),
            "num_stop_ids": np.zeros(num_slots, np.int32),
            "top_kinds": np.zeros(num_slots, np.int32),
            "stop_ids": np.zeros((num_slots, STOP_IDS_WIDTH), np.int32),
        }
        self.first_stops = np.zeros(num_slots, np.int64)
        self.block_tables = np.zeros((num_slots, _FIRST_WIDTH), np.int32)
        self._admissions = np.full(num_slots, NOBODY, np.int64)  # whose row it is
        self._num_blocks = np.zeros(num_slots, np.int64)

    def update(self, seqs: Sequence[SequenceState], admissions: np.ndarray) -> np.ndarray:
        """Writes what changed since the last step; returns the slots i64[rows] of the rows' sequences.

        Args:
          admissions: i64[rows], those for which the rows were planned.
        """
        slots = np.array([seq.state_slot for seq in seqs], np.int64)
        for row in np.flatnonzero(self._admissions[slots] != admissions).tolist():
            self._enter(int(slots[row]), seqs[row], int(admissions[row]))
        num_blocks = np.array([len(seq.block_ids) for seq in seqs], np.int64)
        for row in np.flatnonzero(self._num_blocks[slots] != num_blocks).tolist():
            self._append_blocks(int(slots[row]), seqs[row].block_ids)
        return slots

    def num_masked(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns for how many tokens the stop ids are masked, the next one to be sampled at `positions`."""
        masked: np.ndarray = np.maximum(self.first_stops[slots] - positions, 0)
        return masked

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        width = self.block_tables.shape[1]
        if len(block_ids) > width:
            more = max(width, len(block_ids) - width)
            self.block_tables = np.pad(self.block_tables, ((0, 0), (0, more)))
        begin = self._num_blocks[slot]
        self.block_tables[slot, begin : len(block_ids)] = block_ids[begin:]
        self._num_blocks[slot] = len(block_ids)

    def _enter(self, slot: int, seq: SequenceState, admission: int) -> None:
        request = seq.request
        params, values = request.params, self.params
        for name in ("temperature", "top_p", "min_p", "top_k"):
            values[name][slot] = getattr(params, name)
        values["seeds"][slot] = request.seed
        values["prompt_digests"][slot] = zlib.crc32(np.asarray(request.prompt_token_ids, np.int32).tobytes())
        values["sample_indices"][slot] = request.sample_index
        values["top_kinds"][slot] = TOP_KINDS.index(params.logprobs_kind)
        stop_ids = request.stop_token_ids
        values["num_stop_ids"][slot] = len(stop_ids)
        values["stop_ids"][slot, : len(stop_ids)] = stop_ids
        self.first_stops[slot] = seq.num_prompt_tokens + params.min_tokens
        self.block_tables[slot] = 0
        self._num_blocks[slot] = 0
        self._admissions[slot] = admission
