"""Bench of the kernels between products, beside XLA's compilation of their specifications, at Llama-3.2-1B's shapes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.bench import Job, Reporter, relative_error, run_jobs
from pallas_kernels.greedy_sample import greedy_sample, greedy_sample_reference
from pallas_kernels.int8_dequantize import int8_dequantize, int8_dequantize_reference
from pallas_kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from pallas_kernels.rope_append import rope_append, rope_append_reference

_HIDDEN, _MLP, _VOCAB, _KV_HEADS, _GROUPS, _HEAD_DIM, _BLOCK = 2048, 8192, 128256, 8, 4, 64, 64
_NUM_CALLS = 64
_SMALL = 1e-3
Arrays = tuple[jax.Array, ...]
Step = Callable[..., tuple[jax.Array, Arrays]]  # an operation, its arguments -> its result, the next call's arguments
Operation = Callable[..., Any]


def _chain(step: Callable[..., tuple[jax.Array, Arrays]], *arguments: jax.Array) -> Arrays:
    """Returns the arguments after many calls, each of which waits for the one before."""

    def one(arguments: Arrays, _: None) -> tuple[Arrays, None]:
        return step(*arguments)[1], None

    return lax.scan(one, arguments, None, length=_NUM_CALLS)[0]


def _pair(
    case: str, step: Step, kernel: Operation, reference: Operation, arguments: Arrays, num_bytes: float
) -> list[Job]:
    """Returns the jobs of a kernel and of its specification."""
    jobs = []
    for tiles, operation in (("kernel", kernel), ("xla", reference)):
        call = functools.partial(step, operation)

        def check(call: Callable[..., tuple[jax.Array, Arrays]] = call) -> float:
            return relative_error(jax.jit(call)(*arguments)[0], step(reference, *arguments)[0])

        jobs.append(
            Job(
                label={"kernel": "glue", "case": case, "tiles": tiles},
                program=functools.partial(_chain, call),
                arguments=arguments,
                num_calls=_NUM_CALLS,
                num_bytes=num_bytes,
                check=check,
            )
        )
    return jobs


def _norm_jobs(num_rows: int) -> list[Job]:
    keys = jax.random.split(jax.random.key(num_rows), 3)
    x, parts = (jax.random.normal(key, (*lead, num_rows, _HIDDEN)) for key, lead in zip(keys, ((), (4,)), strict=False))
    weight = jax.random.normal(keys[2], (_HIDDEN,), jnp.bfloat16)

    def step(add: Operation, x: jax.Array, parts: jax.Array, weight: jax.Array) -> tuple[jax.Array, Arrays]:
        normed, total = add(x, parts, weight, eps=1e-5)
        return normed, (total * 0.5 + normed.astype(jnp.float32) * _SMALL, parts, weight)

    num_bytes = num_rows * _HIDDEN * (4 + 16 + 4 + 2)
    return _pair(
        f"add_rms_norm_m{num_rows}_s4", step, add_rms_norm, add_rms_norm_reference, (x, parts, weight), num_bytes
    )


def _rope_jobs(num_rows: int) -> list[Job]:
    width = _KV_HEADS * (_GROUPS + 2) * _HEAD_DIM
    keys = jax.random.split(jax.random.key(num_rows), 3)
    qkv = jax.random.normal(keys[0], (1, num_rows, width))
    cos, sin = (jax.random.normal(key, (num_rows, _HEAD_DIM // 2)) for key in keys[1:])
    cache = jnp.zeros((2, num_rows + 1, _KV_HEADS, _BLOCK, _HEAD_DIM), jnp.bfloat16)
    slots = (jnp.arange(num_rows, dtype=jnp.int32) + 1) * _BLOCK + 5

    def step(
        append: Operation,
        qkv: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        k: jax.Array,
        v: jax.Array,
        slots: jax.Array,
    ) -> tuple[jax.Array, Arrays]:
        q, k, v = append(qkv, cos, sin, k, v, slots, 1)
        return q, (qkv, cos + q[:, 0, :1].astype(jnp.float32) * 1e-6, sin, k, v, slots)

    return _pair(
        f"rope_append_m{num_rows}",
        step,
        rope_append,
        rope_append_reference,
        (qkv, cos, sin, cache, cache, slots),
        num_rows * width * 6,
    )


def _sample_jobs(num_rows: int) -> list[Job]:
    logits = jax.random.normal(jax.random.key(num_rows), (num_rows, _VOCAB))
    banned, count = jnp.zeros((num_rows, 4), jnp.int32), jnp.ones((num_rows,), jnp.int32)

    def step(sample: Operation, logits: jax.Array, banned: jax.Array, count: jax.Array) -> tuple[jax.Array, Arrays]:
        _, logprobs, *_ = sample(logits, banned, count)
        return logprobs, (logits.at[0, 0].set(logprobs[0]), banned, count)

    return _pair(
        f"greedy_sample_m{num_rows}",
        step,
        greedy_sample,
        greedy_sample_reference,
        (logits, banned, count),
        4 * logits.size,
    )


def _dequantize_jobs(group_size: int) -> list[Job]:
    q = lax.bitcast_convert_type(jax.random.bits(jax.random.key(1), (2 * _MLP, _HIDDEN), jnp.uint8), jnp.int8)
    scale = jnp.full((2 * _MLP, _HIDDEN // group_size), 1e-2, jnp.float16)

    def step(dequantize: Operation, q: jax.Array, scale: jax.Array) -> tuple[jax.Array, Arrays]:
        weight = lax.optimization_barrier(dequantize(q, scale, group_size=group_size, dtype=jnp.bfloat16))
        return weight, (q, scale.at[0, 0].set(jnp.abs(weight[0, 0]).astype(jnp.float16) * 1e-2 + 1e-2))

    return _pair(
        f"int8_dequantize_g{group_size}", step, int8_dequantize, int8_dequantize_reference, (q, scale), 3 * q.size
    )


def run(reporter: Reporter, *, rows: Sequence[int] = (1, 8, 64, 256, 1024)) -> None:
    """Times norms, rope with cache write, greedy sampling and dequantization, all compiled before the first."""
    jobs = [job for num_rows in rows for job in (*_norm_jobs(num_rows), *_rope_jobs(num_rows))]
    jobs += [job for num_rows in rows if num_rows <= 256 for job in _sample_jobs(num_rows)]
    run_jobs([*jobs, *_dequantize_jobs(128), *_dequantize_jobs(32)], reporter)
