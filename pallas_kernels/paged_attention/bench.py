"""Bench of decode attention that appends, at the shapes of Llama-3.2-1B and Qwen3-8B, beside a gather by XLA.

The cache is a pair of `jax.Ref`s, which a program writes in place: a copy would take longer than what is timed. New
tokens go to the null block, and so leave the cache as it was for the others.
"""

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.bench import Job, Reporter, relative_error, run_jobs
from pallas_kernels.common.device import device_name
from pallas_kernels.paged_attention.api import append_attention
from pallas_kernels.paged_attention.cases import make_append_inputs, real_cases, small_cases
from pallas_kernels.paged_attention.reference import append_attention_reference
from pallas_kernels.paged_attention.tiles import TileConfig, candidates, choose_tiles, tuning_key

_LAYERS, _HEADS, _KV_HEADS, _BLOCK = 16, 32, 8, 64
_CALLS_A_STEP = 8
_TOLERANCES = {"bfloat16": 1e-2, "float32": 1e-4}
_XLA_BYTES = 1.2e9  # of keys and values that XLA's version, which copies them, is still timed with
_LONG_CASES = ((8, 4096), (64, 4096), (32, 8192), (8, 32768), (64, 32768))
_INT8_TOKENS = 2**18  # that int8 cases have at most, as all pools lie in memory at once
Arrays = tuple[jax.Array, ...]
Refs = tuple[Any, ...]  # `jax.Ref`s
Attend = Callable[..., tuple[jax.Array, Arrays]]  # of _New, the cache's arrays, tables and layer: output and cache


class _New(NamedTuple):
    """New tokens: the QKV product f32[1 B K*(G+2)*d], cos and sin f32[B d/2], and their positions i32[B]."""

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    positions: jax.Array


class _Pool:
    """Keys and values of all blocks [L N K S d]; of int8 ones their scales f32[L N K S] too.

    Attributes:
      refs: `jax.Ref`s of the arrays, for one program at a time.
      lock: who checks in threads takes it.
      shape: of keys and of values.
    """

    def __init__(self, arrays: Sequence[jax.Array]) -> None:
        self.refs = tuple(jax.new_ref(array) for array in arrays)
        self.lock = threading.Lock()
        self.shape = arrays[0].shape

    @property
    def is_int8(self) -> bool:
        """Whether there are scales."""
        return len(self.refs) == 4


def _read(refs: Refs) -> Arrays:
    return tuple(ref[...] for ref in refs)


def _write(refs: Refs, arrays: Arrays) -> None:
    for ref, array in zip(refs, arrays, strict=True):
        ref[...] = array


def check_correctness(reporter: Reporter, *, is_smoke: bool) -> None:
    """Compares the kernel over poisoned memory with the reference over clean memory."""
    splits = (TileConfig(), TileConfig(split_tokens=128, tile_tokens=128, num_stages=2))
    tasks = []
    for case in small_cases() if is_smoke else (*small_cases(), *real_cases()):
        label = {"kernel": "paged_attention", "case": case.name}

        def compare(case: Any = case, label: dict[str, Any] = label) -> None:
            expected, *_ = append_attention_reference(*make_append_inputs(case), 1)
            poisoned = make_append_inputs(case, is_poisoned=True)
            for tiles in splits[:1] if is_smoke else splits:
                out, *_ = append_attention(*poisoned, 1, tiles=tiles, interpret=is_smoke)
                error = relative_error(out, expected)
                status = "OK" if error < _TOLERANCES[case.dtype] else "FAILED"
                reporter.emit(**label, tiles=tiles.label, status=status, relative_error=error)

        tasks.append((label, compare))
    reporter.guarded_all(tasks)


def _named(cache: Arrays) -> dict[str, Any]:
    return dict(zip(("k", "v", "k_scale", "v_scale"), cache, strict=False))


def _append(new: _New, cache: Arrays, tables: jax.Array, layer: int, *, tiles: TileConfig) -> tuple[jax.Array, Arrays]:
    """Returns what the kernel does; the new tokens go to the null block."""
    slots = jnp.zeros_like(new.positions)
    rows: dict[str, Any] = {"slots": slots, "block_tables": tables, "positions": new.positions, "layer": layer}
    turn: dict[str, Any] = {"cos": new.cos, "sin": new.sin, "dtype": jnp.dtype(jnp.bfloat16)}
    out, *arrays = append_attention(new.qkv, **_named(cache), **turn, **rows, tiles=tiles)
    return out, tuple(arrays)


