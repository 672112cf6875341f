"""Greedy sampling, the specification."""

import jax
import jax.numpy as jnp


def greedy_sample_reference(
    logits: jax.Array, banned_ids: jax.Array, num_banned: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the likeliest token i32[M] that is not banned and its log-probability f32[M], and those of all tokens.

    Ties: the lowest id. The log-probabilities are those of softmax over all tokens, the banned ones too.

    Args:
      logits: f32[M V]
      banned_ids: i32[M S]
      num_banned: i32[M], how many of a row's ids count.
    """
    is_banned = jnp.expand_dims(jnp.arange(banned_ids.shape[1]), 0) < jnp.expand_dims(num_banned, 1)
    rows = jnp.expand_dims(jnp.arange(logits.shape[0]), 1)
    allowed = logits.at[rows, banned_ids].min(jnp.where(is_banned, -jnp.inf, jnp.inf))
    token_ids, likeliest = (jnp.argmax(each, axis=1).astype(jnp.int32) for each in (allowed, logits))
    logprobs = jax.nn.log_softmax(logits, axis=1)
    chosen = jnp.take_along_axis(logprobs, jnp.stack([token_ids, likeliest], axis=1), axis=1)
    return token_ids, chosen[:, 0], likeliest, chosen[:, 1]
