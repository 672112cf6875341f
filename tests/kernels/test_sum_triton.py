"""The products of int8 weights with few 16-bit rows: whole numbers of two bytes, and exact sums of their products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import KernelUnsupportedError, int8_matmul
from pallas_kernels.int8_matmul import fused_matmul
from pallas_kernels.int8_matmul.cases import Case, make_inputs
from pallas_kernels.int8_matmul.sum_triton import split_vectors, vector_sums
from pallas_kernels.int8_matmul.tiles import TileConfig

STORED = 0x4B400000  # what split_vectors adds to its whole numbers


def split(x):
    """Whole numbers and scales of [I] in vectors of 16, as float64."""
    whole, scale = split_vectors(jnp.asarray(x, jnp.float32).reshape(-1, 1, 16))
    return np.asarray(whole - STORED).astype(np.float64), np.asarray(scale).astype(np.float64)[..., None]


@pytest.mark.parametrize(("dtype", "reach"), [(jnp.bfloat16, 128), (jnp.float16, 16)])
def test_whole_numbers_hold_16_bit_activations_exactly_down_to_a_part_of_the_largest(dtype, reach):
    sizes = 2.0 ** np.random.default_rng(0).uniform(-6, 6, (64, 1))
    x = np.asarray(jnp.asarray(np.random.default_rng(1).standard_normal((64, 16)) * sizes, dtype)).astype(np.float64)
    whole, scale = split(x)
    assert np.abs(whole).max() < 2**15 and np.abs(whole).max(axis=2).min() >= 2**14
    error = np.abs(x.reshape(whole.shape) - whole * scale)
    is_large = np.abs(x) >= np.abs(x).max(axis=1, keepdims=True) / reach
    assert is_large.mean() > 0.8 and np.all(error.reshape(x.shape)[is_large] == 0)
    assert np.all(error <= scale / 2)


def test_zeros_and_tiny_numbers_are_split_too_and_what_is_not_finite_stays_so():
    x = np.zeros((4, 16), np.float32)
    x[1], x[2, 3], x[3, 5] = 1e-37, np.nan, -np.inf
    whole, scale = split(x)
    assert np.all(whole[0] == 0) and np.all(np.abs(whole[:2] * scale[:2] - x[:2, None]) <= scale[:2] / 2)
    assert np.all(~np.isfinite(scale[2:]))
    for bad in (np.nan, np.inf):
        rows, weight, scale = make_inputs(Case(name="bad", m=1, n=4, k=128, dtype="bfloat16"))
        tiles = TileConfig(method="sum", tile_n=4, tile_k=128, vector=16, num_warps=1)
        out = int8_matmul(rows.at[0, 7].set(bad), weight, scale, group_size=128, tiles=tiles, interpret=True)
        assert not np.any(np.isfinite(np.asarray(out).astype(np.float32)))


def sum_forms(vector, *, has_dp4a, interpret):
    """Sums of products of one tile in one form, and those that whole numbers of NumPy give."""
    rng = np.random.default_rng(vector)
    weights = rng.integers(-128, 128, (8, 4, vector)).astype(np.int8)
    weights[0] = -128
    x = rng.standard_normal((8, 4, vector)).astype(np.float32)
    x[0] = 255.0  # the largest sums there are
    x = np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(np.float32)

    def kernel(w_ref, x_ref, out_ref):
        whole, _ = split_vectors(x_ref[...])
        out_ref[...] = vector_sums(w_ref[...], whole, has_dp4a=has_dp4a)

    found = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 4), jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
    )(jnp.asarray(weights), jnp.asarray(x))
    whole = np.asarray(split_vectors(jnp.asarray(x))[0]).astype(np.int64) - STORED
    return np.asarray(found), (whole * weights).sum(axis=2)


@pytest.mark.parametrize("vector", [4, 8, 16])
def test_sums_over_a_vector_are_exact(vector):
    np.testing.assert_array_equal(*sum_forms(vector, has_dp4a=False, interpret=True))


def compare_forms(vector):
    """On a GPU: dp4a's sums, the plain ones, and NumPy's have the same bits."""
    for has_dp4a in (True, False):
        np.testing.assert_array_equal(*sum_forms(vector, has_dp4a=has_dp4a, interpret=False))


@pytest.mark.gpu
@pytest.mark.parametrize("vector", [4, 8, 16])
def test_dp4a_gives_the_bits_of_plain_products(vector):
    compare_forms(vector)


def exact_and_bound(x, weight, scale, group_size):
    """The product in float64 and the largest error that sums in float32, the split and the last rounding explain."""
    x, weight = np.asarray(x).astype(np.float64), np.asarray(weight).astype(np.float64)
    weight = weight * np.repeat(np.asarray(scale).astype(np.float64), group_size, axis=1)[:, : weight.shape[1]]
    exact, size = x @ weight.T, np.abs(x) @ np.abs(weight).T
    whole, unit = split(x)
    lost = np.abs(whole * unit - x.reshape(whole.shape)).reshape(x.shape) @ np.abs(weight).T
    rounding = (2 * np.ceil(np.log2(x.shape[1])) + 8) * 2.0**-24 * size
    return exact, rounding + lost + np.abs(exact) * 2.0**-23


CASES = (
    (
        Case(name="g128", m=1, n=6, k=512, dtype="float16"),
        TileConfig(method="sum", tile_n=4, tile_k=256, vector=16, num_warps=1),
    ),
    (
        Case(name="g64_two_rows_in_splits", m=2, n=7, k=512, group_size=64, dtype="bfloat16"),
        TileConfig(method="sum", tile_n=2, tile_k=128, k_splits=2, vector=8, num_warps=1),
    ),
    (
        Case(name="odd_576_g32", m=1, n=5, k=576, group_size=32, dtype="bfloat16"),
        TileConfig(method="sum", tile_n=2, tile_k=512, vector=16),
    ),
    (
        Case(name="short_group_in_a_loop", m=1, n=4, k=1216, dtype="bfloat16"),
        TileConfig(method="sum", tile_n=2, tile_k=128, vector=16, num_warps=1),
    ),
)


@pytest.mark.parametrize(("case", "tiles"), CASES, ids=[case.name for case, _ in CASES])
def test_errors_are_those_of_float32_sums(case, tiles):
    x, weight, scale = make_inputs(case)
    options = {"group_size": case.group_size, "tiles": tiles, "out_dtype": jnp.dtype("float32"), "interpret": True}
    exact, bound = exact_and_bound(x, weight, scale, case.group_size)
    assert np.all(np.abs(np.asarray(fused_matmul(x, weight, scale, **options)) - exact) <= bound)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_alone_and_with_mates():
    x, weight, scale = make_inputs(Case(name="mates", m=4, n=3072, k=2048, dtype="bfloat16"))
    tiles = TileConfig(method="sum", tile_n=4, tile_k=512, num_warps=1, vector=16)
    call = functools.partial(int8_matmul, group_size=128, tiles=tiles)
    together = call(x, weight, scale)
    for row in range(4):
        np.testing.assert_array_equal(call(x[row : row + 1], weight, scale)[0], together[row])


def test_vectors_too_short_for_four_products_are_refused():
    rows, weight, scale = make_inputs(Case(name="short", m=1, n=4, k=128, dtype="bfloat16"))
    for wrong, message in (({"vector": 2}, "got 2, and tile_k 128 for 1 warps"), ({"num_warps": 2}, "128 for 2 warps")):
        tiles = TileConfig(method="sum", tile_n=4, tile_k=128, **{"num_warps": 1} | wrong)
        with pytest.raises(KernelUnsupportedError, match=f"at least 4 int8 weights, .* {message}"):
            int8_matmul(rows, weight, scale, group_size=128, tiles=tiles, interpret=True)


@pytest.mark.lowers
@pytest.mark.parametrize("device", ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"])
@pytest.mark.parametrize(("k", "group_size"), [(2048, 128), (576, 32), (1536, 64)])
def test_gated_rows_lower_for_cuda(k, group_size, device):
    shapes = (
        jax.ShapeDtypeStruct((2, k), jnp.bfloat16),
        jax.ShapeDtypeStruct((3072, k), jnp.int8),
        jax.ShapeDtypeStruct((3072, k // group_size), jnp.float32),
    )
    tiles = TileConfig(method="sum", tile_n=4, tile_k=512, num_warps=1, vector=16)
    call = functools.partial(fused_matmul, group_size=group_size, is_gated=True, tiles=tiles)
    text = lower_for_cuda(call, *shapes, device=device)
    assert text.count("xla.gpu.triton") == 1
