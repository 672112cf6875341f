"""Decode attention that appends: the kernel against its reference, the reference against a float64 formula."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import (
    KernelUnsupportedError,
    append_attention,
    append_attention_reference,
    paged_attention_reference,
    rope_append_reference,
)
from pallas_kernels.paged_attention.cases import (
    Case,
    Inputs,
    make_append_inputs,
    make_inputs,
    make_norms,
    quantize_cache,
    real_cases,
    small_cases,
)
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


def make_pair(case, *, is_int8=False, **options):
    """Returns the inputs over clean and over poisoned memory, each with its keyword arguments."""
    pair = [(make_append_inputs(case, is_poisoned=is_poisoned, **options), {}) for is_poisoned in (False, True)]
    if is_int8:
        pair = [quantize_cache(inputs) for inputs, _ in pair]
    return [(inputs, {"dtype": jnp.dtype(case.dtype), **scales}) for inputs, scales in pair]


def check_against_reference(case, *, interpret, tiles, has_norms=False, **options):
    (clean, arguments), (poisoned, poisoned_arguments) = make_pair(case, **options)
    norms = make_norms(case.head_dim) if has_norms else {}
    expected, *expected_cache = append_attention_reference(*clean, LAYER, **arguments, **norms)
    for one in tiles:
        found, *cache = append_attention(
            *poisoned, LAYER, **poisoned_arguments, **norms, tiles=one, interpret=interpret
        )
        assert found.dtype == jnp.dtype(case.dtype)
        assert relative_error(found, expected) < TOLERANCES[case.dtype], one.label
        check_cache(cache, expected_cache, [*poisoned[3:5], *scales_of(poisoned_arguments)], clean.slots)


def scales_of(arguments):
    return [arguments[name] for name in ("k_scale", "v_scale") if name in arguments]


def check_cache(found, expected, before, slots):
    """The slots of one layer hold the new tokens, to the last step of the cache's dtype, and all else what it held."""
    for index, (new, exact, old) in enumerate(zip(found, expected, before, strict=True)):
        block_size = old.shape[3]
        place = (LAYER, slots // block_size, slice(None), slots % block_size)
        bits, kept = (np.asarray(x).view(np.uint8) for x in (new, old.at[place].set(new[place])))  # NaNs too
        np.testing.assert_array_equal(bits, kept)
        one, other = (np.asarray(x[place].astype(jnp.float32)) for x in (new, exact))
        if index == 1:
            np.testing.assert_array_equal(one, other, err_msg="values are not turned")
        step = {jnp.int8: {"atol": 1.0}, jnp.float32: {"rtol": 1e-5, "atol": 1e-5}}
        np.testing.assert_allclose(one, other, **step.get(old.dtype.type, {"rtol": 2.0**-7, "atol": 1e-5}))


def tiles_of(case):
    """Tiles of 16 tokens where blocks are as small, the heuristic's elsewhere."""
    return SMALL_TILES if case.block_size == 16 else heuristic(head_dim=case.head_dim, dtype=case.dtype)


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_kernel_gives_the_reference_result_over_poisoned_memory(case, is_int8):
    check_against_reference(case, interpret=True, tiles=(tiles_of(case),), is_int8=is_int8)


@pytest.mark.parametrize(("is_int8", "num_parts"), [(False, 2), (True, 8)])
@pytest.mark.parametrize("case", [small_cases()[1], small_cases()[-1]], ids=lambda case: case.name)
def test_kernel_adds_parts_and_norms_queries_and_keys(case, is_int8, num_parts):
    check_against_reference(
        case, interpret=True, tiles=(tiles_of(case),), is_int8=is_int8, num_parts=num_parts, has_norms=True
    )


@pytest.mark.gpu
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_kernel_gives_the_reference_result_at_real_sizes(case, is_int8):
    is_tuned = case.dtype == "bfloat16" and case.head_dim == 64 and not is_int8
    tiles = candidates() if is_tuned else (heuristic(head_dim=case.head_dim, dtype=case.dtype),)
    check_against_reference(case, interpret=False, tiles=tiles, is_int8=is_int8)


@pytest.mark.gpu
@pytest.mark.parametrize("num_parts", [4, 8])
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("name", ["llama_1b_bf16", "qwen_8b_bf16"])
def test_kernel_adds_parts_and_norms_queries_and_keys_at_real_sizes(name, is_int8, num_parts):
    (case,) = (case for case in real_cases() if case.name == name)
    tiles = (heuristic(head_dim=case.head_dim, dtype=case.dtype),)
    check_against_reference(case, interpret=False, tiles=tiles, is_int8=is_int8, num_parts=num_parts, has_norms=True)


def test_queries_keys_and_values_are_those_of_rope_append():
    """A row's first token is all that it sees, so its value comes back; the second one tells keys and queries."""
    case = Case(name="first", context_lens=(1, 2), num_heads=6, num_kv_heads=2, head_dim=64, block_size=16)
    inputs = make_append_inputs(case, num_parts=3)
    norms = make_norms(64)
    out, *_ = append_attention(*inputs, LAYER, **norms, tiles=SMALL_TILES, interpret=True)
    q, *cache = rope_append_reference(*inputs[:6], LAYER, **norms)
    values = inputs.qkv.sum(axis=0).reshape(2, 2, 5, 64)[0, :, 4]
    np.testing.assert_allclose(out[0].reshape(2, 3, 64), np.repeat(values[:, None], 3, axis=1), rtol=1e-5, atol=1e-6)
    exact = exact_attention(Inputs(q, *cache, inputs.block_tables, inputs.positions + 1), LAYER)
    assert relative_error(out, exact) < 1e-5


def dequantized(inputs, scales):
    k, v = (getattr(inputs, name).astype(jnp.float32) * scales[f"{name}_scale"][..., None] for name in ("k", "v"))
    return inputs._replace(k=k, v=v)


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_reference_multiplies_int8_keys_and_values_by_their_scales(case):
    inputs, scales = quantize_cache(make_inputs(case))
    found = paged_attention_reference(*inputs, LAYER, **scales)
    assert found.dtype == inputs.q.dtype and inputs.k.dtype == jnp.int8
    assert relative_error(found, exact_attention(dequantized(inputs, scales), LAYER)) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", small_cases()[:3], ids=lambda case: case.name)
def test_reference_is_softmax_attention(case):
    inputs = make_inputs(case)
    assert relative_error(paged_attention_reference(*inputs, LAYER), exact_attention(inputs, LAYER)) < 1e-6


@pytest.mark.parametrize("case", small_cases()[:3], ids=lambda case: case.name)
def test_reference_weighs_padding_and_tails_exactly_zero(case):
    clean = paged_attention_reference(*make_inputs(case), LAYER)
    poisoned = paged_attention_reference(*make_inputs(case, is_poisoned=True), LAYER)
    np.testing.assert_array_equal(clean, poisoned)


@pytest.mark.parametrize("is_int8", [False, True])
def test_a_row_has_the_same_bits_alone_and_in_a_wide_batch_and_whatever_its_slot_held(is_int8):
    case = Case(name="mates", context_lens=(130, 5, 97), num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
    (clean, arguments), (poisoned, poisoned_arguments) = make_pair(case, is_int8=is_int8, num_parts=2)

    def attend(inputs, arguments, rows, width):
        tables = jnp.pad(inputs.block_tables, ((0, 0), (0, width - inputs.block_tables.shape[1])))
        new = (inputs.qkv[:, rows], inputs.cos[rows], inputs.sin[rows], inputs.k, inputs.v, inputs.slots[rows])
        where = (tables[rows], inputs.positions[rows], LAYER)
        return np.asarray(append_attention(*new, *where, **arguments, tiles=SMALL_TILES, interpret=True)[0])

    together = attend(clean, arguments, slice(0, 3), 40)
    for row in range(3):
        alone = attend(poisoned, poisoned_arguments, slice(row, row + 1), 11)
        np.testing.assert_array_equal(together[row], alone[0])
    np.testing.assert_array_equal(together[1], attend(clean, arguments, slice(1, 2), 10)[0])


def test_a_row_without_context_gives_zeros():
    inputs = make_inputs(small_cases()[1])
    assert inputs.context_lens[0] == 0
    assert not np.any(paged_attention_reference(*inputs, LAYER)[0])


def test_rows_that_are_padding_write_to_the_null_block_alone():
    """A padding row reads no table; nor does one that has stopped write where its table says."""
    case = Case(name="padding", context_lens=(20, 0, 33, 0), num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
    inputs = make_append_inputs(case)
    inputs = inputs._replace(slots=inputs.slots.at[2].set(0))  # it has stopped
    assert inputs.slots.tolist()[1:] == [0, 0, 0] and inputs.positions.tolist() == [19, 0, 32, 0]
    out, *cache = append_attention(*inputs, LAYER, tiles=SMALL_TILES, interpret=True)
    assert np.isfinite(out).all()
    for new, old in zip(cache, inputs[3:5], strict=True):
        changed = np.argwhere(np.any(np.asarray(new != old), axis=(2, 4))).tolist()
        assert changed == sorted([[LAYER, 0, 0], [LAYER, int(inputs.slots[0]) // 16, 3]])
    alone = append_attention_reference(
        inputs.qkv[:, :1], *(each[:1] for each in inputs[1:3]), *inputs[3:5], *(each[:1] for each in inputs[5:]), LAYER
    )
    assert relative_error(out[:1], alone[0]) < 1e-5


def test_the_layer_may_be_traced():
    inputs = make_append_inputs(small_cases()[0])
    traced = jax.jit(lambda layer: append_attention(*inputs, layer, tiles=SMALL_TILES, interpret=True)[0])
    for layer in (0, 1):
        assert relative_error(traced(jnp.int32(layer)), append_attention_reference(*inputs, layer)[0]) < 1e-5


def abstract_inputs(*, num_heads, num_kv_heads, head_dim, dtype, block_size=64, num_parts=4, is_int8=False):
    """Returns shapes of a call of eight rows, and of its keyword arguments."""
    shape, i32 = jax.ShapeDtypeStruct, jnp.int32
    cache = shape((16, 512, num_kv_heads, block_size, head_dim), jnp.int8 if is_int8 else dtype)
    scale = shape(cache.shape[:-1], jnp.float32)
    qkv = shape((num_parts, 8, (num_heads + 2 * num_kv_heads) * head_dim), jnp.float32)
    angles = shape((8, head_dim // 2), jnp.float32)
    arguments = (qkv, angles, angles, cache, cache, shape((8,), i32), shape((8, 32), i32), shape((8,), i32))
    return arguments, {"k_scale": scale, "v_scale": scale} if is_int8 else {}


def lowered(arguments, options, *, device, dtype, tiles):
    def call(arguments, options):
        return append_attention(*arguments, 3, **options, dtype=jnp.dtype(dtype), tiles=tiles)

    return lower_for_cuda(call, arguments, options, device=device)


@pytest.mark.lowers
@pytest.mark.parametrize(
    ("device", "tiles"),
    [("NVIDIA H200", tiles) for tiles in candidates()] + [("NVIDIA A100", tiles) for tiles in candidates()[:3]],
    ids=lambda value: getattr(value, "label", value),
)
def test_every_candidate_lowers_for_cuda(tiles, device):
    is_new = device == "NVIDIA H200"
    head_dim, num_heads, num_kv_heads, dtype = (64, 32, 8, jnp.bfloat16) if is_new else (128, 9, 3, jnp.float32)
    arguments, options = abstract_inputs(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    norm = jax.ShapeDtypeStruct((head_dim,), jnp.bfloat16)
    options |= {} if is_new else {"q_norm": norm, "k_norm": norm}
    text = lowered(arguments, options, device=device, dtype=dtype, tiles=tiles)
    assert text.count("xla.gpu.triton") == 2, "attention and combine"


@pytest.mark.lowers
@pytest.mark.parametrize(
    ("device", "dtype", "tiles"),
    [("NVIDIA H200", "bfloat16", tiles) for tiles in candidates()]
    + [("NVIDIA H200", "float32", heuristic(head_dim=64, dtype="float32"))]
    + [("NVIDIA A100", "float16", heuristic(head_dim=64, dtype="float16"))],
    ids=lambda value: getattr(value, "label", value),
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_every_candidate_lowers_for_cuda_with_an_int8_cache(device, dtype, tiles, block_size):
    arguments, options = abstract_inputs(
        num_heads=32, num_kv_heads=8, head_dim=64, dtype=dtype, block_size=block_size, num_parts=8, is_int8=True
    )
    text = lowered(arguments, options, device=device, dtype=dtype, tiles=tiles)
    assert text.count("xla.gpu.triton") >= 1


def test_wrong_shapes_and_dtypes_are_named():
    inputs = make_append_inputs(small_cases()[0])
    with pytest.raises(ValueError, match=r"qkv .* don't fit a cache"):
        append_attention(inputs.qkv[..., :100], *inputs[1:], LAYER)
    with pytest.raises(ValueError, match="an int8 cache needs k_scale, v_scale and a dtype for q"):
        append_attention(*quantize_cache(inputs)[0], LAYER)
    int8, scales = quantize_cache(inputs)
    scales |= {"v_scale": scales["v_scale"][:1], "dtype": jnp.dtype(jnp.float32)}
    with pytest.raises(ValueError, match=r"int8 k and v need v_scale .*, got \(1, "):
        append_attention(*int8, LAYER, **scales)
    with pytest.raises(ValueError, match="must have one dtype, or int8 k and v, got bfloat16"):
        append_attention(*inputs, LAYER, dtype=jnp.dtype(jnp.bfloat16))
    with pytest.raises(ValueError, match="with B = 4, got"):
        append_attention(*inputs[:6], inputs.block_tables[:2], inputs.positions, LAYER)
    with pytest.raises(ValueError, match="must be int32, got int32 and float32"):
        append_attention(*inputs[:7], inputs.positions.astype(jnp.float32), LAYER)


def test_an_unsupported_head_dim_is_refused_and_the_reference_takes_it():
    case = dataclasses.replace(small_cases()[0], head_dim=24)
    with pytest.raises(KernelUnsupportedError, match="power-of-two head_dim of at least 16, got 24"):
        append_attention(*make_append_inputs(case), LAYER, interpret=True)
    inputs = make_inputs(case)
    assert relative_error(paged_attention_reference(*inputs, LAYER), exact_attention(inputs, LAYER)) < 1e-6


def test_tiles_are_checked():
    with pytest.raises(ValueError, match="tile_tokens must be at least 16, got 8"):
        TileConfig(tile_tokens=8)
    with pytest.raises(ValueError, match="split_tokens must be a multiple of tile_tokens, got 64 and 128"):
        TileConfig(split_tokens=64, tile_tokens=128)
