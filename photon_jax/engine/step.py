"""The step: one pure function from weights, cache, state and packed inputs to packed results, cache and state."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from photon_jax.cache.kv_cache import KVCache
from photon_jax.config import KernelConfig, KVDType
from photon_jax.engine.multi_step import inputs_at, stops
from photon_jax.models.config import ModelConfig
from photon_jax.models.decoder import forward_paged
from photon_jax.models.params import Params
from photon_jax.ops.controls import Controls, ControlState, States, record_tokens
from photon_jax.ops.sampling import head_sample, head_score
from photon_jax.ops.tiles import RowTiles
from photon_jax.step_io import Field, StepInputs, StepLayout, StepOutputs, input_fields, output_fields

Sampled = tuple[jax.Array, jax.Array, jax.Array, jax.Array, States]  # what head_sample returns

SCORE_TILE = 128  # tokens whose logits exist at once where ops work on whole arrays
TOP_SCORE_TILE = 16  # the same where the likeliest tokens are wanted too: sorting takes several copies of the logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchState:
    """What lives on the device between steps, by state slot; slot 0 is the null slot.

    Attributes:
      last_token: the token that the slot's sequence sampled last.
      controls: of sequences with sampling controls; None in steps that have none, and until the first.
    """

    last_token: jax.Array  # i32[max_num_seqs + 1]
    controls: ControlState | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """What is the same for all steps of an engine: hashable, static."""

    model: ModelConfig
    kernels: KernelConfig
    max_model_len: int
    kv_dtype: KVDType = "auto"


def init_batch_state(max_num_seqs: int) -> BatchState:
    """Returns the state of an engine that has run no step."""
    return BatchState(last_token=jnp.zeros((max_num_seqs + 1,), jnp.int32))


def step(
    params: Params,
    cache: KVCache,
    state: BatchState,
    packed: jax.Array,  # i32[packed_size(input_fields(layout))]
    processor_states: States = (),
    token_masks: jax.Array | None = None,  # i32[B ceil(V/32)]
    *,
    layout: StepLayout,
    config: StepConfig,
) -> tuple[jax.Array, KVCache, BatchState, States]:
    """Returns packed results, and the new cache, state and processor states.

    The results are the packed StepOutputs i32[packed_size(output_fields(layout))] of each of the layout's steps, one
    after the other.

    Args:
      state: with controls where the layout has them, without where it has none.
      processor_states: by slot, of each of the layout's processors. They are not donated: those of before a step that
        broke off are what its sequences go on from.
      token_masks: which tokens each row may sample, as Controls has them, where the layout has controls.
    """
    inputs = unpack(packed, layout)
    if layout.num_steps == 1:
        controls = _controls_of(state, processor_states, token_masks, layout)
        outputs, cache, state, processor_states = _one_step(
            params, cache, state, inputs, controls, layout=layout, config=config
        )
        return _pack(outputs, output_fields(layout)), cache, state, processor_states

    def run(
        carry: tuple[KVCache, BatchState, jax.Array], index: jax.Array
    ) -> tuple[tuple[KVCache, BatchState, jax.Array], jax.Array]:
        cache, state, is_stopped = carry
        now = inputs_at(inputs, index, is_stopped, block_size=cache.block_size)
        outputs, cache, state, _ = _one_step(params, cache, state, now, None, layout=layout, config=config)
        is_stopped |= stops(now, outputs.token_ids)
        return (cache, state, is_stopped), _pack(outputs, output_fields(layout))

    is_stopped = jnp.zeros((layout.num_rows,), jnp.bool_)
    indices = jnp.arange(layout.num_steps, dtype=jnp.int32)
    (cache, state, _), results = lax.scan(run, (cache, state, is_stopped), indices)
    return results.reshape(-1), cache, state, processor_states


def _one_step(
    params: Params,
    cache: KVCache,
    state: BatchState,
    inputs: StepInputs,
    controls: Controls | None,
    *,
    layout: StepLayout,
    config: StepConfig,
) -> tuple[StepOutputs, KVCache, BatchState, States]:
    inputs = _continue_rows(inputs, state)
    num_tokens, num_rows, _, _ = inputs.counts
    model, kernels, is_tiled = config.model, config.kernels, config.kernels.linear == "reference"
    token_tiles = RowTiles(layout.row_tile, num_tokens) if is_tiled else None
    row_tiles = RowTiles(min(layout.row_tile, layout.num_rows), num_rows) if is_tiled else None
    hidden, cache = forward_paged(
        params,
        cache,
        inputs,
        config=model,
        kernels=kernels,
        tiles=token_tiles,
        query_tile=layout.query_tile,
        seq_len=config.max_model_len,
    )
    sample = functools.partial(
        head_sample,
        hidden[inputs.logits_indices],
        inputs,
        params,
        config=model,
        kernels=kernels,
        tiles=row_tiles,
        is_greedy=layout.is_greedy,
        controls=controls,
        has_top=layout.has_top,
    )
    may_be_idle = layout.has_scores and kernels.linear == "xla"  # tiles of no rows are left out in any case
    *sampled, row_states = _unless_idle(num_rows, sample) if may_be_idle else sample()
    scores = _score(hidden, inputs, params, layout, config) if layout.has_scores else ()
    outputs = _name_outputs((*sampled, *scores), layout)
    return outputs, cache, *_update(state, controls, inputs, outputs.token_ids, row_states)


def _score(
    hidden: jax.Array, inputs: StepInputs, params: Params, layout: StepLayout, config: StepConfig
) -> tuple[jax.Array, ...]:
    is_tiled = config.kernels.linear == "reference"
    whole_tile = TOP_SCORE_TILE if layout.has_top else SCORE_TILE
    size = layout.row_tile if is_tiled else math.gcd(whole_tile, layout.num_tokens)
    return head_score(
        hidden[inputs.score_indices],
        inputs.target_ids,
        params,
        config=config.model,
        kernels=config.kernels,
        tiles=RowTiles(size, inputs.counts[3]),
        has_top=layout.has_top,
    )


def _unless_idle(num_rows: jax.Array, sample: Callable[[], Sampled]) -> Sampled:
    """Returns what the rows sample, zeros where none does: a step that only scores."""
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(sample))
    results: Sampled = lax.cond(num_rows > 0, sample, lambda: empty)
    return results


def _name_outputs(results: tuple[jax.Array, ...], layout: StepLayout) -> StepOutputs:
    names = [field.name for field in output_fields(layout)]
    return StepOutputs(**dict(zip(names, results, strict=True)))


def _controls_of(
    state: BatchState, processor_states: States, token_masks: jax.Array | None, layout: StepLayout
) -> Controls | None:
    if state.controls is None:
        return None
    assert token_masks is not None, "a step with controls needs token masks"
    return Controls(
        state=state.controls,
        processor_states=processor_states,
        token_masks=token_masks,
        processors=layout.processors,
    )


def _update(
    state: BatchState, controls: Controls | None, inputs: StepInputs, token_ids: jax.Array, row_states: States
) -> tuple[BatchState, States]:
    """Returns state and processor states after the rows sampled token_ids i32[B]; row_states have leaves [B *]."""
    last_token = state.last_token.at[inputs.state_slots].set(token_ids)
    if controls is None:
        return BatchState(last_token=last_token), ()
    slots = inputs.control_slots
    new_states: States = jax.tree.map(lambda old, new: old.at[slots].set(new), controls.processor_states, row_states)
    return BatchState(last_token=last_token, controls=record_tokens(controls.state, slots, token_ids)), new_states


def _continue_rows(inputs: StepInputs, state: BatchState) -> StepInputs:
    """Returns the inputs with the token of each continuing row taken from the state."""
    indices = jnp.where(inputs.continues == 1, inputs.logits_indices, inputs.token_ids.shape[0])
    token_ids = inputs.token_ids.at[indices].set(state.last_token[inputs.state_slots], mode="drop")
    return inputs._replace(token_ids=token_ids)


def unpack(packed: jax.Array, layout: StepLayout) -> StepInputs:
    """Returns the arrays that lie in the packed buffer."""
    arrays, offset = {}, 0
    for field in input_fields(layout):
        part = lax.slice_in_dim(packed, offset, offset + field.size).reshape(field.shape)
        arrays[field.name] = lax.bitcast_convert_type(part, jnp.dtype(field.dtype))
        offset += field.size
    return StepInputs(**arrays)


def _pack(outputs: StepOutputs, fields: tuple[Field, ...]) -> jax.Array:
    parts = [lax.bitcast_convert_type(getattr(outputs, field.name), jnp.int32).reshape(-1) for field in fields]
    return jnp.concatenate(parts)


jit_step = functools.partial(jax.jit, static_argnames=("layout", "config"), donate_argnames=("cache", "state"))(step)
"""The step, jitted once for the process: engines of one model and one geometry share its programs."""
