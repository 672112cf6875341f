"""Control slots: puts the sampling controls of a sequence on the device when it gets a slot; keeps processor states."""

import collections
import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from photon_jax.controls import ProcessorFn
from photon_jax.engine.placement import place, placed_shapes
from photon_jax.engine.processors import as_arrays
from photon_jax.ops.controls import NO_TOKEN, RECENT_WIDTH, ControlState, PyTree, States, control_state_shapes
from photon_jax.scheduler.plan import ScheduledSequence, StepPlan
from photon_jax.scheduler.sequence import SequenceState, SequenceStatus


class _ProcessorKey(NamedTuple):
    """What sequences share the states of: one function, with states of one structure."""

    fn: ProcessorFn
    structure: jax.tree_util.PyTreeDef
    leaves: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each


class _Owner(NamedTuple):
    """Whose controls a slot holds."""

    seq: SequenceState
    admission: int  # of the sequence when the slot was filled
    key: _ProcessorKey | None


@dataclasses.dataclass(frozen=True, slots=True)
class StepProcessors:
    """The processors of one step.

    Attributes:
      keys: of each, in the order in which the engine met them.
      row_ids: 1 + index of each row's processor, 0 for none.
      states: of each, by slot, before the step.
    """

    keys: tuple[_ProcessorKey, ...] = ()
    row_ids: tuple[int, ...] = ()
    states: States = ()

    @property
    def fns(self) -> tuple[ProcessorFn, ...]:
        """Their functions."""
        return tuple(key.fn for key in self.keys)


def _fill_slot(arrays: PyTree, slot: jax.Array, row: PyTree) -> PyTree:
    return jax.tree.map(lambda array, value: array.at[slot].set(value), arrays, row)


_fill_controls = jax.jit(_fill_slot, donate_argnums=0)
_fill_processor = jax.jit(_fill_slot)
_take_slot = jax.jit(lambda arrays, slot: jax.tree.map(lambda array: array[slot], arrays))


class ControlSlots:
    """Keeps track of whose controls each slot holds, and owns the processors' states.

    A processor's state depends on logits that are gone, so it can't be computed again: it is saved when its sequence
    loses the slot, and when a step breaks off. Steps whose results are not collected yet are void for such a sequence,
    so what is saved is the state before them.
    """

    def __init__(self, *, vocab_size: int, num_slots: int) -> None:
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._owners: dict[int, _Owner] = {}
        self._states: dict[_ProcessorKey, PyTree] = {}
        self._saved: dict[SequenceState, PyTree] = {}
        # of each step with processors that was not collected yet: states and owners before it
        self._in_flight: collections.deque[tuple[dict[_ProcessorKey, PyTree], dict[int, _Owner]]] = collections.deque()

    def compile_ahead(self) -> None:
        """Compiles what fills a slot, so that `init_state` does not; any thread may."""
        shapes = placed_shapes(control_state_shapes(self._num_slots, self._vocab_size))
        _fill_controls.lower(shapes, np.int32(0), _neutral_row(self._vocab_size)).compile()

    def init_state(self) -> ControlState:
        """Returns the state of slots without controls; its programs are compiled then."""
        shapes = control_state_shapes(self._num_slots, self._vocab_size)
        state = place(jax.tree.map(lambda array: np.zeros(array.shape, array.dtype), shapes))
        filled: ControlState = _fill_controls(state, np.int32(0), _neutral_row(self._vocab_size))
        return filled

    def release(self) -> None:
        """Frees the slots of sequences that no longer run; must be called before a step is launched."""
        for slot, owner in list(self._owners.items()):
            if owner.admission != owner.seq.admission:
                self._save(slot, owner)
                del self._owners[slot]
        self._saved = {seq: state for seq, state in self._saved.items() if seq.status is not SequenceStatus.FINISHED}

    def fill(self, state: ControlState, plan: StepPlan) -> ControlState:
        """Returns the state with the controls of the rows that sample; writes those that are not there yet."""
        for item in plan.scheduled:
            slot = item.seq.state_slot
            if _is_controlled(item) and slot not in self._owners:
                self._enter(item.seq)
                state = _fill_controls(state, np.int32(slot), _control_row(item.seq, self._vocab_size))
        return state

    def _enter(self, seq: SequenceState) -> None:
        processor = seq.request.params.processor
        key = None
        if processor is not None:
            row = as_arrays(processor.init_state)
            key = _key_of(processor.fn, row)
            if key not in self._states:
                in_use = {owner.key for owner in self._owners.values()}
                self._states = {other: states for other, states in self._states.items() if other in in_use}
                self._states[key] = place(
                    jax.tree.map(lambda leaf: np.zeros((self._num_slots, *leaf.shape), leaf.dtype), row)
                )
                _take_slot(self._states[key], np.int32(0))  # compiles it, so that no preemption has to wait for it
            if seq.num_output_tokens > 0:
                row = self._saved[seq]
            self._states[key] = _fill_processor(self._states[key], np.int32(seq.state_slot), row)
        self._owners[seq.state_slot] = _Owner(seq, seq.admission, key)

    def _save(self, slot: int, owner: _Owner) -> None:
        if owner.key is None or owner.seq.status is SequenceStatus.FINISHED:
            return
        before = (states for states, owners in self._in_flight if owners.get(slot) is owner)
        self._saved[owner.seq] = _take_slot(next(before, self._states)[owner.key], np.int32(slot))

    def processors(self, plan: StepPlan) -> StepProcessors:
        """Returns the processors of a plan whose controls are filled."""
        keys = [self._owners[item.seq.state_slot].key if _is_controlled(item) else None for item in plan.scheduled]
        present = tuple(key for key in self._states if key in keys)
        return StepProcessors(
            keys=present,
            row_ids=tuple(0 if key is None else 1 + present.index(key) for key in keys),
            states=tuple(self._states[key] for key in present),
        )

    def launched(self, processors: StepProcessors, new_states: States) -> None:
        """Takes over the states after a step."""
        if processors.keys:
            self._in_flight.append((dict(self._states), dict(self._owners)))
            self._states |= dict(zip(processors.keys, new_states, strict=True))

    def collected(self) -> None:
        """Notes that the oldest step with processors has ended well."""
        self.release()  # what is void from it on needs the state before it
        self._in_flight.popleft()

    def reset(self) -> None:
        """Empties the slots, whose arrays are lost; processors go on from before the steps that were not collected."""
        for slot, owner in self._owners.items():
            self._save(slot, owner)
        self._owners, self._states = {}, {}
        self._in_flight.clear()


