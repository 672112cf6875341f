"""Paged attention: the kernel against its reference, the reference against a float64 formula."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import KernelUnsupportedError, paged_attention, paged_attention_reference
from pallas_kernels.paged_attention.cases import Case, make_inputs, quantize_cache, real_cases, small_cases
from pallas_kernels.paged_attention.tiles import TileConfig, candidates, heuristic

TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}
SMALL_TILES = TileConfig(split_tokens=64, tile_tokens=16, num_warps=2, num_stages=2)
LAYER = 1


def relative_error(found, expected):
    a, b = (np.asarray(x).astype(np.float64) for x in (found, expected))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def exact_attention(inputs, layer):
    """Softmax attention row by row in float64."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in inputs[:3])
    tables, lens = np.asarray(inputs.block_tables), np.asarray(inputs.context_lens)
    num_kv_heads, head_dim = k.shape[2], k.shape[4]
    out = np.zeros_like(q)
    for row, length in enumerate(lens):
        if length:
            keys, values = (
                np.moveaxis(x[layer, tables[row]], 1, 2).reshape(-1, num_kv_heads, head_dim)[:length] for x in (k, v)
            )
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // num_kv_heads)
                scores = keys[:, kv_head] @ q[row, head] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[:, kv_head] / weights.sum()
    return out


def check_against_reference(case, *, interpret, tiles):
    clean, poisoned = make_inputs(case), make_inputs(case, is_poisoned=True)
    expected = paged_attention_reference(*clean, LAYER)
    for one in tiles:
        found = paged_attention(*poisoned, LAYER, tiles=one, interpret=interpret)
        assert found.dtype == clean.q.dtype
        assert relative_error(found, expected) < TOLERANCES[case.dtype], one.label


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_kernel_gives_the_reference_result_over_poisoned_memory(case):
    # Tiles of 16 tokens where blocks are as small, the heuristic's elsewhere.
    tiles = SMALL_TILES if case.block_size == 16 else heuristic(head_dim=case.head_dim, dtype=case.dtype)
    check_against_reference(case, interpret=True, tiles=(tiles,))


def dequantized(inputs, scales):
    k, v = (getattr(inputs, name).astype(jnp.float32) * scales[f"{name}_scale"][..., None] for name in ("k", "v"))
    return inputs._replace(k=k, v=v)


def check_int8_against_reference(case, *, interpret, tiles):
    clean, scales = quantize_cache(make_inputs(case))
    poisoned, poisoned_scales = quantize_cache(make_inputs(case, is_poisoned=True))
    expected = paged_attention_reference(*clean, LAYER, **scales)
    assert expected.dtype == clean.q.dtype and clean.k.dtype == jnp.int8
    assert relative_error(expected, exact_attention(dequantized(clean, scales), LAYER)) < TOLERANCES[case.dtype]
    for one in tiles:
        found = paged_attention(*poisoned, LAYER, **poisoned_scales, tiles=one, interpret=interpret)
        assert relative_error(found, expected) < TOLERANCES[case.dtype], one.label


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_kernel_multiplies_int8_keys_and_values_by_their_scales_over_poisoned_memory(case):
    tiles = SMALL_TILES if case.block_size == 16 else heuristic(head_dim=case.head_dim, dtype=case.dtype)
    check_int8_against_reference(case, interpret=True, tiles=(tiles,))


@pytest.mark.gpu
@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_kernel_takes_an_int8_cache_at_real_sizes(case):
    check_int8_against_reference(case, interpret=False, tiles=(heuristic(head_dim=case.head_dim, dtype=case.dtype),))


@pytest.mark.gpu
@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_kernel_gives_the_reference_result_at_real_sizes(case):
    tiles = (
        candidates()
        if case.dtype == "bfloat16" and case.head_dim == 64
        else (heuristic(head_dim=128, dtype=case.dtype),)
    )
    check_against_reference(case, interpret=False, tiles=tiles)


@pytest.mark.parametrize("case", small_cases()[:3], ids=lambda case: case.name)
def test_reference_is_softmax_attention(case):
    inputs = make_inputs(case)
    assert relative_error(paged_attention_reference(*inputs, LAYER), exact_attention(inputs, LAYER)) < 1e-6


@pytest.mark.parametrize("case", small_cases()[:3], ids=lambda case: case.name)
def test_reference_weighs_padding_and_tails_exactly_zero(case):
    clean = paged_attention_reference(*make_inputs(case), LAYER)
    poisoned = paged_attention_reference(*make_inputs(case, is_poisoned=True), LAYER)
    np.testing.assert_array_equal(clean, poisoned)


