"""Sampling controls in the step: processors, penalties, bias and bad words change the logits before they are sampled.

Pure functions over rows of logits and the control state by slot. Slot 0 is the null slot: rows without controls have
it, and keep their logits bit by bit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from photon_jax.controls import MAX_BAD_WORD_TOKENS, MAX_BAD_WORD_VARIANTS, ProcessorFailure, ProcessorFn

NO_TOKEN = -1  # only ever compared with token ids, never an index
RECENT_WIDTH = MAX_BAD_WORD_TOKENS - 1

PyTree = object
States = tuple[PyTree, ...]  # of each processor; leaves [slots *] by slot, or [M *] by row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlState:
    """What the controls of running sequences need, by state slot.

    Attributes:
      penalties: repetition, presence and frequency penalty.
      in_prompt: whether the prompt holds the token.
      output_counts: how often the output holds the token.
      bias: added to the logits; -inf for tokens that are never allowed.
      recent: the output's last tokens, the newest last; NO_TOKEN before the first.
      bad_starts: of each bad word of several tokens all but the last one, on the right; NO_TOKEN fits any token.
      bad_lasts: its last token.
      num_bad_words: the first so many are in use.
    """

    penalties: jax.Array  # f32[slots 3]
    in_prompt: jax.Array  # bool[slots V]
    output_counts: jax.Array  # i32[slots V]
    bias: jax.Array  # f32[slots V]
    recent: jax.Array  # i32[slots W]
    bad_starts: jax.Array  # i32[slots M W]
    bad_lasts: jax.Array  # i32[slots M]
    num_bad_words: jax.Array  # i32[slots]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """The control state and the processors of a step.

    Attributes:
      processor_states: of each processor, leaves [slots *].
      token_masks: bit t % 32 of word t // 32 is 1 where token t may come next, by row.
      processors: the functions.
    """

    state: ControlState
    processor_states: States
    token_masks: jax.Array  # i32[B ceil(V/32)]
    processors: tuple[ProcessorFn, ...] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlRows:
    """Which controls the rows of a step have.

    Attributes:
      slots: place in the control state; 0 without controls.
      processor_ids: 1 + index of the row's processor; 0 for none.
      token_ids: the last token of the sequence so far.
      positions: of the token to sample.
      token_masks: see Controls.
    """

    slots: jax.Array  # i32[M]
    processor_ids: jax.Array  # i32[M]
    token_ids: jax.Array  # i32[M]
    positions: jax.Array  # i32[M]
    token_masks: jax.Array  # i32[M ceil(V/32)]


def control_state_shapes(num_slots: int, vocab_size: int) -> ControlState:
    """Returns the shape and dtype of each array."""

    def array(dtype: type, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((num_slots, *shape), np.dtype(dtype))

    return ControlState(
        penalties=array(np.float32, 3),
        in_prompt=array(np.bool_, vocab_size),
        output_counts=array(np.int32, vocab_size),
        bias=array(np.float32, vocab_size),
        recent=array(np.int32, RECENT_WIDTH),
        bad_starts=array(np.int32, MAX_BAD_WORD_VARIANTS, RECENT_WIDTH),
        bad_lasts=array(np.int32, MAX_BAD_WORD_VARIANTS),
        num_bad_words=array(np.int32),
    )


def control_logits(
    logits: jax.Array,  # f32[M V]
    rows: ControlRows,
    controls: Controls,
    mask_stops: Callable[[jax.Array], jax.Array],
    *,
    is_tiled: bool,
) -> tuple[jax.Array, States]:
    """Returns the logits f32[M V] to sample from, and the processor states of the rows, leaves [M *].

    Each row that has something left to sample keeps something: a processor's logits are dropped where nothing would
    be left, and so is the mask of bad words.

    Args:
      mask_stops: gives the logits -inf at the stop ids that min_tokens rules out.
      is_tiled: whether a row's bits must not depend on how many rows there are: processors then run row by row.
    """
    has_controls = jnp.expand_dims(rows.slots > 0, 1)
    state = jax.tree.map(lambda array: array[rows.slots], controls.state)

    def change(logits: jax.Array) -> jax.Array:
        changed = _mask_tokens(_add_bias(_penalize(logits, state), state), rows.token_masks)
        return mask_stops(jnp.where(has_controls, changed, logits))

    changed = change(logits)
    states: States = jax.tree.map(lambda array: array[rows.slots], controls.processor_states)
    if controls.processors:
        processed, states = _process(logits, rows, controls.processors, states, is_tiled=is_tiled)
        processed = change(processed)
        changed = jnp.where(_has_any(processed), processed, changed)
    masked = _mask_bad_words(changed, state)
    return jnp.where(_has_any(masked), masked, changed), states


def _penalize(logits: jax.Array, state: ControlState) -> jax.Array:
    """Returns the logits after repetition, then frequency and presence penalty."""
    repetition, presence, frequency = (jnp.expand_dims(state.penalties[:, index], 1) for index in range(3))
    is_output = state.output_counts > 0
    repeated = jnp.where(logits > 0.0, logits / repetition, logits * repetition)
    logits = jnp.where(state.in_prompt | is_output, repeated, logits)
    return logits - frequency * state.output_counts.astype(jnp.float32) - jnp.where(is_output, presence, 0.0)


def _add_bias(logits: jax.Array, state: ControlState) -> jax.Array:
    """Returns the logits with the bias added, finite or -inf."""
    largest = np.finfo(np.float32).max
    return jnp.where(state.bias == -jnp.inf, -jnp.inf, jnp.minimum(logits + state.bias, largest))


def _mask_tokens(logits: jax.Array, token_masks: jax.Array) -> jax.Array:
    """Returns the logits f32[M V] with -inf where the bits of token_masks i32[M ceil(V/32)] are 0."""
    bits = jnp.right_shift(jnp.expand_dims(token_masks, 2), jnp.arange(32, dtype=jnp.int32).reshape(1, 1, 32)) & 1
    is_allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] == 1  # [M ceil(V/32) 32] to [M V]
    return jnp.where(is_allowed, logits, -jnp.inf)


def _mask_bad_words(logits: jax.Array, state: ControlState) -> jax.Array:
    """Returns the logits with -inf at the last token of each bad word whose other tokens end the output."""
    starts = state.bad_starts
    fits = ((starts == jnp.expand_dims(state.recent, 1)) | (starts == NO_TOKEN)).all(axis=-1)
    is_used = jnp.expand_dims(jnp.arange(starts.shape[1]), 0) < jnp.expand_dims(state.num_bad_words, 1)
    row = jnp.expand_dims(jnp.arange(logits.shape[0]), 1)
    return logits.at[row, state.bad_lasts].min(jnp.where(fits & is_used, -jnp.inf, jnp.inf))


def _has_any(logits: jax.Array) -> jax.Array:
    """Returns bool[M 1], whether a token of the row can be sampled."""
    return logits.max(axis=-1, keepdims=True) > -jnp.inf


def _process(
    logits: jax.Array,
    rows: ControlRows,
    processors: tuple[ProcessorFn, ...],
    states: States,  # leaves [M *]
    *,
    is_tiled: bool,
) -> tuple[jax.Array, States]:
    """Returns each row's logits and states as its own processor leaves them; NaN becomes -inf."""
    new_states = []
    for index, (processor, state) in enumerate(zip(processors, states, strict=True)):
        is_its_own = rows.processor_ids == index + 1
        try:
            processed, new_state = _run_processor(processor, is_its_own, state, logits, rows, is_tiled)
        except Exception as error:  # a function of a caller's may raise anything
            raise ProcessorFailure(processor) from error
        processed = jnp.where(jnp.isnan(processed), -jnp.inf, processed)
        logits = jnp.where(jnp.expand_dims(is_its_own, 1), processed, logits)
        new_states.append(new_state)
    return logits, tuple(new_states)


