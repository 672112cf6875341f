"""Paged attention against a dense formula in float64, over scrambled tables and poisoned memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import tiny_config

from photon_jax.cache.kv_cache import KVCache, init_kv_cache, write_kv
from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig
from photon_jax.ops.attention import attention, full_attention
from photon_jax.quantization.kv import dequantize_kv, quantize_kv
from photon_jax.step_io import StepInputs, StepLayout, input_fields

NUM_KV, HEAD_DIM, NUM_LAYERS, LAYER = 2, 16, 2, 1
NUM_ROWS = 8  # some of them padding
NUM_QUERIES = (1, 5, 16, 17, 33)  # tokens that each sequence computes: its last ones
POISON = 1e4  # in memory that may be read but must weigh 0
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-7}  # of values around 1; bf16 weights and results keep 8 bits


@dataclasses.dataclass(frozen=True)
class Case:
    """A step's worth of attention, and what it must give."""

    q: np.ndarray  # [T H d]
    k: np.ndarray  # [L N K S d], poisoned
    v: np.ndarray
    inputs: StepInputs
    query_tile: int
    lens: tuple[int, ...]
    tables: np.ndarray  # [B P]

    @property
    def num_real(self) -> int:
        return sum(NUM_QUERIES)


def make_case(block_size, groups, query_tile, *, order=(0, 1, 2, 3, 4), poison=POISON):
    """Returns sequences around the edges of a block; the last of them spans several blocks and context tiles."""
    lens = (1, block_size - 1, block_size, block_size + 1, 2 * block_size + 150)
    width = -(-max(lens) // max(block_size, 64)) * max(1, 64 // block_size) + max(1, 64 // block_size)
    layout = StepLayout(num_tokens=80, num_rows=NUM_ROWS, table_width=width, query_tile=query_tile, row_tile=8)
    fields = {field.name: np.zeros(field.shape, field.dtype) for field in input_fields(layout)}
    rng = np.random.default_rng(0)
    counts = [-(-length // block_size) for length in lens]
    num_blocks = 1 + sum(counts) + 3
    free = rng.permutation(np.arange(1, num_blocks)).tolist()
    cache = np.full((2, NUM_LAYERS, num_blocks, NUM_KV, block_size, HEAD_DIM), np.nan if poison else 0.0, np.float32)
    cache[:, :, 0] = poison
    queries = rng.standard_normal((len(lens), max(NUM_QUERIES), NUM_KV * groups, HEAD_DIM)).astype(np.float32)
    q = np.zeros((80, NUM_KV * groups, HEAD_DIM), np.float32)
    contents = [rng.standard_normal((2, NUM_LAYERS, NUM_KV, length, HEAD_DIM)) for length in lens]
    for seq, count in enumerate(counts):  # the memory of a sequence is the same whatever its row
        row = order.index(seq)
        for index in range(count):
            block = free.pop()
            part = contents[seq][:, :, :, index * block_size : (index + 1) * block_size]
            cache[:, :, block] = poison
            cache[:, :, block, :, : part.shape[3]] = part
            fields["block_tables"][row, index] = block
    start, item = 0, 0
    for row, seq in enumerate(order):
        count = NUM_QUERIES[seq]
        fields["positions"][start : start + count] = np.arange(lens[seq] - count, lens[seq])
        q[start : start + count] = queries[seq, :count]
        for offset in range(0, count, query_tile):
            fields["item_rows"][item], fields["item_starts"][item] = row, start + offset
            fields["item_lens"][item] = min(query_tile, count - offset)
            item += 1
        start += count
    fields["counts"][:] = (start, len(lens), item, 0)
    inputs = StepInputs(**{name: jnp.asarray(array) for name, array in fields.items()})
    lens_by_row = tuple(lens[seq] for seq in order)
    return Case(q, cache[0], cache[1], inputs, query_tile, lens_by_row, fields["block_tables"])


@functools.partial(jax.jit, static_argnames=("query_tile", "backend"))
def _attend(q, cache, inputs, *, query_tile, backend):
    kernels = KernelConfig(linear=backend, attention=backend)
    return attention(q, cache, inputs, layer_index=LAYER, query_tile=query_tile, kernels=kernels)


def attend(case, backend, dtype="float32"):
    q, k, v = (jnp.asarray(array).astype(dtype) for array in (case.q, case.k, case.v))
    out = _attend(q, KVCache(k=k, v=v), case.inputs, query_tile=case.query_tile, backend=backend)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    return np.asarray(out.astype(jnp.float32))


def dense(case, dtype="float32"):
    """Returns softmax(q k^T / sqrt(d)) v in float64 from the contiguous context of each token."""
    q, k, v = (
        np.asarray(jnp.asarray(array).astype(dtype).astype(jnp.float32), np.float64)
        for array in (case.q, case.k[LAYER], case.v[LAYER])
    )
    out, groups = np.zeros_like(q), q.shape[1] // NUM_KV
    positions = np.asarray(case.inputs.positions)
    for token, row in enumerate(rows_of_tokens(case)):
        # [P K S d] -> [K P*S d]
        keys, values = (a[case.tables[row]].transpose(1, 0, 2, 3).reshape(NUM_KV, -1, HEAD_DIM) for a in (k, v))
        for head in range(q.shape[1]):
            visible = positions[token] + 1
            scores = keys[head // groups, :visible] @ q[token, head] / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values[head // groups, :visible] / weights.sum()
    return out


def rows_of_tokens(case):
    starts, rows, lens = (np.asarray(getattr(case.inputs, f"item_{name}")) for name in ("starts", "rows", "lens"))
    return [row for _, row, length in sorted(zip(starts, rows, lens, strict=True)) for _ in range(length)]


@pytest.mark.parametrize(
    ("block_size", "groups", "query_tile"),
    [(16, 1, 1), (16, 3, 16), (64, 3, 1), (64, 1, 16), (64, 3, 16), (128, 1, 1), (128, 3, 16)],
)
def test_attention_is_dense_attention_and_poisoned_memory_weighs_nothing(block_size, groups, query_tile):
    case = make_case(block_size, groups, query_tile)
    clean = make_case(block_size, groups, query_tile, poison=0.0)
    expected = dense(case)[: case.num_real]
    for backend in ("reference", "xla"):
        out = attend(case, backend)[: case.num_real]
        np.testing.assert_allclose(out, expected, rtol=0.0, atol=TOLERANCE["float32"], err_msg=backend)
        np.testing.assert_array_equal(out, attend(clean, backend)[: case.num_real], err_msg=backend)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_bf16_attention_weighs_in_float32(backend):
    case = make_case(64, 3, 16)
    out = attend(case, backend, "bfloat16")[: case.num_real]
    expected = dense(case, "bfloat16")[: case.num_real]
    np.testing.assert_allclose(out, expected, rtol=0.0, atol=TOLERANCE["bfloat16"])


def int8_cache(case):
    """Returns the case's memory rounded; what held NaN has NaN scales."""
    (k, k_scale), (v, v_scale) = (quantize_kv(jnp.asarray(array)) for array in (case.k, case.v))
    return KVCache(k=k, v=v, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize(
    ("block_size", "query_tile", "dtype"), [(16, 16, "float32"), (64, 1, "float32"), (128, 16, "bfloat16")]
)
def test_an_int8_cache_is_attended_to_as_it_stands_and_poisoned_memory_weighs_nothing(block_size, query_tile, dtype):
    case, clean = make_case(block_size, 3, query_tile), make_case(block_size, 3, query_tile, poison=0.0)
    caches = [int8_cache(each) for each in (case, clean)]
    cache = caches[1]
    k, v = (
        np.asarray(dequantize_kv(q, scale, jnp.float32))
        for q, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )
    expected = dense(dataclasses.replace(clean, k=k, v=v), dtype)[: case.num_real]
    q = jnp.asarray(case.q).astype(dtype)
    for backend in ("reference", "xla"):
        poisoned, out = (
            np.asarray(_attend(q, each, case.inputs, query_tile=query_tile, backend=backend).astype(jnp.float32))
            for each in caches
        )
        np.testing.assert_allclose(out[: case.num_real], expected, rtol=0.0, atol=TOLERANCE[dtype], err_msg=backend)
        np.testing.assert_array_equal(out[: case.num_real], poisoned[: case.num_real], err_msg=backend)


@pytest.mark.parametrize("query_tile", [1, 16])
def test_bits_of_a_sequence_depend_neither_on_its_row_nor_on_its_blocks(query_tile):
    first = make_case(64, 3, query_tile)
    orders = [(4, 2, 0, 1, 3), (1, 3, 4, 0, 2)]
    expected = split_by_sequence(attend(first, "reference"), range(5))
    for order in orders:
        moved = make_case(64, 3, query_tile, order=order)
        assert sorted(moved.lens) == sorted(first.lens)
        assert not np.array_equal(moved.tables, first.tables)
        for seq, out in split_by_sequence(attend(moved, "reference"), order).items():
            np.testing.assert_array_equal(out, expected[seq])


def split_by_sequence(out, order):
    starts = np.cumsum([0, *(NUM_QUERIES[seq] for seq in order)])
    return {seq: out[starts[row] : starts[row + 1]] for row, seq in enumerate(order)}


def test_full_attention_is_causal_dense_attention():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 7, heads, HEAD_DIM)).astype(np.float32) for heads in (6, 2, 2))
    expected = np.zeros_like(q, np.float64)
    for batch, token, head in np.ndindex(2, 7, 6):
        keys, values = (array[batch, : token + 1, head // 3].astype(np.float64) for array in (k, v))
        scores = keys @ q[batch, token, head] / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        expected[batch, token, head] = weights @ values / weights.sum()
    out = full_attention(*(jnp.asarray(array) for array in (q, k, v)))
    np.testing.assert_allclose(np.asarray(out), expected, rtol=0.0, atol=TOLERANCE["float32"])


def test_new_keys_and_values_land_in_their_slots_and_nowhere_else():
    rng = np.random.default_rng(0)
    shape, block_size = (NUM_LAYERS, 5, NUM_KV, 4, HEAD_DIM), 4
    old = rng.standard_normal((2, *shape)).astype(np.float32)
    k, v = rng.standard_normal((2, 6, NUM_KV, HEAD_DIM)).astype(np.float32)
    slots = np.asarray([3 * block_size + 2, 3 * block_size + 3, 1 * block_size, 4 * block_size + 1, 0, 0], np.int32)
    cache = KVCache(k=jnp.asarray(old[0]), v=jnp.asarray(old[1]))
    written = write_kv(cache, LAYER, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
    for before, after, new in ((old[0], written.k, k), (old[1], written.v, v)):
        expected = before.copy()
        for token, slot in enumerate(slots[:4]):
            expected[LAYER, slot // block_size, :, slot % block_size] = new[token]
        after = np.asarray(after)
        np.testing.assert_array_equal(after[:, 1:], expected[:, 1:])
        np.testing.assert_array_equal(after[0], before[0])  # the other layer
        np.testing.assert_array_equal(after[LAYER, 0, :, 1:], before[LAYER, 0, :, 1:])  # padding writes slot 0 alone
    assert written.block_size == block_size


def test_an_int8_cache_gets_each_token_rounded_with_its_scale():
    config, rng = tiny_config(), np.random.default_rng(0)
    cache = init_kv_cache(config, CacheLayout(num_blocks=5, block_size=4), "int8")
    k, v = rng.standard_normal((2, 3, config.num_kv_heads, config.head_dim)).astype(np.float32)
    slots = np.asarray([14, 15, 4])
    written = write_kv(cache, LAYER, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots, jnp.int32))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), written) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), cache
    )
    for new, q, scale in ((k, written.k, written.k_scale), (v, written.v, written.v_scale)):
        expected_q, expected_scale = quantize_kv(jnp.asarray(new))
        np.testing.assert_array_equal(q[LAYER, slots // 4, :, slots % 4], expected_q)
        np.testing.assert_array_equal(scale[LAYER, slots // 4, :, slots % 4], expected_scale)
        others = np.ones(20, bool)
        others[slots] = False
        assert not np.asarray(q[LAYER]).transpose(0, 2, 1, 3).reshape(20, -1)[others].any()
        assert not np.asarray(q[1 - LAYER]).any()