def xla_attention(new: _New, cache: Arrays, tables: jax.Array, layer: int) -> tuple[jax.Array, Arrays]:
    """Returns about the same from a gather of all blocks and a plain softmax, for comparison: queries are turned, the
    new keys and values left out."""
    (k, v), (num_rows, (num_kv_heads, _, head_dim)) = cache, (new.cos.shape[0], cache[0].shape[2:])
    heads = new.qkv[0].reshape(num_rows, num_kv_heads, -1, head_dim)[:, :, :-2]
    x, y = jnp.split(heads, 2, axis=-1)
    cos, sin = (jnp.expand_dims(each, (1, 2)) for each in (new.cos, new.sin))
    q = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1).astype(k.dtype)  # [B K G d]
    keys, values = k[layer, tables], v[layer, tables]  # [B P K S d]
    scores = jnp.einsum("BKGd,BPKSd->BKGPS", q, keys, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    positions = jnp.arange(keys.shape[1] * keys.shape[3], dtype=jnp.int32).reshape(keys.shape[1], keys.shape[3])
    is_visible = positions[None] < new.positions[:, None, None]
    scores = jnp.where(is_visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=(-2, -1)).astype(q.dtype)
    out = jnp.einsum("BKGPS,BPKSd->BKGd", weights, values, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(num_rows, -1, head_dim), cache


def _chain(attend: Attend) -> Callable[..., jax.Array]:
    """Returns a program of dependent calls that go through layers and tables, so that none finds its blocks in L2."""

    def program(new: _New, refs: Refs, tables: jax.Array) -> jax.Array:
        cache = _read(refs)

        def step(carry: tuple[_New, Arrays], tables: jax.Array) -> tuple[tuple[_New, Arrays], None]:
            new, cache = carry
            for index in range(_CALLS_A_STEP):
                layer = index * cache[0].shape[0] // _CALLS_A_STEP
                out, cache = attend(new, cache, tables[index], layer)
                new = new._replace(cos=new.cos + out[:, 0, :1].astype(jnp.float32) * 1e-3)
            return (new, cache), None

        (new, cache), _ = lax.scan(step, (new, cache), tables)
        _write(refs, cache)
        return new.cos

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
    head_dim, width, item_bytes = pool.shape[4], context // _BLOCK, 1 if pool.is_int8 else 2
    num_bytes = 2 * num_rows * context * _KV_HEADS * (head_dim * item_bytes + (4 if pool.is_int8 else 0))
    length = max(3, min(40, round(5e-3 / _CALLS_A_STEP / (num_bytes / 2e12 + 4e-6))))
    tables = _tables(pool.shape[1], (length, _CALLS_A_STEP, num_rows, width), is_contiguous=is_contiguous)
    new = _draw_new(num_rows, context, head_dim)
    few = min(2, num_rows) if num_bytes > _XLA_BYTES else num_rows
    expected = _expected(new, pool.refs, tables[0, 0], few)
    name = f"b{num_rows}_c{context}" + ("_d128" if head_dim == 128 else "") + ("_int8" if pool.is_int8 else "")
    name += "_in_a_row" if is_contiguous else ""
    pool_bytes = math.prod(pool.shape) * item_bytes
    label = {"kernel": "paged_attention", "case": name + ("" if pool_bytes <= 2**32 else "_big_pool")}

    def job(tiles_label: str, attend: Attend, tolerance: float, **facts: Any) -> Job:
        def call(new: _New, refs: Refs, tables: jax.Array) -> jax.Array:
            out, cache = attend(new, _read(refs), tables, 0)
            _write(refs, cache)
            return out

        def check() -> float:
            with pool.lock:
                return relative_error(jax.jit(call)(new, pool.refs, tables[0, 0])[-few:], expected)

        return Job(
            label=label | {"tiles": tiles_label, **facts},
            program=_chain(attend),
            arguments=(new, pool.refs, tables),
            num_calls=length * _CALLS_A_STEP,
            num_bytes=num_bytes,
            check=check,
            tolerance=tolerance,
        )

    jobs = [job("xla", xla_attention, math.inf)] if num_bytes <= _XLA_BYTES and not pool.is_int8 else []
    key = tuning_key(head_dim=head_dim, num_groups=_HEADS // _KV_HEADS, block_size=_BLOCK, dtype="bfloat16")
    for tiles in tilings:
        attend = functools.partial(_append, tiles=tiles)
        # Cases of one choice decide nothing; nor do int8 caches, whose tiles are those of the queries' dtype.
        facts = {} if pool.is_int8 or len(tilings) == 1 else {"key": key, "config": dataclasses.asdict(tiles)}
        jobs.append(job(tiles.label, attend, 1e-2, **facts))
    return jobs


def _draw_new(num_rows: int, context: int, head_dim: int) -> _New:
    width = (_HEADS + 2 * _KV_HEADS) * head_dim
    angles = jax.random.uniform(jax.random.key(num_rows + 1), (num_rows, head_dim // 2), maxval=6.0)
    return _New(
        qkv=jax.random.normal(jax.random.key(num_rows), (1, num_rows, width)),
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
        positions=jnp.full((num_rows,), context - 2, jnp.int32),
    )


@functools.partial(jax.jit, static_argnames="few")
def _expected(new: _New, refs: Refs, tables: jax.Array, few: int) -> jax.Array:
    """Returns attention of the last few rows over a copy of their blocks alone, into which their tokens go."""
    tables, positions = tables[-few:], new.positions[-few:]
    arrays = [ref[0, tables.reshape(-1)][None] for ref in refs]
    own = jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape)
    blocks = jnp.take_along_axis(own, positions[:, None] // _BLOCK, axis=1)[:, 0]
    slots = blocks * _BLOCK + positions % _BLOCK
    rows: dict[str, Any] = {"slots": slots, "block_tables": own, "positions": positions, "layer": 0}
    turn: dict[str, Any] = {"cos": new.cos[-few:], "sin": new.sin[-few:], "dtype": jnp.dtype(jnp.bfloat16)}
    out: jax.Array = append_attention_reference(new.qkv[:, -few:], **_named(tuple(arrays)), **turn, **rows)[0]
    return out


def _draw_pool(num_blocks: int, *, num_layers: int = _LAYERS, head_dim: int = 64, is_int8: bool = False) -> _Pool:
    shape = (num_blocks, _KV_HEADS, _BLOCK, head_dim)

    def draw_layer(key: jax.Array) -> jax.Array:
        if is_int8:
            return lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)
        return jax.random.normal(key, shape, jnp.bfloat16)

    draw = jax.jit(functools.partial(lax.map, draw_layer))
    arrays = [draw(jax.random.split(jax.random.key(seed), num_layers)) for seed in (1, 2)]
    arrays += [jnp.full(arrays[0].shape[:4], 0.02, jnp.float32)] * (2 if is_int8 else 0)
    return _Pool(arrays)


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