def _run_processor(
    processor: ProcessorFn,
    is_its_own: jax.Array,  # bool[M]
    states: PyTree,
    logits: jax.Array,
    rows: ControlRows,
    is_tiled: bool,
) -> tuple[jax.Array, PyTree]:
    """Returns the logits f32[M V] and states of one processor; other rows keep theirs."""
    fn = jax.jit(processor)  # traced once for all sizes of step

    def one(
        is_its_own: jax.Array, state: PyTree, logits: jax.Array, token: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        new_state, new_logits = fn(state, logits, token, position)
        keep = lambda new, old: jnp.where(is_its_own, new, old)  # noqa: E731 (a line for each leaf)
        return new_logits, jax.tree.map(keep, new_state, state)

    arguments = (is_its_own, states, logits, rows.token_ids, rows.positions)
    if not is_tiled:
        results: tuple[jax.Array, PyTree] = jax.vmap(one)(*arguments)
        return results

    def maybe(row: tuple[jax.Array, PyTree, jax.Array, jax.Array, jax.Array]) -> Any:
        return lax.cond(row[0], lambda: one(*row), lambda: (row[2], row[1]))

    results = lax.map(maybe, arguments)
    return results


def record_tokens(state: ControlState, slots: jax.Array, token_ids: jax.Array) -> ControlState:
    """Returns the control state after rows sampled token_ids i32[B]; rows without controls write to the null slot."""
    newest = jnp.concatenate([state.recent[slots][:, 1:], jnp.expand_dims(token_ids, 1)], axis=1)
    return dataclasses.replace(
        state,
        output_counts=state.output_counts.at[slots, token_ids].add(1),
        recent=state.recent.at[slots].set(newest),
    )
