"""Two-limb int8 products: the split and the kernels against float64, and the bits of a row."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import KernelUnsupportedError
from pallas_kernels.int8_matmul.cases import Case, llama_1b_shapes, make_inputs
from pallas_kernels.int8_matmul.limbs import limb_matmul_reference, split_limbs_reference
from pallas_kernels.int8_matmul.limbs_triton import (
    LimbTiles,
    limb_matmul,
    rms_norm_limbs,
    silu_mul_limbs,
    split_limbs,
)

SMALL = LimbTiles(tile_m=8, tile_n=32, tile_k=128)
CASES = (
    (Case(name="one_row_g128", m=1, n=64, k=256), SMALL),
    (Case(name="ragged_g64", m=5, n=200, k=576, group_size=64), SMALL),
    (Case(name="splits_g128", m=8, n=96, k=1536), LimbTiles(tile_n=64, tile_k=256, k_splits=4)),
    (Case(name="short_group_g32", m=16, n=48, k=200, group_size=32), LimbTiles(tile_m=16, tile_n=16, tile_k=64)),
    (Case(name="short_group_g128", m=33, n=64, k=200, dtype="bfloat16"), LimbTiles(tile_m=32, k_splits=2)),
    (Case(name="rows_of_two_programs", m=128, n=64, k=256), LimbTiles(tile_m=64)),
)


def grouped(x, group_size):
    x = np.asarray(x)
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group_size)]).reshape(*x.shape[:-1], -1, group_size)


def values_of(limbs, scale, group_size):
    """Returns f64[M I]: what limbs stand for."""
    high, low = np.asarray(limbs).astype(np.float64)
    whole = grouped(256 * high + low, group_size) * np.asarray(scale, np.float64)[:, :, None]
    return whole.reshape(high.shape[0], -1)[:, : high.shape[1]]


def check_split(limbs, scale, expected, group_size, *, slack):
    """The scale is the largest value's share, and no value is further off than half a step and the slack of the values."""
    assert limbs.dtype == jnp.int8 and scale.dtype == jnp.float32
    largest = np.abs(grouped(expected, group_size)).max(axis=-1)
    np.testing.assert_allclose(scale, largest / 32512, rtol=1e-6 + slack)
    steps = np.repeat(np.asarray(scale, np.float64), group_size, axis=1)[:, : expected.shape[1]]
    off = np.abs(values_of(limbs, scale, group_size) - expected)
    assert (off <= steps * (0.51 + 32512 * slack)).all()
    assert np.asarray(limbs)[0].min() >= -127


def make_limbs(case):
    x, q, scale = make_inputs(case)
    return *split_limbs_reference(x, group_size=case.group_size), q, scale


def check_product(found, limbs, x_scale, q, scale, group_size):
    """Compares with float64 within the error of float32's sums."""
    x = values_of(limbs, x_scale, group_size)
    weights = grouped(q, group_size) * np.asarray(scale, np.float64)[:, :, None]
    weights = weights.reshape(q.shape[0], -1)[:, : x.shape[1]]
    bound = (2 * math.ceil(math.log2(x.shape[1])) + 8) * 2.0**-24 * (np.abs(x) @ np.abs(weights).T)
    assert found.dtype == jnp.float32
    assert (np.abs(np.asarray(found, np.float64) - x @ weights.T) <= bound).all()


