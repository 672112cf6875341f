"""Greedy sampling, Pallas with the Triton backend: one pass over the logits in parts, and a launch that joins them.

In XLA it is a copy of the logits to ban tokens in, and a pass each for the maximum, the argmax and the sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

PART = 4096  # logits of a program


def _part_kernel(
    logits_ref,  # f32[M V]
    banned_ref,  # i32[M S]
    num_banned_ref,  # i32[M]
    peak_ref,  # f32[M C], the greatest logit of a part
    place_ref,  # i32[M C], its place
    total_ref,  # f32[M C], the sum of exp(logit - peak)
    best_ref,  # f32[M C], the greatest logit that is not banned
    token_ref,  # i32[M C], its place
):
    part, row, num_tokens = pl.program_id(0), pl.program_id(1), logits_ref.shape[1]
    num_banned = num_banned_ref[row]
    tokens = part * PART + lax.iota(jnp.int32, PART)
    x = plt.load(logits_ref.at[row, tokens], mask=tokens < num_tokens, other=-jnp.inf)

    def greatest(logits):
        peak = logits.max()
        return peak, jnp.where(logits == peak, tokens, num_tokens - 1).min()

    def greatest_allowed():
        return greatest(
            lax.fori_loop(
                0, num_banned, lambda index, kept: jnp.where(tokens == banned_ref[row, index], -jnp.inf, kept), x
            )
        )

    peak, place = greatest(x)
    best, token = lax.cond(num_banned > 0, greatest_allowed, lambda: (peak, place))
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    peak_ref[row, part], place_ref[row, part], total_ref[row, part] = peak, place, jnp.exp(x - base).sum()
    best_ref[row, part], token_ref[row, part] = best, token


def _join_kernel(
    *refs,  # of a part, as above; then ids i32[M] and log-probabilities f32[M], with the banned left out and with all
    last: int,
):
    peak_ref, place_ref, total_ref, best_ref, token_ref, id_ref, logprob_ref, top_id_ref, top_logprob_ref = refs
    row, num_parts = pl.program_id(0), peak_ref.shape[1]
    parts = lax.iota(jnp.int32, pl.next_power_of_2(num_parts))
    mask = parts < num_parts
    peaks, bests = (plt.load(ref.at[row, parts], mask=mask, other=-jnp.inf) for ref in (peak_ref, best_ref))
    places, tokens = (plt.load(ref.at[row, parts], mask=mask, other=last) for ref in (place_ref, token_ref))
    totals = plt.load(total_ref.at[row, parts], mask=mask, other=0.0)
    peak, best = peaks.max(), bests.max()
    log_total = jnp.log((totals * jnp.exp(peaks - peak)).sum())
    id_ref[row], logprob_ref[row] = jnp.where(bests == best, tokens, last).min(), best - peak - log_total
    top_id_ref[row], top_logprob_ref[row] = jnp.where(peaks == peak, places, last).min(), 0.0 - log_total


@functools.partial(jax.jit, static_argnames=("interpret",))
def greedy_sample(
    logits: jax.Array, banned_ids: jax.Array, num_banned: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns tokens i32[M] and log-probabilities f32[M], twice, as `greedy_sample_reference` defines them.

    A row's bits don't depend on how many rows there are. A logit that is NaN makes the log-probabilities NaN.

    Args:
      logits: f32[M V]
      banned_ids: i32[M S]
      num_banned: i32[M]
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes don't fit each other.
    """
    (num_rows, num_tokens), num_parts = logits.shape, pl.cdiv(logits.shape[1], PART)
    if banned_ids.ndim != 2 or banned_ids.shape[0] != num_rows or num_banned.shape != (num_rows,):
        raise ValueError(
            f"expected logits [M V], banned_ids [M S] and num_banned [M], got {logits.shape}, {banned_ids.shape} and "
            f"{num_banned.shape}"
        )
    floats, integers = (jax.ShapeDtypeStruct((num_rows, num_parts), dtype) for dtype in (jnp.float32, jnp.int32))
    parts = pl.pallas_call(
        _part_kernel,
        out_shape=[floats, integers, floats, floats, integers],
        grid=(num_parts, num_rows),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="greedy_sample",
    )(logits, banned_ids, num_banned)
    integers, floats = (jax.ShapeDtypeStruct((num_rows,), dtype) for dtype in (jnp.int32, jnp.float32))
    found: tuple[jax.Array, jax.Array, jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_join_kernel, last=num_tokens - 1),
        out_shape=(integers, floats, integers, floats),
        grid=(num_rows,),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="greedy_sample_join",
    )(*parts)
    return found
