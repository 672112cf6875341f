"""Sampling written with dictionaries and sorting in float64; draws of the sampler itself; a chi-square bound."""

import functools
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from helpers.tiny_model import tiny_config

from photon_jax.config import KernelConfig
from photon_jax.models.params import Params
from photon_jax.ops.linear import head_logits
from photon_jax.ops.norm import rms_norm
from photon_jax.ops.sampling import head_sample
from photon_jax.ops.tiles import RowTiles
from photon_jax.step_io import StepInputs, StepLayout, input_fields

EPS = 1e-5


def sampling_distribution(
    logits: Iterable[float],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    banned: Iterable[int] = (),
) -> dict[int, float]:
    """Returns the probability of every token that may be sampled; tokens that tie with the last one kept are kept."""
    banned = set(banned)
    scores = {t: float(logit) for t, logit in enumerate(logits) if t not in banned and logit > -math.inf}
    peak = max(scores.values())
    if temperature == 0.0:
        return {min(token for token, score in scores.items() if score == peak): 1.0}
    kept = {token: math.exp((score - peak) / temperature) for token, score in scores.items()}
    if 0 < top_k < len(kept):
        kept = at_least(kept, sorted(kept.values())[-top_k])
    if top_p < 1.0:
        kept = at_least(kept, nucleus_threshold(kept, top_p))
    kept = at_least(kept, min_p * max(kept.values()))
    total = math.fsum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


def at_least(weights: Mapping[int, float], threshold: float) -> dict[int, float]:
    return {token: weight for token, weight in weights.items() if weight >= threshold}


def nucleus_threshold(weights: Mapping[int, float], top_p: float) -> float:
    """Returns the weight of the token with which the likeliest ones together reach top_p of the total."""
    goal, reached = top_p * math.fsum(weights.values()), 0.0
    for weight in sorted(weights.values(), reverse=True):
        reached += weight
        if reached >= goal:
            return weight
    return 0.0


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns float64 log-probabilities over the last axis."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def sampling_inputs(num_rows: int, **fields: object) -> StepInputs:
    """Returns step inputs of greedy rows, with the fields given; a value that is no array holds for every row."""
    layout = StepLayout(num_tokens=num_rows, num_rows=num_rows, table_width=1, query_tile=1, row_tile=8)
    arrays = {field.name: np.zeros(field.shape, field.dtype) for field in input_fields(layout)}
    arrays["top_p"][:] = 1.0
    for name, value in fields.items():
        arrays[name][:] = value
    return StepInputs(**{name: jnp.asarray(array) for name, array in arrays.items()})


def head_params(head: np.ndarray) -> Params:
    """Returns parameters with no layers and the output projection [V D]."""
    head = jnp.asarray(head)
    return Params(embedding=head, layers=(), final_norm=jnp.ones(head.shape[1:], head.dtype), lm_head=None)


@jax.jit
def _logits(hidden: jax.Array, params: Params) -> jax.Array:
    return head_logits(rms_norm(hidden, params.final_norm, eps=EPS), params.head, backend="reference")


def logits_of(hidden: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Returns the logits f32[B V] that the sampler sees."""
    return np.asarray(_logits(jnp.asarray(hidden), head_params(head)))


@functools.partial(jax.jit, static_argnames=("tile", "is_greedy", "has_top"))
def run_sampler(hidden, inputs, params, num_rows, controls=None, *, tile, is_greedy, has_top=False):
    """Returns what `head_sample` does."""
    config = tiny_config(rms_norm_eps=EPS, vocab_size=params.head.shape[0], hidden_size=params.head.shape[1])
    tiles = None if tile is None else RowTiles(tile, num_rows)
    return head_sample(
        hidden,
        inputs,
        params,
        config=config,
        kernels=KernelConfig(linear="reference"),
        tiles=tiles,
        is_greedy=is_greedy,
        controls=controls,
        has_top=has_top,
    )


def draw(
    hidden: np.ndarray,
    head: np.ndarray,
    *,
    tile: int | None = 8,
    num_rows: int | None = None,
    is_greedy: bool = False,
    has_top: bool | None = None,
    **fields: object,
) -> tuple[np.ndarray, ...]:
    """Returns token_ids i32[B] and logprobs f32[B 3] of hidden states f32[B D] under an output projection f32[V D].

    With `has_top` given also ids i32[B W] and log-probabilities f32[B W] of the most likely tokens; W is 1 without.
    """
    rows = len(hidden)
    inputs = sampling_inputs(rows, **fields)
    num_rows = rows if num_rows is None else num_rows
    arrays = (jnp.asarray(hidden), inputs, head_params(head), jnp.int32(num_rows))
    *results, _ = run_sampler(*arrays, tile=tile, is_greedy=is_greedy, has_top=bool(has_top))
    return tuple(np.asarray(result) for result in results[: 2 if has_top is None else 4])


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Returns the statistic and its degrees of freedom; bins that expect fewer than five draws are taken together."""
    rare = expected < 5.0
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0.0], wanted[wanted > 0.0]
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def chi_square_bound(degrees: int) -> float:
    """Returns what a chi-square statistic exceeds with probability 1e-3 (Wilson and Hilferty, 1931; within 1 %)."""
    quantile = 3.0902  # of the standard normal at 1 - 1e-3
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + quantile * math.sqrt(spread)) ** 3