def control_bytes(*, vocab_size: int, num_slots: int) -> int:
    """Returns the device memory that the control state takes, processors not included."""
    leaves = jax.tree.leaves(control_state_shapes(num_slots, vocab_size))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _is_controlled(item: ScheduledSequence) -> bool:
    return item.samples and item.seq.request.has_controls


def _key_of(fn: ProcessorFn, row: PyTree) -> _ProcessorKey:
    leaves, structure = jax.tree.flatten(row)
    return _ProcessorKey(fn, structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))


def _neutral_row(vocab_size: int) -> ControlState:
    """Returns the controls of a slot without any, as NumPy arrays."""
    shapes = control_state_shapes(1, vocab_size)
    row: ControlState = jax.tree.map(lambda array: np.zeros(array.shape[1:], array.dtype), shapes)
    row.penalties[0] = 1.0
    row.recent[:] = NO_TOKEN
    row.bad_starts[:] = NO_TOKEN
    return row


def _control_row(seq: SequenceState, vocab_size: int) -> ControlState:
    """Returns the controls of a sequence, counted from its tokens, as NumPy arrays."""
    params, row = seq.request.params, _neutral_row(vocab_size)
    output = np.asarray(seq.token_ids[seq.num_prompt_tokens :], np.int32)
    row.penalties[:] = (params.repetition_penalty or 1.0, params.presence_penalty, params.frequency_penalty)
    row.in_prompt[np.asarray(seq.request.prompt_token_ids)] = True
    row.output_counts[:] = np.bincount(output, minlength=vocab_size)
    newest = output[-RECENT_WIDTH:]
    row.recent[RECENT_WIDTH - len(newest) :] = newest
    for token_id, bias in (params.logit_bias or {}).items():
        row.bias[token_id] = bias
    if params.allowed_token_ids is not None:
        is_allowed = np.zeros(vocab_size, np.bool_)
        is_allowed[np.asarray(params.allowed_token_ids)] = True
        row.bias[~is_allowed] = -np.inf
    words = [word for word in seq.request.bad_word_ids if len(word) > 1]
    for word in seq.request.bad_word_ids:
        if len(word) == 1 and seq.matcher is None:  # else its masks leave them out where they can
            row.bias[word[0]] = -np.inf
    for index, word in enumerate(words):
        row.bad_starts[index, RECENT_WIDTH - len(word) + 1 :] = word[:-1]
        row.bad_lasts[index] = word[-1]
    row.num_bad_words[...] = len(words)
    return row
