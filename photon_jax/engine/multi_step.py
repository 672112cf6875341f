"""Several decode steps in one dispatch: how the inputs of the first one become those of the others on the device."""

import jax
import jax.numpy as jnp

from photon_jax.step_io import StepInputs


def inputs_at(
    inputs: StepInputs,
    index: jax.Array,  # i32[], of the step
    is_stopped: jax.Array,  # bool[B], whether the row has sampled a stop id
    *,
    block_size: int,
) -> StepInputs:
    """Returns what the step of one index reads, each row one token further than before.

    A row that has stopped, or has had all of its steps, computes its first token again, into the null block, and
    samples for the null slot: nothing of it is kept.
    """
    is_active = (index < inputs.num_steps) & ~is_stopped
    positions = inputs.positions + jnp.where(is_active, index, 0)
    logical = jnp.expand_dims(positions // block_size, 1)
    blocks = jnp.take_along_axis(inputs.block_tables, logical, axis=1).squeeze(1)
    return inputs._replace(
        positions=positions,
        slot_mapping=jnp.where(is_active, blocks * block_size + positions % block_size, 0),
        continues=jnp.where((index > 0) & (inputs.num_steps > 0), 1, inputs.continues),  # padding rows never do
        state_slots=jnp.where(is_active, inputs.state_slots, 0),
        sample_positions=inputs.sample_positions + index,
        masks_stops=(index < inputs.num_masked_steps).astype(jnp.int32),
    )


def stops(inputs: StepInputs, token_ids: jax.Array) -> jax.Array:
    """Returns bool[B], whether a row's sampled token i32[B] is one of its stop ids and not masked."""
    is_used = jnp.expand_dims(jnp.arange(inputs.stop_ids.shape[1]), 0) < jnp.expand_dims(inputs.num_stop_ids, 1)
    is_stop = (is_used & (inputs.stop_ids == jnp.expand_dims(token_ids, 1))).any(axis=1)
    return is_stop & (inputs.masks_stops == 0)
