"""The end of a step: logits, the sampled token and its log-probabilities, tile by tile over the rows.

A sampled token is the argmax of log-weights plus Gumbel noise over the tokens that the filters keep. Filters work by
threshold, found by bisection on the bits of a float, so nothing of the size of the vocabulary is sorted; tokens that
tie with the last one kept are kept too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params
from photon_jax.ops.linear import head_logits
from photon_jax.ops.norm import rms_norm
from photon_jax.ops.sums import ordered_sum
from photon_jax.ops.tiles import RowTiles, map_rows
from photon_jax.step_io import StepInputs


def head_sample(
    hidden: jax.Array,  # f32[B D], the residual stream of each row's sampling position
    inputs: StepInputs,
    params: Params,
    *,
    config: ModelConfig,
    tiles: RowTiles | None,
    is_greedy: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns token_ids i32[B] and logprobs f32[B 3] (raw, after temperature, of the sampling distribution).

    A row with temperature 0 takes the argmax (ties: the lowest id); its second log-probability equals the first and
    its third is 0. Stop ids of a row whose masks_stops is 1 are never sampled.

    Args:
      is_greedy: whether all rows have temperature 0: the program then holds no branch for the others. A branch costs a
        GPU's step 0.4 to 0.9 ms, since the host has to read which way to go (measured on an H200).
    """

    def compute(hidden: jax.Array, *rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = _final_logits(hidden, params, config)
        return _sample(logits, dict(zip(_ROW_FIELDS, rows, strict=True)), is_greedy)

    token_ids, logprobs = map_rows(compute, tiles, hidden, *(getattr(inputs, name) for name in _ROW_FIELDS))
    return token_ids, logprobs


def head_score(
    hidden: jax.Array,  # f32[T D]
    target_ids: jax.Array,  # i32[T]
    params: Params,
    *,
    config: ModelConfig,
    tiles: RowTiles,
) -> tuple[jax.Array, jax.Array]:
    """Returns the raw log-probability f32[T] of each target, and i32[T] whether it is the argmax (ties: lowest id).

    No array of T rows by the vocabulary exists, only tiles of it.
    """

    def compute(hidden: jax.Array, target_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = _final_logits(hidden, params, config)
        logprobs = _logprob_at(logits, target_ids)
        return logprobs, (jnp.argmax(logits, axis=-1) == target_ids).astype(jnp.int32)

    logprobs, is_greedy = map_rows(compute, tiles, hidden, target_ids)
    return logprobs, is_greedy


_ROW_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "seeds",
    "prompt_digests",
    "sample_indices",
    "sample_positions",
    "masks_stops",
    "num_stop_ids",
    "stop_ids",
)


def _final_logits(hidden: jax.Array, params: Params, config: ModelConfig) -> jax.Array:
    """Returns logits f32[M V]."""
    normed = rms_norm(hidden, params.final_norm, eps=config.rms_norm_eps)
    return head_logits(normed.astype(params.head.dtype), params.head)


def _sample(logits: jax.Array, rows: dict[str, jax.Array], is_greedy: bool) -> tuple[jax.Array, jax.Array]:
    temperature = rows["temperature"]
    allowed = _mask_stops(logits, rows)
    greedy = jnp.argmax(allowed, axis=-1).astype(jnp.int32)

    def all_greedy(_: None) -> tuple[jax.Array, jax.Array]:
        raw = _logprob_at(logits, greedy)
        return greedy, jnp.stack([raw, raw, jnp.zeros_like(raw)], axis=1)

    def some_random(_: None) -> tuple[jax.Array, jax.Array]:
        is_cold = temperature <= 0.0
        heat = jnp.expand_dims(jnp.where(is_cold, 1.0, temperature), 1)
        kept = _filter(_heated(allowed, heat), rows)
        noise = jax.vmap(_row_noise, in_axes=(0, 0, 0, 0, None))(
            rows["seeds"], rows["prompt_digests"], rows["sample_indices"], rows["sample_positions"], logits.shape[1]
        )
        drawn = jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)
        token = jnp.where(is_cold, greedy, drawn)
        raw = _logprob_at(logits, token)
        tempered = jnp.where(is_cold, raw, _logprob_at(_heated(logits, heat), token))
        sampling = jnp.where(is_cold, 0.0, _logprob_at(kept, token))
        return token, jnp.stack([raw, tempered, sampling], axis=1)

    if is_greedy:
        return all_greedy(None)
    token, logprobs = lax.cond(jnp.any(temperature > 0.0), some_random, all_greedy, None)
    return token, logprobs