@pytest.mark.parametrize("is_kernel", [False, True])
def test_a_row_has_the_same_bits_alone_and_in_a_wide_batch(is_kernel):
    inputs = make_inputs(
        Case(name="mates", context_lens=(130, 5, 97), num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
    )

    def attend(rows, width):
        tables = jnp.pad(inputs.block_tables, ((0, 0), (0, width - inputs.block_tables.shape[1])))[rows]
        arguments = (inputs.q[rows], inputs.k, inputs.v, tables, inputs.context_lens[rows], LAYER)
        if not is_kernel:
            return paged_attention_reference(*arguments)
        return paged_attention(*arguments, tiles=SMALL_TILES, interpret=True)

    together = np.asarray(attend(slice(0, 3), 40))
    for row in range(3):
        np.testing.assert_array_equal(together[row], np.asarray(attend(slice(row, row + 1), 11))[0])


def test_a_row_without_context_gives_zeros():
    inputs = make_inputs(small_cases()[1])
    assert inputs.context_lens[0] == 0
    assert not np.any(paged_attention_reference(*inputs, LAYER)[0])
    assert not np.any(paged_attention(*inputs, LAYER, tiles=SMALL_TILES, interpret=True)[0])


def test_the_layer_may_be_traced():
    inputs = make_inputs(small_cases()[0])

    def attend(layer):
        return paged_attention(*inputs, layer, tiles=SMALL_TILES, interpret=True)

    traced = jax.jit(attend)
    first, second = traced(jnp.int32(0)), traced(jnp.int32(1))
    assert relative_error(first, exact_attention(inputs, 0)) < 1e-5
    assert relative_error(second, exact_attention(inputs, 1)) < 1e-5


@pytest.mark.parametrize(
    ("device", "tiles"),
    [("NVIDIA H200", tiles) for tiles in candidates()] + [("NVIDIA A100", tiles) for tiles in candidates()[:3]],
    ids=lambda value: getattr(value, "label", value),
)
def test_every_candidate_lowers_for_cuda(tiles, device):
    is_new = device == "NVIDIA H200"
    head_dim, num_heads, num_kv_heads, dtype = (64, 32, 8, jnp.bfloat16) if is_new else (128, 9, 3, jnp.float32)
    cache = jax.ShapeDtypeStruct((16, 512, num_kv_heads, 64, head_dim), dtype)
    arguments = (
        jax.ShapeDtypeStruct((8, num_heads, head_dim), dtype),
        *(cache, cache),
        jax.ShapeDtypeStruct((8, 32), jnp.int32),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    text = lower_for_cuda(lambda *a: paged_attention(*a, 3, tiles=tiles), *arguments, device=device)
    assert text is None or text.count("xla.gpu.triton") == 2, "attention and combine"


@pytest.mark.parametrize(
    ("device", "dtype", "tiles"),
    [("NVIDIA H200", "bfloat16", tiles) for tiles in candidates()]
    + [("NVIDIA H200", "float32", heuristic(head_dim=64, dtype="float32"))]
    + [("NVIDIA A100", "float16", heuristic(head_dim=64, dtype="float16"))],
    ids=lambda value: getattr(value, "label", value),
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_every_candidate_lowers_for_cuda_with_an_int8_cache(device, dtype, tiles, block_size):
    cache = jax.ShapeDtypeStruct((16, 512, 8, block_size, 64), jnp.int8)
    scale = jax.ShapeDtypeStruct(cache.shape[:-1], jnp.float32)
    arguments = (
        jax.ShapeDtypeStruct((8, 32, 64), dtype),
        *(cache, cache),
        jax.ShapeDtypeStruct((8, 32), jnp.int32),
        jax.ShapeDtypeStruct((8,), jnp.int32),
        *(scale, scale),
    )

    def attend(q, k, v, tables, lens, k_scale, v_scale):
        return paged_attention(q, k, v, tables, lens, 3, k_scale=k_scale, v_scale=v_scale, tiles=tiles)

    text = lower_for_cuda(attend, *arguments, device=device)
    assert text is None or text.count("xla.gpu.triton") >= 1


def test_scales_belong_to_an_int8_cache():
    inputs = make_inputs(small_cases()[0])
    int8, scales = quantize_cache(inputs)
    with pytest.raises(ValueError, match=r"int8 k and v need k_scale \[L N K S\] = .*, got None"):
        paged_attention(*int8, LAYER)
    with pytest.raises(ValueError, match=r"int8 k and v need v_scale .*, got \(1, "):
        paged_attention(*int8, LAYER, **(scales | {"v_scale": scales["v_scale"][:1]}))
    with pytest.raises(ValueError, match="belong to int8 k and v, got float32"):
        paged_attention(*inputs, LAYER, **scales)


def test_wrong_shapes_and_dtypes_are_named():
    inputs = make_inputs(small_cases()[0])
    with pytest.raises(ValueError, match=r"head_dim must be equal, H a multiple of K"):
        paged_attention(inputs.q[:, :1], *inputs[1:], LAYER)
    with pytest.raises(ValueError, match="must have one dtype, or int8 k and v, got bfloat16"):
        paged_attention(inputs.q.astype(jnp.bfloat16), *inputs[1:], LAYER)
    with pytest.raises(ValueError, match="with B = 4, got"):
        paged_attention(*inputs[:3], inputs.block_tables[:2], inputs.context_lens, LAYER)
    with pytest.raises(ValueError, match="must be int32, got int32 and float32"):
        paged_attention(*inputs[:4], inputs.context_lens.astype(jnp.float32), LAYER)


def test_an_unsupported_head_dim_is_refused_and_the_reference_takes_it():
    case = dataclasses.replace(small_cases()[0], head_dim=24)
    inputs = make_inputs(case)
    with pytest.raises(KernelUnsupportedError, match="power-of-two head_dim of at least 16, got 24"):
        paged_attention(*inputs, LAYER, interpret=True)
    assert relative_error(paged_attention_reference(*inputs, LAYER), exact_attention(inputs, LAYER)) < 1e-6


def test_tiles_are_checked():
    with pytest.raises(ValueError, match="tile_tokens must be at least 16, got 8"):
        TileConfig(tile_tokens=8)
    with pytest.raises(ValueError, match="split_tokens must be a multiple of tile_tokens, got 64 and 128"):
        TileConfig(split_tokens=64, tile_tokens=128)
