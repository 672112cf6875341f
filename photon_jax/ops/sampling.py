"""The end of a step: logits, the sampled token and its log-probabilities, tile by tile over the rows.

A sampled token is the argmax of log-weights plus Gumbel noise over the tokens that the filters keep. Filters work by
threshold, found by bisection on the bits of a float, so nothing of the size of the vocabulary is sorted; tokens that
tie with the last one kept are kept too.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import greedy_sample
from photon_jax.config import OWN_KERNELS, KernelConfig
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params
from photon_jax.ops.controls import ControlRows, Controls, States, control_logits
from photon_jax.ops.linear import head_logits, limb_group
from photon_jax.ops.logprobs import (
    SAMPLING,
    Warm,
    all_tops_of_kinds,
    likeliest,
    logprob_at,
    top_logprobs,
    top_of_kinds,
)
from photon_jax.ops.norm import normed_rows
from photon_jax.ops.sums import ordered_sum
from photon_jax.ops.tiles import RowTiles, map_rows
from photon_jax.step_io import StepInputs

TopOf = Callable[..., tuple[jax.Array, jax.Array]]  # top_of_kinds, or all_tops_of_kinds


def head_sample(
    hidden: jax.Array,  # f32[B D], the residual stream of each row's sampling position
    inputs: StepInputs,
    params: Params,
    *,
    config: ModelConfig,
    kernels: KernelConfig,
    tiles: RowTiles | None,
    is_greedy: bool = False,
    controls: Controls | None = None,
    has_top: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, States]:
    """Returns token_ids i32[B], logprobs f32[B 3] (raw, after temperature, of the sampling distribution), ids i32[B W]
    and log-probabilities f32[B W] of the most likely tokens of the distribution that top_kinds names, and the states of
    the processors after it, leaves [B *] each.

    A row with temperature 0 takes the argmax (ties: the lowest id); its second log-probability equals the first and
    its third is 0. Stop ids of a row whose masks_stops is 1 are never sampled.

    Args:
      is_greedy: whether all rows have temperature 0: the program then holds no branch for the others. A branch costs a
        GPU's step 0.4 to 0.9 ms, since the host has to read which way to go (measured on an H200).
      controls: of a step in which a row has some.
      has_top: whether W is TOP_WIDTH; else it is 1, which costs next to nothing.
    """
    rows = {name: getattr(inputs, name) for name in _ROW_FIELDS}
    if controls is not None:
        rows |= {name: getattr(inputs, name) for name in ("control_slots", "processor_ids")}
        rows["last_tokens"] = inputs.token_ids[inputs.logits_indices]
        rows["token_masks"] = controls.token_masks

    has_kernels, is_uniform = kernels.linear in OWN_KERNELS, kernels.linear == "uniform"
    top_of: TopOf = functools.partial(top_of_kinds, is_uniform=is_uniform)
    if has_top:
        has_kernel_sums = is_uniform or (is_greedy and has_kernels)  # as the sampled tokens' log-probabilities have
        top_of = functools.partial(all_tops_of_kinds, is_uniform=has_kernel_sums, has_kernel=has_kernels)

    def compute(hidden: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        logits, row = _final_logits(hidden, params, config, kernels), dict(zip(rows, arrays, strict=True))
        if is_greedy and has_kernels:
            return _greedy(logits, row, top_of if has_top else None)
        allowed, states = _control(logits, row, controls, is_tiled=tiles is not None)
        sampled = _sample(logits, allowed, row, top_of, is_greedy=is_greedy, is_uniform=is_uniform)
        return (*sampled, *jax.tree.leaves(states))

    token_ids, logprobs, top_ids, top_values, *rest = map_rows(compute, tiles, hidden, *rows.values())
    states = () if controls is None else controls.processor_states
    return token_ids, logprobs, top_ids, top_values, jax.tree.unflatten(jax.tree.structure(states), rest)


def _greedy(
    logits: jax.Array,  # f32[M V]
    rows: dict[str, jax.Array],
    top_of: TopOf | None,
) -> tuple[jax.Array, ...]:
    """Returns what `_sample` does where all rows are greedy, in a pass over the logits instead of five (on a GPU).

    Args:
      top_of: None where the pass itself finds enough of the most likely tokens.
    """
    num_banned = rows["num_stop_ids"] * rows["masks_stops"]
    token_ids, raw, likeliest_ids, highest = greedy_sample(logits, rows["stop_ids"], num_banned)
    none = jnp.zeros_like(raw)
    logprobs = jnp.stack([raw, raw, none], axis=1)
    if top_of is not None:
        return token_ids, logprobs, *top_of(rows["top_kinds"], logits, token_ids)
    is_certain = rows["top_kinds"] == SAMPLING
    top = jnp.where(is_certain, token_ids, likeliest_ids), jnp.where(is_certain, none, highest)
    return token_ids, logprobs, *(jnp.expand_dims(each, 1) for each in top)


def _control(
    logits: jax.Array, rows: dict[str, jax.Array], controls: Controls | None, *, is_tiled: bool
) -> tuple[jax.Array, States]:
    """Returns the logits to sample from, before temperature and filters, and the rows' processor states."""
    if controls is None:
        return _mask_stops(logits, rows), ()
    control_rows = ControlRows(
        slots=rows["control_slots"],
        processor_ids=rows["processor_ids"],
        token_ids=rows["last_tokens"],
        positions=rows["sample_positions"],
        token_masks=rows["token_masks"],
    )
    mask_stops = functools.partial(_mask_stops, rows=rows)
    return control_logits(logits, control_rows, controls, mask_stops, is_tiled=is_tiled)


