"""Log-probabilities of rows of logits: of given tokens, and of the most likely ones."""

import jax
import jax.numpy as jnp
from jax import lax

from photon_jax.ops.sums import ordered_sum
from photon_jax.step_io import TOP_WIDTH


def logprob_at(
    logits: jax.Array,  # f32[M V]
    token_ids: jax.Array,  # i32[M]
) -> jax.Array:  # f32[M]
    """Returns log_softmax(logits)[m, token_ids[m]]."""
    chosen = jnp.take_along_axis(logits, jnp.expand_dims(token_ids, 1), axis=-1)
    return _normalized(chosen, logits).squeeze(1)


def top_logprobs(
    logits: jax.Array,  # f32[M V]
) -> tuple[jax.Array, jax.Array]:
    """Returns ids i32[M W] and log-probabilities f32[M W] of the most likely tokens, the likeliest first.

    Equal logits: the lowest id first. Past a vocabulary smaller than W the ids are 0 and the values -inf. An entry has
    the bits that `logprob_at` gives its token.
    """
    count = min(TOP_WIDTH, logits.shape[-1])
    chosen, ids = lax.top_k(logits, count)
    padding = ((0, 0), (0, TOP_WIDTH - count))
    values = jnp.pad(_normalized(chosen, logits), padding, constant_values=-jnp.inf)
    return jnp.pad(ids.astype(jnp.int32), padding), values


def _normalized(
    chosen: jax.Array,  # f32[M k], of the logits
    logits: jax.Array,  # f32[M V]
) -> jax.Array:  # f32[M k]
    peak = logits.max(axis=-1, keepdims=True)
    total = jnp.expand_dims(ordered_sum(jnp.exp(logits - peak)), 1)
    return chosen - peak - jnp.log(total)
