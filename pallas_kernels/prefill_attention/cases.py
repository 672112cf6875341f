"""Named shapes of prefill attention for tests and benches, and inputs with poisoned memory."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import cases as decode_cases


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call: for each row how many tokens are new, and how many the context has with them."""

    name: str
    new_tokens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_tile: int = 16
    block_size: int = 64
    dtype: str = "float32"
    num_padding: int = 3  # tokens past the last one
    num_layers: int = 2


class Inputs(NamedTuple):
    """Arguments of a call."""

    q: jax.Array  # [T H d]
    k: jax.Array  # [L N K S d]
    v: jax.Array  # [L N K S d]
    block_tables: jax.Array  # i32[B P]
    positions: jax.Array  # i32[T]
    item_rows: jax.Array  # i32[A]
    item_starts: jax.Array  # i32[A]
    item_lens: jax.Array  # i32[A]


def make_inputs(case: Case, *, seed: int = 0, is_poisoned: bool = False) -> Inputs:
    """Returns random inputs with scrambled tables; memory is poisoned as for decode attention."""
    cache_case = decode_cases.Case(
        name=case.name,
        context_lens=case.context_lens,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        num_layers=case.num_layers,
        dtype=case.dtype,
    )
    cache = decode_cases.make_inputs(cache_case, seed=seed, is_poisoned=is_poisoned)
    num_tokens = sum(case.new_tokens) + case.num_padding
    positions, items, start = np.zeros(num_tokens, np.int32), [], 0
    for row, (count, length) in enumerate(zip(case.new_tokens, case.context_lens, strict=True)):
        positions[start : start + count] = np.arange(length - count, length)
        for first in range(0, count, case.query_tile):
            items.append((row, start + first, min(case.query_tile, count - first)))
        start += count
    rows, starts, lens = np.array([*items, (0, 0, 0)], np.int32).T  # the last one is padding
    q = np.random.default_rng(seed + 1).standard_normal((num_tokens, case.num_heads, case.head_dim))
    return Inputs(
        q=jnp.asarray(q, case.dtype),
        k=cache.k,
        v=cache.v,
        block_tables=cache.block_tables,
        positions=jnp.asarray(positions),
        item_rows=jnp.asarray(rows),
        item_starts=jnp.asarray(starts),
        item_lens=jnp.asarray(lens),
    )


def small_cases() -> tuple[Case, ...]:
    """Returns cases that a CPU interprets in seconds, each for its own edge."""
    llama: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    smollm: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    return (
        Case(name="whole_and_one", new_tokens=(33, 1, 16), context_lens=(33, 70, 16), block_size=16, **llama),
        Case(name="chunks_g3", new_tokens=(17, 5), context_lens=(80, 5), block_size=16, **smollm),
        Case(
            name="g1_edges", new_tokens=(1, 15, 17), context_lens=(1, 64, 65), num_heads=2, num_kv_heads=2, head_dim=32
        ),
        Case(name="g8_d128", new_tokens=(20,), context_lens=(129,), num_heads=8, num_kv_heads=1, head_dim=128),
        Case(name="g4_bf16", new_tokens=(40, 1), context_lens=(130, 64), dtype="bfloat16", query_tile=32, **llama),
    )


def real_cases() -> tuple[Case, ...]:
    """Returns the shapes of real models for a GPU."""
    new, lens = (1, 63, 64, 65, 257, 1, 500), (1, 63, 300, 65, 257, 1000, 1200)
    llama: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64}
    qwen = llama | {"head_dim": 128}
    ragged: dict[str, Any] = {"new_tokens": new, "context_lens": lens}
    return (
        Case(name="llama_1b_f32", **ragged, **llama),
        Case(name="llama_1b_bf16", **ragged, **llama, dtype="bfloat16"),
        Case(name="llama_1b_bf16_q32", **ragged, **llama, dtype="bfloat16", query_tile=32),
        Case(name="llama_1b_long", new_tokens=(700,), context_lens=(8192,), **llama, dtype="bfloat16"),
        Case(name="qwen_8b_bf16", **ragged, **qwen, dtype="bfloat16"),
        Case(name="smollm_bf16", **ragged, num_heads=9, num_kv_heads=3, head_dim=64, dtype="bfloat16"),
    )
