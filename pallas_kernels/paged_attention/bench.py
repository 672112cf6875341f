"""Bench of paged decode attention at the shapes of Llama-3.2-1B and Qwen3-8B, beside a gather and softmax by XLA."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.bench import Job, Reporter, relative_error, run_jobs
from pallas_kernels.common.device import device_name
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.cases import make_inputs, real_cases, small_cases
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.tiles import TileConfig, candidates, choose_tiles, tuning_key

_LAYERS, _HEADS, _KV_HEADS, _BLOCK = 16, 32, 8, 64
_CALLS_A_STEP = 8
_TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-4}
_XLA_BYTES = 1.2e9  # of keys and values that XLA's version, which copies them, is still timed with
_LONG_CASES = ((8, 4096), (64, 4096), (32, 8192), (8, 32768), (64, 32768))
_INT8_TOKENS = 2**18  # that int8 cases have at most, as all pools lie in memory at once
Attend = Callable[..., jax.Array]  # of q, k, v, tables, lengths, layer, and of int8 the scales by name


class _Pool(NamedTuple):
    """Keys and values of all blocks [L N K S d]; of int8 ones their scales f32[L N K S] too."""

    k: jax.Array
    v: jax.Array
    scales: dict[str, jax.Array]


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

    def program(q: jax.Array, pool: _Pool, tables: jax.Array, lens: jax.Array) -> jax.Array:
        k, v, scales = pool

        def step(q: jax.Array, tables: jax.Array) -> tuple[jax.Array, None]:
            for index in range(_CALLS_A_STEP):
                layer = index * k.shape[0] // _CALLS_A_STEP
                q = q + (attend(q, k, v, tables[index], lens, layer, **scales) * 1e-3).astype(q.dtype)
            return q, None

        return lax.scan(step, q, tables)[0]

    return program


def _tables(num_blocks: int, shape: tuple[int, int, int, int], *, is_contiguous: bool) -> jax.Array:
    """Returns tables i32[steps calls B P] of distinct blocks, in random places or one after the other."""
    rng = np.random.default_rng(shape[2] * shape[3])
    length, calls, num_rows, width = shape
    if is_contiguous:
        starts = rng.integers(num_blocks - 1, size=(length * calls, 1))
        picks = 1 + (starts + np.arange(num_rows * width)) % (num_blocks - 1)
    else:
        ids = np.arange(1, num_blocks)
        picks = np.stack([rng.permutation(ids)[: num_rows * width] for _ in range(length * calls)])
    return jnp.asarray(picks.reshape(shape), jnp.int32)


def _case_jobs(
    pool: _Pool, num_rows: int, context: int, tilings: Sequence[TileConfig], *, is_contiguous: bool = False
) -> list[Job]:
    """Returns a job for each of the tiles, and one for XLA where its copy of the blocks has room."""
    k, v, scales = pool
    head_dim, width = k.shape[4], context // _BLOCK
    num_bytes = 2 * num_rows * context * _KV_HEADS * (head_dim * k.dtype.itemsize + (4 if scales else 0))
    length = max(3, min(40, round(5e-3 / _CALLS_A_STEP / (num_bytes / 2e12 + 4e-6))))
    tables = _tables(k.shape[1], (length, _CALLS_A_STEP, num_rows, width), is_contiguous=is_contiguous)
    lens = jnp.full((num_rows,), context - 1, jnp.int32)
    q = jax.random.normal(jax.random.key(num_rows), (num_rows, _HEADS, head_dim), jnp.bfloat16)
    few = slice(-2, None) if num_bytes > _XLA_BYTES else slice(None)
    expected = paged_attention_reference(q[few], k, v, tables[0, 0, few], lens[few], 0, **scales)
    name = f"b{num_rows}_c{context}" + ("_d128" if head_dim == 128 else "") + ("_int8" if scales else "")
    name += "_in_a_row" if is_contiguous else ""
    label = {"kernel": "paged_attention", "case": name + ("" if k.nbytes <= 2**32 else "_big_pool")}

    def job(tiles_label: str, attend: Attend, **facts: Any) -> Job:
        def check() -> float:
            out = jax.jit(attend, static_argnums=5)(q, k, v, tables[0, 0], lens, 0, **scales)
            return relative_error(out[few], expected)

        return Job(
            label=label | {"tiles": tiles_label, **facts},
            program=_chain(attend),
            arguments=(q, pool, tables, lens),
            num_calls=length * _CALLS_A_STEP,
            num_bytes=num_bytes,
            check=check,
        )

    jobs = [job("xla", xla_paged_attention)] if num_bytes <= _XLA_BYTES and not scales else []
    key = tuning_key(head_dim=head_dim, num_groups=_HEADS // _KV_HEADS, block_size=_BLOCK, dtype="bfloat16")
    for tiles in tilings:
        attend = functools.partial(paged_attention, tiles=tiles)
        # Cases of one choice decide nothing; nor do int8 caches, whose tiles are those of q's dtype.
        facts = {} if scales or len(tilings) == 1 else {"key": key, "config": dataclasses.asdict(tiles)}
        jobs.append(job(tiles.label, attend, **facts))
    return jobs


def _draw_pool(num_blocks: int, *, num_layers: int = _LAYERS, head_dim: int = 64, is_int8: bool = False) -> _Pool:
    shape = (num_blocks, _KV_HEADS, _BLOCK, head_dim)

    def draw_layer(key: jax.Array) -> jax.Array:
        if is_int8:
            return lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)
        return jax.random.normal(key, shape, jnp.bfloat16)

    draw = jax.jit(functools.partial(lax.map, draw_layer))
    k, v = (draw(jax.random.split(jax.random.key(seed), num_layers)) for seed in (1, 2))
    scale = {name: jnp.full(k.shape[:4], 0.02, jnp.float32) for name in ("k_scale", "v_scale") if is_int8}
    return _Pool(k, v, scale)


def run(reporter: Reporter, *, is_brief: bool) -> None:
    """Times all tiles over batches and contexts, the likeliest cases first; is_brief leaves out half of them."""
    cases = [(1, 1024), (32, 1024), (8, 1024), (64, 1024), (1, 256), (1, 8192), (8, 8192), (64, 256)]
    cases += [] if is_brief else [(32, 256), (8, 256), (1, 4096)]
    label = {"kernel": "paged_attention", "case": "pool", "tiles": "all"}
    pool = reporter.guarded(label, lambda: _draw_pool(2048))
    for num_rows, context in cases if pool else ():
        _run_case(reporter, pool, num_rows, context)
    del pool
    if reporter.is_out_of_time:
        reporter.emit(**label, status="NOT RUN: budget spent")
        return
    # A pool over 4 GiB makes the kernel compute addresses in 64 bits.
    pool = reporter.guarded(label, lambda: _draw_pool(4352))
    for num_rows, context in ((32, 8192), (8, 1024), (32, 4096)) if pool else ():
        _run_case(reporter, pool, num_rows, context)


def _run_case(reporter: Reporter, pool: _Pool, num_rows: int, context: int) -> None:
    label = {"kernel": "paged_attention", "case": f"b{num_rows}_c{context}", "tiles": "all"}
    if reporter.is_out_of_time:
        reporter.emit(**label, status="NOT RUN: budget spent")
        return
    jobs = reporter.guarded(label, lambda: _case_jobs(pool, num_rows, context, candidates()))
    run_jobs(jobs or (), reporter)


def run_long(reporter: Reporter, *, is_brief: bool, shrink: int = 1) -> None:
    """Times contexts of 4k to 32k, heads of 64 and 128, scattered blocks and such in a row, and int8 keys and values.

    All is compiled before the first is timed. The tiles are those that a call would choose, unless not is_brief: then
    other ones too at 4k.

    Args:
      shrink: divides the contexts, for trials without a large GPU.
    """
    jobs: list[Job] = []
    for head_dim, is_int8 in itertools.product((128, 64), (False, True)):
        cases = [case for case in _LONG_CASES if not is_int8 or math.prod(case) <= _INT8_TOKENS]
        num_blocks = max(math.prod(case) for case in cases) // shrink // _BLOCK + 1
        pool = _draw_pool(num_blocks, num_layers=1, head_dim=head_dim, is_int8=is_int8)
        chosen = choose_tiles(
            device=device_name(),
            head_dim=head_dim,
            num_groups=_HEADS // _KV_HEADS,
            block_size=_BLOCK,
            dtype="bfloat16",
        )
        others = tuple(tiles for tiles in candidates() if tiles != chosen)
        for num_rows, context in cases:
            is_tuned = context == 4096 and not is_brief and not is_int8
            sizes = (num_rows, context // shrink)
            jobs += _case_jobs(pool, *sizes, (chosen, *(others if is_tuned else ())))
            if not is_int8:
                jobs += _case_jobs(pool, *sizes, (chosen,), is_contiguous=True)[-1:]
    run_jobs(jobs, reporter)
