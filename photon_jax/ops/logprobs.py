"""Log-probabilities of rows of logits: of given tokens, and of the most likely ones."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import greedy_sample, top_k
from photon_jax.ops.sums import ordered_sum, reduce_eighths
from photon_jax.step_io import TOP_KINDS, TOP_WIDTH

RAW, TEMPERED, SAMPLING = range(len(TOP_KINDS))


class Warm(NamedTuple):
    """What a step knows whose rows may have a temperature.

    Attributes:
      is_cold: whether a row has none.
      heated: its logits after temperature.
      kept: those of them that may be sampled, -inf for the others.
    """

    is_cold: jax.Array  # bool[M]
    heated: jax.Array  # f32[M V]
    kept: jax.Array  # f32[M V]


def logprob_at(
    logits: jax.Array,  # f32[M V]
    token_ids: jax.Array,  # i32[M]
    *,
    is_uniform: bool = False,
) -> jax.Array:  # f32[M]
    """Returns log_softmax(logits)[m, token_ids[m]]; where is_uniform, a row has the same bits in every program."""
    chosen = jnp.take_along_axis(logits, jnp.expand_dims(token_ids, 1), axis=-1)
    return _normalized(chosen, logits, is_uniform=is_uniform).squeeze(1)


def likeliest(
    logits: jax.Array,  # f32[M V]
) -> jax.Array:  # i32[M]
    """Returns the argmax of each row; equal logits: the lowest id."""
    found: jax.Array = lax.platform_dependent(logits, cpu=_likeliest_on_cpu, default=_argmax)
    return found


def _argmax(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _likeliest_on_cpu(logits: jax.Array) -> jax.Array:
    """XLA's argmax goes element by element there: 22 ms for 128 rows of 49,152, a third of their product with the head.

    This takes 4 ms: the maximum, and the lowest place that has it.
    """
    last = logits.shape[-1] - 1
    peak = jnp.expand_dims(reduce_eighths(jnp.maximum, logits, -jnp.inf), 1)
    places = jnp.expand_dims(jnp.arange(last + 1, dtype=jnp.int32), 0)
    return reduce_eighths(jnp.minimum, jnp.where(logits == peak, places, last), last)


def top_logprobs(
    logits: jax.Array,  # f32[M V]
    *,
    is_uniform: bool = False,
    has_kernel: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns ids i32[M W] and log-probabilities f32[M W] of the most likely tokens, the likeliest first.

    Equal logits: the lowest id first. Past a vocabulary smaller than W the ids are 0 and the values -inf. An entry has
    the bits that `logprob_at` gives its token.

    Args:
      has_kernel: whether to find them with a kernel of our own, which finds the same: XLA sorts them all on a GPU.
    """
    count = min(TOP_WIDTH, logits.shape[-1])
    chosen, ids = top_k(logits, count) if has_kernel else lax.top_k(logits, count)
    padding = ((0, 0), (0, TOP_WIDTH - count))
    values = jnp.pad(_normalized(chosen, logits, is_uniform=is_uniform), padding, constant_values=-jnp.inf)
    return jnp.pad(ids.astype(jnp.int32), padding), values


def top_of_kinds(
    kinds: jax.Array,  # i32[M], index into TOP_KINDS
    logits: jax.Array,  # f32[M V], the model's own
    greedy: jax.Array,  # i32[M], what a row without temperature samples
    warm: Warm | None = None,
    *,
    is_uniform: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the likeliest token i32[M 1] of the distribution that each row names, and its log-probability f32[M 1].

    They have the bits that `all_tops_of_kinds` gives them, and cost little: a step takes the same sums for the
    log-probabilities of the sampled tokens.
    """
    ids = likeliest(logits)
    logprobs = functools.partial(logprob_at, is_uniform=is_uniform)
    values = logprobs(logits, ids)
    is_certain = kinds == SAMPLING
    if warm is not None:
        is_tempered = kinds == TEMPERED
        warm_ids = likeliest(jnp.where(jnp.expand_dims(is_tempered, 1), warm.heated, warm.kept))
        warm_values = jnp.where(is_tempered, logprobs(warm.heated, warm_ids), logprobs(warm.kept, warm_ids))
        is_raw = (kinds == RAW) | warm.is_cold
        ids, values = jnp.where(is_raw, ids, warm_ids), jnp.where(is_raw, values, warm_values)
        is_certain &= warm.is_cold
    ids, values = jnp.where(is_certain, greedy, ids), jnp.where(is_certain, 0.0, values)
    return jnp.expand_dims(ids, 1), jnp.expand_dims(values, 1)


def all_tops_of_kinds(
    kinds: jax.Array,  # i32[M], index into TOP_KINDS
    logits: jax.Array,  # f32[M V], the model's own
    greedy: jax.Array,  # i32[M], what a row without temperature samples
    warm: Warm | None = None,
    *,
    is_uniform: bool = False,
    has_kernel: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns ids i32[M W] and log-probabilities f32[M W] of the most likely tokens of what each row names."""
    kinds = jnp.expand_dims(kinds, 1)
    places = jnp.expand_dims(jnp.arange(logits.shape[1], dtype=jnp.int32), 0)
    certain = jnp.where(places == jnp.expand_dims(greedy, 1), 0.0, -jnp.inf)
    wanted = jnp.where(kinds == SAMPLING, certain, logits)
    if warm is not None:
        is_raw = (kinds == RAW) | jnp.expand_dims(warm.is_cold, 1)
        wanted = jnp.where(is_raw, wanted, jnp.where(kinds == TEMPERED, warm.heated, warm.kept))
    return top_logprobs(wanted, is_uniform=is_uniform, has_kernel=has_kernel)


def _normalized(
    chosen: jax.Array,  # f32[M k], of the logits
    logits: jax.Array,  # f32[M V]
    *,
    is_uniform: bool,
) -> jax.Array:  # f32[M k]
    peak = logits.max(axis=-1, keepdims=True)
    if is_uniform:  # the kernel of greedy steps, so that its bits and these are alike
        none = jnp.zeros((logits.shape[0], 1), jnp.int32)
        *_, likeliest_logprob = greedy_sample(logits, none, none[:, 0])
        return chosen - peak - jnp.expand_dims(-likeliest_logprob, 1)
    total = jnp.expand_dims(ordered_sum(jnp.exp(logits - peak)), 1)
    return chosen - peak - jnp.log(total)