def _mask_stops(logits: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
    """Returns the logits with -inf at the stop ids of rows that must not stop yet."""
    stop_ids = rows["stop_ids"]
    counts = rows["num_stop_ids"] * rows["masks_stops"]
    is_masked = jnp.expand_dims(jnp.arange(stop_ids.shape[1]), 0) < jnp.expand_dims(counts, 1)
    row = jnp.expand_dims(jnp.arange(logits.shape[0]), 1)
    return logits.at[row, stop_ids].min(jnp.where(is_masked, -jnp.inf, jnp.inf))


def _heated(logits: jax.Array, heat: jax.Array) -> jax.Array:
    """Returns the logits after temperature, shifted to a greatest of exactly 0: a small heat magnifies errors."""
    return (logits - logits.max(axis=-1, keepdims=True)) / heat


def _filter(
    logits: jax.Array,  # f32[M V], after temperature
    rows: dict[str, jax.Array],
) -> jax.Array:  # f32[M V]
    """Returns the logits with -inf outside what top_k, then top_p of the rest, then min_p keep."""
    top_k, top_p, min_p = rows["top_k"], rows["top_p"], rows["min_p"]
    has_k, has_p = top_k > 0, top_p < 1.0
    peak = logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(logits - peak)  # in [0, 1], the likeliest exactly 1

    def keep_top_k(weights: jax.Array) -> jax.Array:
        def is_enough(threshold: jax.Array) -> jax.Array:
            return (weights >= threshold).sum(axis=-1) >= top_k

        return jnp.where(jnp.expand_dims(has_k, 1) & (weights < _bisect(is_enough, weights)), 0.0, weights)

    def keep_top_p(weights: jax.Array) -> jax.Array:
        goal = top_p * ordered_sum(weights)

        def is_enough(threshold: jax.Array) -> jax.Array:
            return ordered_sum(jnp.where(weights >= threshold, weights, 0.0)) >= goal

        return jnp.where(jnp.expand_dims(has_p, 1) & (weights < _bisect(is_enough, weights)), 0.0, weights)

    weights = lax.cond(jnp.any(has_k), keep_top_k, lambda w: w, weights)
    weights = lax.cond(jnp.any(has_p), keep_top_p, lambda w: w, weights)
    is_kept = (weights > 0.0) & (weights >= jnp.expand_dims(min_p, 1))
    return jnp.where(is_kept, logits, -jnp.inf)


def _bisect(is_enough: Callable[[jax.Array], jax.Array], weights: jax.Array) -> jax.Array:
    """Returns per row the largest threshold f32[M 1] in [0, 1] for which is_enough holds (it holds at 0).

    The bits of floats in [0, 1] are integers in the same order, so 30 halvings end at neighbouring floats.
    """
    num_rows = weights.shape[0]
    low = jnp.zeros((num_rows,), jnp.int32)
    high = jnp.full((num_rows,), 0x3F800001, jnp.int32)  # one above the bits of 1.0

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = is_enough(jnp.expand_dims(lax.bitcast_convert_type(middle, jnp.float32), 1))
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = lax.fori_loop(0, 31, halve, (low, high))
    return jnp.expand_dims(lax.bitcast_convert_type(low, jnp.float32), 1)


def _row_noise(
    seed: jax.Array, digest: jax.Array, sample_index: jax.Array, position: jax.Array, size: int
) -> jax.Array:
    """Returns Gumbel noise f32[size] that depends on the seed, the prompt, the sample and the position alone."""
    key = jax.random.fold_in(jax.random.key(seed[0], impl="threefry2x32"), seed[1])
    for word in (digest, sample_index, position):
        key = jax.random.fold_in(key, word)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _logprob_at(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Returns log_softmax(logits)[m, token_ids[m]], f32[M]."""
    peak = logits.max(axis=-1)
    total = ordered_sum(jnp.exp(logits - jnp.expand_dims(peak, 1)))
    chosen = jnp.take_along_axis(logits, jnp.expand_dims(token_ids, 1), axis=-1).squeeze(1)
    return chosen - peak - jnp.log(total)
