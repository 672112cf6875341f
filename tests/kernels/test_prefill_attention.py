"""Prefill attention: the kernel against its reference, the reference against a float64 formula."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import KernelUnsupportedError, prefill_attention, prefill_attention_reference
from pallas_kernels.paged_attention.cases import quantize_cache
from pallas_kernels.prefill_attention.cases import Case, make_inputs, real_cases, small_cases
from pallas_kernels.prefill_attention.tiles import TileConfig, candidates, heuristic

TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}
LAYER = 1


def relative_error(found, expected):
    a, b = (np.asarray(x).astype(np.float64) for x in (found, expected))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def exact_attention(inputs, layer):
    """Softmax attention token by token in float64; tokens of no item get zeros."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in inputs[:3])
    tables, positions = np.asarray(inputs.block_tables), np.asarray(inputs.positions)
    num_kv, head_dim, groups = k.shape[2], k.shape[4], q.shape[1] // k.shape[2]
    out = np.zeros_like(q)
    for row, start, length in zip(*(np.asarray(x) for x in inputs[5:]), strict=True):
        keys, values = (np.moveaxis(x[layer, tables[row]], 1, 2).reshape(-1, num_kv, head_dim) for x in (k, v))
        for token in range(start, start + length):
            visible = positions[token] + 1
            for head in range(q.shape[1]):
                scores = keys[:visible, head // groups] @ q[token, head] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ values[:visible, head // groups] / weights.sum()
    return out


def check_against_reference(case, *, interpret, tiles):
    clean, poisoned = make_inputs(case), make_inputs(case, is_poisoned=True)
    expected = prefill_attention_reference(*clean, LAYER, query_tile=case.query_tile)
    for one in tiles:
        found = prefill_attention(*poisoned, LAYER, query_tile=case.query_tile, tiles=one, interpret=interpret)
        assert found.dtype == clean.q.dtype
        assert relative_error(found, expected) < TOLERANCES[case.dtype], one.label
        assert not np.any(found[-case.num_padding :]), "tokens of no item"


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_kernel_gives_the_reference_result_over_poisoned_memory(case):
    tiles = TileConfig(tile_tokens=16) if case.block_size == 16 else heuristic(head_dim=case.head_dim, dtype=case.dtype)
    check_against_reference(case, interpret=True, tiles=(tiles,))


@pytest.mark.parametrize("block_size", [16, 64])
def test_int8_keys_and_values_stand_for_their_products_with_the_scales(block_size):
    case = dataclasses.replace(small_cases()[0], block_size=block_size)
    inputs, scales = quantize_cache(make_inputs(case, is_poisoned=True))
    expected = prefill_attention_reference(*inputs, LAYER, query_tile=case.query_tile, **scales)
    tiles = TileConfig(tile_tokens=16)
    found = prefill_attention(*inputs, LAYER, query_tile=case.query_tile, tiles=tiles, interpret=True, **scales)
    assert relative_error(found, expected) < TOLERANCES[case.dtype]
    exact = make_inputs(case)
    assert 1e-4 < relative_error(found, exact_attention(exact, LAYER)) < 2e-2, "the rounding of int8, no more"


@pytest.mark.gpu
@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_kernel_gives_the_reference_result_at_real_sizes(case):
    is_main = case.dtype == "bfloat16" and case.head_dim == 64
    tiles = candidates() if is_main else (heuristic(head_dim=case.head_dim, dtype=case.dtype),)
    check_against_reference(case, interpret=False, tiles=tiles)


@pytest.mark.parametrize("case", small_cases()[:3], ids=lambda case: case.name)
def test_reference_is_causal_softmax_attention(case):
    inputs = make_inputs(case)
    found = prefill_attention_reference(*inputs, LAYER, query_tile=case.query_tile)
    assert relative_error(found, exact_attention(inputs, LAYER)) < 1e-6


@pytest.mark.parametrize("tile_tokens", [16, 32])
def test_a_token_has_the_same_bits_in_a_whole_prompt_and_in_chunks(tile_tokens):
    tiles = TileConfig(tile_tokens=tile_tokens)
    case = Case(
        name="whole", new_tokens=(50,), context_lens=(50,), num_heads=4, num_kv_heads=2, head_dim=32, block_size=16
    )
    whole = make_inputs(case)

    def attend(chunk):
        items = [(start, min(16, chunk.stop - start)) for start in range(chunk.start, chunk.stop, 16)]
        starts, lens = np.array([(start - chunk.start, length) for start, length in items], np.int32).T
        rows = jnp.zeros(len(items), jnp.int32)
        arguments = (whole.q[chunk], whole.k, whole.v, whole.block_tables, whole.positions[chunk], rows)
        return prefill_attention(
            *arguments, jnp.asarray(starts), jnp.asarray(lens), LAYER, query_tile=16, tiles=tiles, interpret=True
        )

    together = np.asarray(attend(slice(0, 50)))
    parts = [np.asarray(attend(slice(first, min(first + 7, 50)))) for first in range(0, 50, 7)]
    np.testing.assert_array_equal(np.concatenate(parts), together)


def check_that_chunks_change_no_bit(case, *, interpret):
    """In the uniform form, which a step of single tokens takes too: a token alone is the token in its chunk."""
    inputs = make_inputs(case)
    options = {"query_tile": case.query_tile, "is_uniform": True, "interpret": interpret}
    together = np.asarray(prefill_attention(*inputs, LAYER, **options))
    lens = np.asarray(inputs.item_lens)
    rows = np.repeat(np.asarray(inputs.item_rows), lens)
    starts = np.concatenate([np.arange(first, first + n) for first, n in zip(inputs.item_starts, lens, strict=True)])
    singles = (jnp.asarray(each, jnp.int32) for each in (rows, starts, np.ones_like(starts)))
    alone = np.asarray(prefill_attention(*inputs[:5], *singles, LAYER, **options))
    np.testing.assert_array_equal(alone, together)
    assert np.any(together)


def test_in_the_uniform_form_a_token_has_the_same_bits_alone_and_in_its_chunk():
    check_that_chunks_change_no_bit(small_cases()[0], interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_gpu_in_the_uniform_form_a_token_has_the_same_bits_alone_and_in_its_chunk(case):
    check_that_chunks_change_no_bit(case, interpret=False)


@pytest.mark.lowers
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100"])
@pytest.mark.parametrize("tiles", candidates(), ids=lambda tiles: tiles.label)
def test_every_candidate_lowers_for_cuda(tiles, device):
    head_dim, num_heads, num_kv, dtype = (
        (64, 32, 8, jnp.bfloat16) if device == "NVIDIA H200" else (128, 9, 3, jnp.float32)
    )
    cache, integers = (
        jax.ShapeDtypeStruct((16, 512, num_kv, 64, head_dim), dtype),
        jax.ShapeDtypeStruct((24,), jnp.int32),
    )
    arguments = (
        jax.ShapeDtypeStruct((256, num_heads, head_dim), dtype),
        *(cache, cache),
        jax.ShapeDtypeStruct((8, 32), jnp.int32),
        jax.ShapeDtypeStruct((256,), jnp.int32),
        *(integers, integers, integers),
    )
    text = lower_for_cuda(lambda *a: prefill_attention(*a, 3, query_tile=16, tiles=tiles), *arguments, device=device)
    assert text.count("xla.gpu.triton") == 2, "items of one token, and the others"


def test_wrong_shapes_and_dtypes_are_named():
    inputs = make_inputs(small_cases()[0])
    with pytest.raises(ValueError, match=r"head_dim must be equal, H a multiple of K"):
        prefill_attention(inputs.q[:, :1], *inputs[1:], LAYER, query_tile=16)
    with pytest.raises(ValueError, match="one dtype, or int8 k and v, got bfloat16"):
        prefill_attention(inputs.q.astype(jnp.bfloat16), *inputs[1:], LAYER, query_tile=16)
    with pytest.raises(ValueError, match=r"expected positions \[T\] with T = 53, got \(52,\)"):
        prefill_attention(*inputs[:4], inputs.positions[1:], *inputs[5:], LAYER, query_tile=16)
    with pytest.raises(ValueError, match=r"expected item_rows, item_starts, item_lens \[A\]"):
        prefill_attention(*inputs[:5], inputs.item_rows[1:], *inputs[6:], LAYER, query_tile=16)
    with pytest.raises(ValueError, match="int32 positions and items, got"):
        prefill_attention(*inputs[:4], inputs.positions.astype(jnp.float32), *inputs[5:], LAYER, query_tile=16)


def test_an_unsupported_head_dim_is_refused():
    inputs = make_inputs(dataclasses.replace(small_cases()[0], head_dim=24))
    with pytest.raises(KernelUnsupportedError, match="power-of-two head_dim of at least 16, got 24"):
        prefill_attention(*inputs, LAYER, query_tile=16, interpret=True)


def test_tiles_are_checked():
    with pytest.raises(ValueError, match="tile_tokens must be at least 16, got 8"):
        TileConfig(tile_tokens=8)
    with pytest.raises(ValueError, match="num_warps must be a power of two, got 3"):
        TileConfig(num_warps=3)
