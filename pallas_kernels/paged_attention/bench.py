"""Bench of paged decode attention at the shapes of Llama-3.2-1B, beside a gather and softmax by XLA."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.bench import Job, Reporter, relative_error, run_jobs
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.cases import make_inputs, real_cases, small_cases
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.tiles import TileConfig, candidates, tuning_key

_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 16, 32, 8, 64, 64
_CALLS_A_STEP = 8
_TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-4}
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, int], jax.Array]


def check_correctness(reporter: Reporter, *, is_smoke: bool) -> None:
    """Compares the kernel over poisoned memory with the reference over clean memory."""
    splits = (TileConfig(), TileConfig(split_tokens=128, tile_tokens=128, num_stages=2))
    tasks = []
    for case in small_cases() if is_smoke else (*small_cases(), *real_cases()):
        label = {"kernel": "paged_attention", "case": case.name}

        def compare(case: Any = case, label: dict[str, Any] = label) -> None:
            expected = paged_attention_reference(*make_inputs(case), 1)
            poisoned = make_inputs(case, is_poisoned=True)
            for tiles in splits[:1] if is_smoke else splits:
                out = paged_attention(*poisoned, 1, tiles=tiles, interpret=is_smoke)
                error = relative_error(out, expected)
                status = "OK" if error < _TOLERANCES[case.dtype] else "FAILED"
                reporter.emit(**label, tiles=tiles.label, status=status, relative_error=error)

        tasks.append((label, compare))
    reporter.guarded_all(tasks)


def xla_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    layer: int,
) -> jax.Array:
    """Returns the same from a gather of all blocks and a plain softmax, for comparison."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    keys, values = k[layer, block_tables], v[layer, block_tables]  # [B P K S d]
    grouped = q.reshape(num_rows, num_kv_heads, -1, head_dim)
    scores = jnp.einsum("BKGd,BPKSd->BKGPS", grouped, keys, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    positions = jnp.arange(keys.shape[1] * keys.shape[3], dtype=jnp.int32).reshape(keys.shape[1], keys.shape[3])
    is_visible = positions[None] < context_lens[:, None, None]
    scores = jnp.where(is_visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=(-2, -1)).astype(q.dtype)
    out = jnp.einsum("BKGPS,BPKSd->BKGd", weights, values, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(num_rows, num_heads, head_dim)


def _chain(attend: Attend) -> Callable[..., jax.Array]:
    """Returns a program of dependent calls that go through layers and tables, so that none finds its blocks in L2."""

    def program(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lens: jax.Array) -> jax.Array:
        def step(q: jax.Array, tables: jax.Array) -> tuple[jax.Array, None]:
            for index in range(_CALLS_A_STEP):
                layer = index * (_LAYERS // _CALLS_A_STEP)
                q = q + (attend(q, k, v, tables[index], lens, layer) * 1e-3).astype(q.dtype)
            return q, None

        return lax.scan(step, q, tables)[0]

    return program


def _case_jobs(k: jax.Array, v: jax.Array, num_rows: int, context: int) -> list[Job]:
    rng = np.random.default_rng(num_rows * context)
    width = context // _BLOCK
    num_bytes = 2 * num_rows * context * _KV_HEADS * _HEAD_DIM * 2
    length = max(3, min(40, round(5e-3 / _CALLS_A_STEP / (num_bytes / 2e12 + 4e-6))))
    calls = length * _CALLS_A_STEP
    picks = [rng.permutation(np.arange(1, k.shape[1]))[: num_rows * width] for _ in range(calls)]
    tables = jnp.asarray(np.stack(picks).reshape(length, _CALLS_A_STEP, num_rows, width), jnp.int32)
    lens = jnp.full((num_rows,), context - 1, jnp.int32)
    q = jax.random.normal(jax.random.key(num_rows), (num_rows, _HEADS, _HEAD_DIM), jnp.bfloat16)
    expected = paged_attention_reference(q, k, v, tables[0, 0], lens, 0)
    pool = "" if k.nbytes <= 2**32 else "_big_pool"

    def job(tiles_label: str, attend: Attend, **facts: Any) -> Job:
        return Job(
            label={"kernel": "paged_attention", "case": f"b{num_rows}_c{context}{pool}", "tiles": tiles_label, **facts},
            program=_chain(attend),
            arguments=(q, k, v, tables, lens),
            num_calls=calls,
            num_bytes=num_bytes,
            check=lambda: relative_error(jax.jit(attend, static_argnums=5)(q, k, v, tables[0, 0], lens, 0), expected),
        )

    jobs = [job("xla", xla_paged_attention)]
    key = tuning_key(head_dim=_HEAD_DIM, num_groups=_HEADS // _KV_HEADS, block_size=_BLOCK, dtype="bfloat16")
    for tiles in candidates():
        attend = functools.partial(paged_attention, tiles=tiles)
        jobs.append(job(tiles.label, attend, key=key, config=dataclasses.asdict(tiles)))
    return jobs


def _draw_pool(num_blocks: int, seed: int) -> jax.Array:
    shape = (num_blocks, _KV_HEADS, _BLOCK, _HEAD_DIM)

    @jax.jit
    def draw(keys: jax.Array) -> jax.Array:
        layers: jax.Array = lax.map(lambda key: jax.random.normal(key, shape, jnp.bfloat16), keys)
        return layers

    pool: jax.Array = draw(jax.random.split(jax.random.key(seed), _LAYERS))
    return pool


def run(reporter: Reporter, *, is_brief: bool) -> None:
    """Times all tiles over batches and contexts, the likeliest cases first; is_brief leaves out half of them."""
    cases = [(1, 1024), (32, 1024), (8, 1024), (64, 1024), (1, 256), (1, 8192), (8, 8192), (64, 256)]
    cases += [] if is_brief else [(32, 256), (8, 256), (1, 4096)]
    label = {"kernel": "paged_attention", "case": "pool", "tiles": "all"}
    pools = reporter.guarded(label, lambda: (_draw_pool(2048, 1), _draw_pool(2048, 2)))
    for num_rows, context in cases if pools else ():
        _run_case(reporter, pools, num_rows, context)
    del pools
    if reporter.is_out_of_time:
        reporter.emit(**label, status="NOT RUN: budget spent")
        return
    # A pool over 4 GiB makes the kernel compute addresses in 64 bits.
    pools = reporter.guarded(label, lambda: (_draw_pool(4352, 1), _draw_pool(4352, 2)))
    for num_rows, context in ((32, 8192), (8, 1024), (32, 4096)) if pools else ():
        _run_case(reporter, pools, num_rows, context)


def _run_case(reporter: Reporter, pools: tuple[jax.Array, jax.Array], num_rows: int, context: int) -> None:
    label = {"kernel": "paged_attention", "case": f"b{num_rows}_c{context}", "tiles": "all"}
    if reporter.is_out_of_time:
        reporter.emit(**label, status="NOT RUN: budget spent")
        return
    jobs = reporter.guarded(label, lambda: _case_jobs(*pools, num_rows, context))
    run_jobs(jobs or (), reporter)