@pytest.mark.parametrize(("m", "k", "group_size"), [(1, 1536, 128), (3, 200, 32), (5, 576, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_limbs_stand_for_the_values(m, k, group_size, dtype):
    x, *_ = make_inputs(Case(name="split", m=m, n=1, k=k, group_size=group_size, dtype=dtype))
    x = x.at[0, :group_size].set(0).at[0, -1].set(1e30).at[-1, group_size : 2 * group_size].multiply(1e-20)
    expected = np.asarray(x).astype(np.float64)
    check_split(*split_limbs_reference(x, group_size=group_size), expected, group_size, slack=0)
    found = split_limbs(x, group_size=group_size, interpret=True)
    check_split(*found, expected, group_size, slack=0)
    alone = split_limbs(x[-1:], group_size=group_size, interpret=True)
    np.testing.assert_array_equal(alone[0][:, 0], found[0][:, -1])
    np.testing.assert_array_equal(alone[1][0], found[1][-1])


def test_values_too_small_for_a_scale_are_zeros_and_what_is_not_finite_stays_so():
    x = jnp.full((3, 64), 1e-38).at[1, 5].set(jnp.nan).at[2, 40].set(-jnp.inf)
    q, weight_scale = jnp.ones((16, 64), jnp.int8), jnp.ones((16, 2))
    for limbs, scale in (split_limbs_reference(x, group_size=32), split_limbs(x, group_size=32, interpret=True)):
        np.testing.assert_array_equal(np.asarray(scale)[0], 0.0)
        np.testing.assert_array_equal(np.asarray(limbs)[:, 0], 0)
        product = limb_matmul(
            limbs, scale, q, weight_scale, group_size=32, tiles=LimbTiles(tile_n=16, tile_k=32), interpret=True
        )
        assert np.isfinite(product[0, 0]).all() and not np.isfinite(product[0, 1:]).any()


@pytest.mark.parametrize(("case", "tiles"), CASES, ids=lambda one: getattr(one, "name", None))
def test_the_product_is_exact_up_to_float32_sums_and_a_row_has_bits_of_its_own(case, tiles):
    arrays = make_limbs(case)
    check_product(limb_matmul_reference(*arrays, group_size=case.group_size), *arrays, case.group_size)
    options = {"group_size": case.group_size, "tiles": tiles, "interpret": True}
    parts = limb_matmul(*arrays, **options)
    assert parts.shape == (tiles.k_splits, case.m, case.n)
    check_product(parts.sum(axis=0), *arrays, case.group_size)
    np.testing.assert_array_equal(limb_matmul(*arrays, **options), parts)
    limbs, x_scale, *weights = arrays
    for row in {0, case.m // 2, case.m - 1} if case.m > 1 else ():
        mates = jnp.full_like(x_scale, jnp.nan).at[row].set(x_scale[row])
        alone = limb_matmul(limbs[:, row : row + 1], x_scale[row : row + 1], *weights, **options)
        np.testing.assert_array_equal(alone[:, 0], parts[:, row])
        np.testing.assert_array_equal(limb_matmul(limbs, mates, *weights, **options)[:, row], parts[:, row])


@pytest.mark.parametrize(("size", "group_size"), [(256, 128), (200, 32), (576, 64)])
def test_a_norm_gives_limbs(size, group_size):
    rng = np.random.default_rng(size)
    x, weight = rng.standard_normal((3, size)), rng.standard_normal(size)
    x, weight = jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.bfloat16)
    options = {"eps": 1e-5, "group_size": group_size, "interpret": True}
    found = rms_norm_limbs(x, weight, **options)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * np.asarray(weight, np.float64)
    check_split(*found, exact, group_size, slack=1e-6)
    for whole, alone in zip(found, rms_norm_limbs(x[1:2], weight, **options), strict=True):
        np.testing.assert_array_equal(whole.reshape(-1, 3, whole.shape[-1])[:, 1:2], alone.reshape(-1, 1, whole.shape[-1]))


@pytest.mark.parametrize(("num_parts", "size", "group_size"), [(0, 256, 128), (2, 200, 32)])
def test_a_gate_gives_limbs(num_parts, size, group_size):
    rng = np.random.default_rng(size)
    parts = jnp.asarray(rng.standard_normal((num_parts or 1, 3, 2 * size)), jnp.float32)
    given = parts if num_parts else parts[0]
    found = silu_mul_limbs(given, group_size=group_size, interpret=True)
    gate, up = np.split(np.asarray(parts, np.float64).sum(axis=0), 2, axis=1)
    check_split(*found, gate / (1 + np.exp(-gate)) * up, group_size, slack=2e-6)
    alone = silu_mul_limbs(given[..., 1:2, :], group_size=group_size, interpret=True)
    np.testing.assert_array_equal(found[0][:, 1:2], alone[0])
    np.testing.assert_array_equal(found[1][1:2], alone[1])


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100"])
@pytest.mark.parametrize(("shape", "m", "group_size"), [("qkv", 1, 128), ("down", 64, 32)])
def test_the_kernels_lower_for_cuda(shape, m, group_size, device):
    n, k = llama_1b_shapes()[shape]
    tiles = LimbTiles(tile_m=min(64, max(8, m)), k_splits=4)

    def product(x, norm, q, scale):
        limbs, x_scale = split_limbs(x, group_size=group_size)
        parts = limb_matmul(limbs, x_scale, q, scale, group_size=group_size, tiles=tiles)
        gated = silu_mul_limbs(parts, group_size=group_size)
        return gated, rms_norm_limbs(x, norm, eps=1e-5, group_size=group_size)

    arguments = ((m, k), jnp.bfloat16), ((k,), jnp.bfloat16), ((n, k), jnp.int8), ((n, k // group_size), jnp.float32)
    text = lower_for_cuda(product, *(jax.ShapeDtypeStruct(*one) for one in arguments), device=device)
    assert text is None or text.count("xla.gpu.triton") == 4


def test_what_does_not_fit_is_named():
    limbs, x_scale, q, scale = make_limbs(CASES[0][0])
    with pytest.raises(ValueError, match=r"weights \[O I\] and scales \[O 2\], got .*\(64, 128\) and \(64, 2\)"):
        limb_matmul(limbs, x_scale, q[:, :128], scale, group_size=128, tiles=SMALL)
    with pytest.raises(KernelUnsupportedError, match="tile_k must be a multiple of group_size 128, got 64"):
        limb_matmul(limbs, x_scale, q, scale, group_size=128, tiles=LimbTiles(tile_k=64))
    with pytest.raises(KernelUnsupportedError, match="a power-of-two group_size from 32 to 512, got 48"):
        split_limbs(jnp.ones((1, 96)), group_size=48)
    with pytest.raises(ValueError, match=r"expected x \[M D\] and weight \[D\], got \(1, 64\) and \(32,\)"):
        rms_norm_limbs(jnp.ones((1, 64)), jnp.ones(32), eps=1e-5, group_size=32)
    with pytest.raises(ValueError, match=r"expected \[S M 2F\] or \[M 2F\], got \(1, 63\)"):
        silu_mul_limbs(jnp.ones((1, 63)), group_size=32)
    with pytest.raises(ValueError, match="tile_n must be a power of two of at least 16, got 24"):
        LimbTiles(tile_n=24)
