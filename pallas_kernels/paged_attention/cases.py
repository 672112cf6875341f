"""Named shapes of decode attention for tests, benches and tuning, and inputs with poisoned memory."""

import dataclasses
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

POISON = 1e4  # in memory that may be read but must weigh 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call: its shapes and the context of each row, with its new token; 0 is a padding row."""

    name: str
    context_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 64
    num_layers: int = 2
    dtype: str = "float32"
    width: int | None = None  # of the block table; by default what the longest row needs, and one more

    @property
    def table_width(self) -> int:
        """Blocks of a row of the table."""
        return self.width or -(-max(self.context_lens) // self.block_size) + 1


class Inputs(NamedTuple):
    """Arguments of attention over a cache that holds all tokens."""

    q: jax.Array  # [B H d]
    k: jax.Array  # [L N K S d]
    v: jax.Array  # [L N K S d]
    block_tables: jax.Array  # i32[B P]
    context_lens: jax.Array  # i32[B]


def make_inputs(case: Case, *, seed: int = 0, is_poisoned: bool = False) -> Inputs:
    """Returns random inputs with scrambled tables.

    Poisoned memory: blocks in no table hold NaN and must never be read; the null block and the tail of a last block
    hold 1e4, and must weigh exactly 0. Clean inputs hold 0 there.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-length // case.block_size) for length in case.context_lens]
    num_blocks = 1 + sum(counts) + 3
    ids = rng.permutation(np.arange(1, num_blocks))[: sum(counts)]
    tables = np.zeros((len(counts), case.table_width), np.int32)
    shape = (case.num_layers, num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    cache = rng.standard_normal((2, *shape)).astype(np.float32)
    in_use = np.zeros((num_blocks, case.block_size), bool)
    position = 0
    for row, (count, length) in enumerate(zip(counts, case.context_lens, strict=True)):
        tables[row, :count] = ids[position : position + count]
        position += count
        for index in range(count):
            in_use[tables[row, index], : max(0, min(case.block_size, length - index * case.block_size))] = True
    readable = np.zeros(num_blocks, bool)
    readable[0] = True
    readable[ids] = True
    filler = np.where(readable, POISON, np.nan) if is_poisoned else np.zeros(num_blocks)
    mask, filler = in_use[:, None, :, None], filler.astype(np.float32)[:, None, None, None]
    cache = np.where(mask, cache, filler)
    q = rng.standard_normal((len(counts), case.num_heads, case.head_dim))
    return Inputs(
        q=jnp.asarray(q, case.dtype),
        k=jnp.asarray(cache[0], case.dtype),
        v=jnp.asarray(cache[1], case.dtype),
        block_tables=jnp.asarray(tables),
        context_lens=jnp.asarray(case.context_lens, jnp.int32),
    )


class AppendInputs(NamedTuple):
    """Arguments of a call that appends the last token of each context."""

    qkv: jax.Array  # f32[S B K*(G+2)*d]
    cos: jax.Array  # f32[B d/2]
    sin: jax.Array  # f32[B d/2]
    k: jax.Array  # [L N K S d]
    v: jax.Array  # [L N K S d]
    slots: jax.Array  # i32[B]
    block_tables: jax.Array  # i32[B P]
    positions: jax.Array  # i32[B]


def make_append_inputs(case: Case, *, num_parts: int = 1, seed: int = 0, is_poisoned: bool = False) -> AppendInputs:
    """Returns inputs whose cache is that of `make_inputs` without the last token of each row: its slot holds what the
    tail of a last block does. A padding row is at position 0 and writes to the null block."""
    before = make_inputs(case, seed=seed, is_poisoned=is_poisoned)
    rng = np.random.default_rng(seed + 1)
    num_rows, tables = len(case.context_lens), np.asarray(before.block_tables)
    positions = np.maximum(np.asarray(case.context_lens, np.int32) - 1, 0)
    slots = tables[np.arange(num_rows), positions // case.block_size] * case.block_size + positions % case.block_size
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    angles = rng.uniform(0, 6, (num_rows, case.head_dim // 2)).astype(np.float32)
    blocks, offsets = slots // case.block_size, slots % case.block_size
    filler = POISON if is_poisoned else 0.0
    return AppendInputs(
        qkv=jnp.asarray(rng.standard_normal((num_parts, num_rows, width)) / num_parts**0.5, jnp.float32),
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
        k=before.k.at[:, blocks, :, offsets].set(filler),
        v=before.v.at[:, blocks, :, offsets].set(filler),
        slots=jnp.asarray(slots, jnp.int32),
        block_tables=before.block_tables,
        positions=jnp.asarray(positions),
    )


AnyInputs = TypeVar("AnyInputs", Inputs, AppendInputs)


def quantize_cache(inputs: AnyInputs) -> tuple[AnyInputs, dict[str, jax.Array]]:
    """Returns the inputs with int8 keys and values, and the scales f32[L N K S] as keyword arguments of a call.

    Memory that holds NaN gets NaN scales.
    """
    arrays, scales = {}, {}
    for name in ("k", "v"):
        x = getattr(inputs, name).astype(jnp.float32)
        scale = jnp.maximum(jnp.abs(x).max(axis=-1), 1e-30) / 127.0
        q = jnp.round(x / scale[..., None])
        arrays[name] = jnp.clip(jnp.nan_to_num(q, nan=127.0), -127, 127).astype(jnp.int8)
        scales[f"{name}_scale"] = scale
    return inputs._replace(**arrays), scales


def make_norms(head_dim: int) -> dict[str, jax.Array | float]:
    """Returns weights and eps of QK-norm as keyword arguments of a call."""
    q_norm, k_norm = jnp.asarray(np.random.default_rng(2).uniform(0.5, 2.0, (2, head_dim)), jnp.float32)
    return {"q_norm": q_norm, "k_norm": k_norm, "eps": 0.1}


def small_cases() -> tuple[Case, ...]:
    """Returns cases that a CPU interprets in seconds, each for its own edge."""
    return (
        Case(name="g1_edges", context_lens=(1, 15, 16, 17), num_heads=2, num_kv_heads=2, head_dim=64, block_size=16),
        Case(name="g3_padding_row", context_lens=(0, 40, 97), num_heads=9, num_kv_heads=3, head_dim=64, block_size=16),
        Case(name="g4_block64", context_lens=(63, 64, 65, 300), num_heads=8, num_kv_heads=2, head_dim=64),
        Case(
            name="g2_split_edges",
            context_lens=(2, 64, 65, 129),
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            block_size=16,
        ),
        Case(name="g8_d128", context_lens=(1, 129), num_heads=8, num_kv_heads=1, head_dim=128),
        Case(name="g4_bf16", context_lens=(130, 64), num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16"),
    )


def real_cases() -> tuple[Case, ...]:
    """Returns the shapes of real models for a GPU."""
    edges = (1, 63, 64, 65, 255, 256, 257, 1000)
    return (
        Case(name="llama_1b_f32", context_lens=edges, num_heads=32, num_kv_heads=8, head_dim=64),
        Case(name="llama_1b_bf16", context_lens=edges, num_heads=32, num_kv_heads=8, head_dim=64, dtype="bfloat16"),
        Case(
            name="llama_1b_long",
            context_lens=(8192, 4097, 0),
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            dtype="bfloat16",
        ),
        Case(name="qwen_8b_bf16", context_lens=edges, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
        Case(name="smollm_bf16", context_lens=edges, head_dim=64, dtype="bfloat16", num_heads=9, num_kv_heads=3),
        Case(name="g8_bf16", context_lens=edges, head_dim=128, dtype="bfloat16", num_heads=32, num_kv_heads=4),
        Case(name="g1_bf16", context_lens=edges, head_dim=64, dtype="bfloat16", num_heads=8, num_kv_heads=8),
    )