def head_score(
    hidden: jax.Array,  # f32[T D]
    target_ids: jax.Array,  # i32[T]
    params: Params,
    *,
    config: ModelConfig,
    kernels: KernelConfig,
    tiles: RowTiles,
    has_top: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns the raw log-probability f32[T] of each target, and i32[T] whether it is the argmax (ties: lowest id).

    With `has_top` also ids i32[T W] and log-probabilities f32[T W] of the most likely tokens in its place. No array
    of T rows by the vocabulary exists, only tiles of it.
    """
    has_kernels, is_uniform = kernels.linear in OWN_KERNELS, kernels.linear == "uniform"

    def compute(hidden: jax.Array, target_ids: jax.Array) -> tuple[jax.Array, ...]:
        logits = _final_logits(hidden, params, config, kernels)
        is_greedy = (likeliest(logits) == target_ids).astype(jnp.int32)
        tops = top_logprobs(logits, is_uniform=is_uniform, has_kernel=has_kernels) if has_top else ()
        return logprob_at(logits, target_ids, is_uniform=is_uniform), is_greedy, *tops

    return map_rows(compute, tiles, hidden, target_ids)


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
    "top_kinds",
)


def _final_logits(hidden: jax.Array, params: Params, config: ModelConfig, kernels: KernelConfig) -> jax.Array:
    """Returns logits f32[M V]."""
    backend, eps = kernels.linear, config.rms_norm_eps
    group_size = limb_group(params.head, hidden.shape[0], params.final_norm.dtype, backend)
    normed = normed_rows(hidden, params.final_norm, eps=eps, backend=backend, group_size=group_size)
    return head_logits(normed, params.head, backend=backend)


def _sample(
    logits: jax.Array,  # f32[M V], the model's own
    allowed: jax.Array,  # f32[M V], as controls and masks leave them
    rows: dict[str, jax.Array],
    top_of: TopOf,
    *,
    is_greedy: bool,
    is_uniform: bool,
) -> tuple[jax.Array, ...]:
    temperature = rows["temperature"]
    greedy = likeliest(allowed)
    kinds, is_cold = rows["top_kinds"], temperature <= 0.0
    logprobs = functools.partial(logprob_at, is_uniform=is_uniform)

    def all_greedy(_: None) -> tuple[jax.Array, ...]:
        raw = logprobs(logits, greedy)
        return greedy, jnp.stack([raw, raw, jnp.zeros_like(raw)], axis=1), *top_of(kinds, logits, greedy)

    def some_random(_: None) -> tuple[jax.Array, ...]:
        heat = jnp.expand_dims(jnp.where(is_cold, 1.0, temperature), 1)
        kept = _filter(_heated(allowed, heat), rows, is_uniform=is_uniform)
        noise = jax.vmap(_row_noise, in_axes=(0, 0, 0, 0, None))(
            rows["seeds"], rows["prompt_digests"], rows["sample_indices"], rows["sample_positions"], logits.shape[1]
        )
        drawn = likeliest(kept + noise)
        token = jnp.where(is_cold, greedy, drawn)
        raw, heated = logprobs(logits, token), _heated(logits, heat)
        tempered = jnp.where(is_cold, raw, logprobs(heated, token))
        sampling = jnp.where(is_cold, 0.0, logprobs(kept, token))
        return (
            token,
            jnp.stack([raw, tempered, sampling], axis=1),
            *top_of(kinds, logits, greedy, Warm(is_cold, heated, kept)),
        )

    if is_greedy:
        return all_greedy(None)
    results: tuple[jax.Array, ...] = lax.cond(jnp.any(temperature > 0.0), some_random, all_greedy, None)
    return results


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
    *,
    is_uniform: bool = False,
) -> jax.Array:  # f32[M V]
    """Returns the logits with -inf outside what top_k, then top_p of the rest, then min_p keep."""
    top_k, top_p, min_p = rows["top_k"], rows["top_p"], rows["min_p"]
    has_k, has_p = top_k > 0, top_p < 1.0
    sum_of = functools.partial(ordered_sum, is_uniform=is_uniform)
    peak = logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(logits - peak)  # in [0, 1], the likeliest exactly 1

    def keep_top_k(weights: jax.Array) -> jax.Array:
        def is_enough(threshold: jax.Array) -> jax.Array:
            return (weights >= threshold).sum(axis=-1) >= top_k

        return jnp.where(jnp.expand_dims(has_k, 1) & (weights < _bisect(is_enough, weights)), 0.0, weights)

    def keep_top_p(weights: jax.Array) -> jax.Array:
        goal = top_p * sum_of(weights)

        def is_enough(threshold: jax.Array) -> jax.Array:
            return sum_of(jnp.where(weights >= threshold, weights, 0.0)) >= goal

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
