"""The small-M matmuls: kernels against their references, references against a float64 formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import KernelUnsupportedError, add_parts, int8_matmul, int8_matmul_reference
from pallas_kernels.int8_matmul import (
    dense_matmul,
    dense_matmul_reference,
    fused_matmul,
    fused_matmul_reference,
    matmul_parts,
)
from pallas_kernels.int8_matmul.cases import Case, llama_1b_shapes, make_inputs, real_cases, small_cases
from pallas_kernels.int8_matmul.tiles import TileConfig, candidates, heuristic, row_bucket

TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-3}


def relative_error(found, expected):
    a, b = (np.asarray(x).astype(np.float64) for x in (found, expected))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def exact_product(x, weight, scale, group_size):
    x, weight = (np.asarray(a).astype(np.float64) for a in (x, weight))
    if scale is not None:
        weight = weight * np.repeat(np.asarray(scale).astype(np.float64), group_size, axis=1)[:, : weight.shape[1]]
    return x @ weight.T


def reference(case, x, weight, scale):
    if scale is None:
        return dense_matmul_reference(x, weight)
    return int8_matmul_reference(x, weight, scale, group_size=case.group_size)


def kernel(case, x, weight, scale, *, tiles, interpret):
    if scale is None:
        return dense_matmul(x, weight, tiles=tiles, interpret=interpret)
    return int8_matmul(x, weight, scale, group_size=case.group_size, tiles=tiles, interpret=interpret)


def check_against_reference(case, *, interpret, tiles):
    arrays = make_inputs(case)
    expected = reference(case, *arrays)
    for one in tiles:
        found = kernel(case, *arrays, tiles=one, interpret=interpret)
        assert found.dtype == expected.dtype and found.shape == (case.m, case.n)
        assert relative_error(found, expected) < TOLERANCES[case.dtype], one.label


def small_tiles(case):
    """The heuristic's; in float32 a dot with two splits, whose last may be ragged."""
    if case.dtype == "float32" and case.m > 1:
        return (TileConfig(method="dot", tile_n=32, tile_k=max(64, case.group_size), k_splits=2),)
    return (heuristic(m=case.m, n=case.n, k=case.k, group_size=case.group_size),)


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_kernel_gives_the_reference_result(case):
    check_against_reference(case, interpret=True, tiles=small_tiles(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_kernel_gives_the_reference_result_at_real_sizes(case):
    tiles = candidates(m=case.m, n=case.n, k=case.k, group_size=case.group_size)
    check_against_reference(case, interpret=False, tiles=tiles)


def test_sum_streams_ragged_inputs_in_splits_and_skips_missing_outputs():
    case = Case(name="ragged", m=2, n=30, k=576, group_size=32)
    tiles = TileConfig(method="sum", tile_n=4, tile_k=128, k_splits=2, num_warps=1)
    check_against_reference(case, interpret=True, tiles=(tiles,))


@pytest.mark.parametrize("case", small_cases()[:6], ids=lambda case: case.name)
def test_reference_is_the_product_with_dequantized_weights(case):
    arrays = make_inputs(case)
    found = reference(case, *arrays)
    assert relative_error(found, exact_product(*arrays, case.group_size)) < (1e-2 if case.dtype == "bfloat16" else 1e-6)


def test_a_row_of_the_reference_has_the_same_bits_alone_and_in_a_batch():
    x, weight, scale = make_inputs(Case(name="mates", m=19, n=48, k=256, group_size=64))
    together = np.asarray(int8_matmul_reference(x, weight, scale, group_size=64))
    for row in (0, 7, 8, 18):
        alone = np.asarray(int8_matmul_reference(x[row : row + 1], weight, scale, group_size=64))
        np.testing.assert_array_equal(together[row], alone[0])


def test_a_row_of_the_kernel_has_the_same_bits_for_fixed_tiles():
    case = Case(name="mates", m=19, n=48, k=256, group_size=64)
    x, weight, scale = make_inputs(case)
    tiles = TileConfig(method="dot", tile_n=16, tile_k=64, k_splits=2)
    together = np.asarray(kernel(case, x, weight, scale, tiles=tiles, interpret=True))
    for row in (0, 15, 16, 18):
        alone = np.asarray(kernel(case, x[row : row + 1], weight, scale, tiles=tiles, interpret=True))
        np.testing.assert_array_equal(together[row], alone[0])


@pytest.mark.lowers
@pytest.mark.parametrize("m", [1, 16, 128])
def test_every_candidate_lowers_for_cuda(m):
    n, k = llama_1b_shapes()["qkv"]
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    for group_size in (0, 32, 128):
        for tiles in candidates(m=m, n=n, k=k, group_size=group_size):
            if group_size:
                arguments = (
                    *(x, jax.ShapeDtypeStruct((n, k), jnp.int8)),
                    jax.ShapeDtypeStruct((n, k // group_size), jnp.float16),
                )
            else:
                arguments = x, jax.ShapeDtypeStruct((n, k), jnp.bfloat16)

            def call(x, *weights, group_size=group_size, tiles=tiles):
                if group_size:
                    return int8_matmul(x, *weights, group_size=group_size, tiles=tiles)
                return dense_matmul(x, *weights, tiles=tiles)

            text = lower_for_cuda(call, *arguments)
            assert text.count("xla.gpu.triton") == 1, tiles.label


@pytest.mark.lowers
@pytest.mark.parametrize(("n", "k"), [(192, 576), (49152, 576), (2048, 8192)])
@pytest.mark.parametrize("m", [1, 3, 17, 64, 128])
def test_the_heuristic_answers_for_every_shape(n, k, m):
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((n, -(-k // 32)), jnp.float16)
    text = lower_for_cuda(lambda *a: int8_matmul(*a, group_size=32), x, jax.ShapeDtypeStruct((n, k), jnp.int8), scale)
    assert "xla.gpu.triton" in text


def test_wrong_shapes_and_dtypes_are_named():
    x, weight, scale = make_inputs(small_cases()[0])
    with pytest.raises(ValueError, match=r"expected x \[M I\] and weights \[O I\], got \(1, 128\)"):
        int8_matmul(x[:, :128], weight, scale, group_size=128)
    with pytest.raises(ValueError, match="expected int8 weights with float16 or float32 scales, got float32"):
        int8_matmul(x, weight.astype(jnp.float32), scale, group_size=128)
    with pytest.raises(ValueError, match=r"with group_size 64 need scales \(64, 4\), got \(64, 2\)"):
        int8_matmul(x, weight, scale, group_size=64)
    with pytest.raises(ValueError, match="must have one dtype, got float32 and bfloat16"):
        dense_matmul(x, weight.astype(jnp.bfloat16))


def test_what_the_backend_cannot_do_is_refused():
    case = Case(name="odd_group", m=1, n=16, k=192, group_size=48)
    with pytest.raises(KernelUnsupportedError, match="power-of-two group_size of at least 16, got 48"):
        kernel(case, *make_inputs(case), tiles=None, interpret=True)
    case = Case(name="many_rows", m=32, n=16, k=128)
    tiles = TileConfig(method="sum", tile_n=4, tile_k=128)
    with pytest.raises(KernelUnsupportedError, match="at most 16 rows, got 32; use dot"):
        kernel(case, *make_inputs(case), tiles=tiles, interpret=True)


def test_tiles_are_checked():
    with pytest.raises(ValueError, match="tile_n must be a power of two, got 24"):
        TileConfig(method="dot", tile_n=24)
    with pytest.raises(ValueError, match="dot needs tiles of at least 16"):
        TileConfig(method="dot", tile_n=8)


def test_row_counts_share_a_bucket():
    assert [row_bucket(m) for m in (1, 2, 3, 8, 9, 128)] == [1, 2, 4, 8, 16, 128]


FUSED_TILES = (
    TileConfig(method="sum", tile_n=2, tile_k=256, num_warps=1, num_stages=2, vector=16),
    TileConfig(method="sum", tile_n=4, tile_k=128, num_warps=1, num_stages=2),
    TileConfig(method="dot", tile_n=16, tile_k=128, num_warps=2),
    TileConfig(method="swap", tile_n=32, tile_k=128),
    TileConfig(method="dot", tile_n=32, tile_k=128, k_splits=2),
)


@pytest.mark.parametrize("tiles", FUSED_TILES, ids=lambda tiles: tiles.label)
@pytest.mark.parametrize(("is_gated", "group_size"), [(True, 128), (False, 0)])
def test_the_gate_rides_with_the_product(tiles, is_gated, group_size):
    x, weight, scale = make_inputs(Case(name="fused", m=2, n=96, k=256, group_size=group_size))
    options = {"group_size": group_size, "is_gated": is_gated}
    expected = fused_matmul_reference(3 * x, weight, scale, **options)
    found = fused_matmul(3 * x, weight, scale, **options, tiles=tiles, interpret=True)
    assert relative_error(found, expected) < 1e-5
    assert found.shape == (2, 48 if is_gated else 96)


@pytest.mark.parametrize(
    "tiles",
    [TileConfig(method="sum", tile_n=4, tile_k=128, k_splits=2, num_warps=1), *FUSED_TILES[-2:]],
    ids=lambda tiles: tiles.label,
)
def test_parts_added_in_order_are_the_product_with_all_its_bits(tiles):
    x, weight, scale = make_inputs(Case(name="parts", m=2, n=96, k=256, group_size=128))
    options = {"group_size": 128, "tiles": tiles, "interpret": True}
    parts = matmul_parts(x, weight, scale, **options)
    assert parts.shape == (tiles.k_splits, 2, 96) and parts.dtype == jnp.float32
    np.testing.assert_array_equal(add_parts(parts), int8_matmul(x, weight, scale, **options))


def test_gated_weights_have_two_halves():
    x, weight, scale = make_inputs(small_cases()[0])
    with pytest.raises(ValueError, match="two equal halves of outputs, got 63 outputs"):
        fused_matmul(x, weight[:63], scale[:63], group_size=128, is_gated=True)
