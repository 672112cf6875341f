"""The step: one pure function from weights, cache, state and packed inputs to packed results, cache and state."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from photon_jax.cache.kv_cache import KVCache
from photon_jax.config import KernelConfig
from photon_jax.models.config import ModelConfig
from photon_jax.models.decoder import forward_paged
from photon_jax.models.params import Params
from photon_jax.ops.sampling import head_sample, head_score
from photon_jax.ops.tiles import RowTiles
from photon_jax.step_io import Field, StepInputs, StepLayout, StepOutputs, input_fields, output_fields

SCORE_TILE = 128  # tokens whose logits exist at once where ops work on whole arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchState:
    """What lives on the device between steps, by state slot; slot 0 is the null slot.

    Attributes:
      last_token: the token that the slot's sequence sampled last.
    """

    last_token: jax.Array  # i32[max_num_seqs + 1]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """What is the same for all steps of an engine: hashable, static."""

    model: ModelConfig
    kernels: KernelConfig
    max_model_len: int


def init_batch_state(max_num_seqs: int) -> BatchState:
    """Returns the state of an engine that has run no step."""
    return BatchState(last_token=jnp.zeros((max_num_seqs + 1,), jnp.int32))


def step(
    params: Params,
    cache: KVCache,
    state: BatchState,
    packed: jax.Array,  # i32[packed_size(input_fields(layout))]
    *,
    layout: StepLayout,
    config: StepConfig,
) -> tuple[jax.Array, KVCache, BatchState]:
    """Returns the packed StepOutputs i32[packed_size(output_fields(layout))], the new cache and the new state."""
    inputs = unpack(packed, layout)
    inputs = _continue_rows(inputs, state)
    num_tokens, num_rows, _ = inputs.counts
    is_tiled = config.kernels.linear == "reference"
    token_tiles = RowTiles(layout.row_tile, num_tokens) if is_tiled else None
    row_tiles = RowTiles(min(layout.row_tile, layout.num_rows), num_rows) if is_tiled else None
    hidden, cache = forward_paged(
        params,
        cache,
        inputs,
        config=config.model,
        kernels=config.kernels,
        tiles=token_tiles,
        query_tile=layout.query_tile,
        seq_len=config.max_model_len,
    )
    token_ids, logprobs = head_sample(
        hidden[inputs.logits_indices],
        inputs,
        params,
        config=config.model,
        tiles=row_tiles,
        is_greedy=layout.is_greedy,
    )
    state = BatchState(last_token=state.last_token.at[inputs.state_slots].set(token_ids))
    scores: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if layout.has_scores:
        score_tiles = token_tiles or RowTiles(math.gcd(SCORE_TILE, layout.num_tokens), num_tokens)
        scores = head_score(hidden, inputs.target_ids, params, config=config.model, tiles=score_tiles)
    return _pack(StepOutputs(token_ids, logprobs, *scores), output_fields(layout)), cache, state


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
