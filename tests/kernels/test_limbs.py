"""Rows in two int8 limbs: the split, the kernels that make them and those that multiply them, against float64."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import (
    KernelUnsupportedError,
    LimbRows,
    limb_matmul_parts,
    limb_matmul_reference,
    rms_norm,
    silu_mul_limbs,
    split_limbs_reference,
)
from pallas_kernels.common.device import has_mosaic
from pallas_kernels.int8_matmul.cases import Case, llama_1b_shapes, make_inputs
from pallas_kernels.int8_matmul.limb_tiles import LimbTiles, choose_limb_tiles
from pallas_kernels.int8_matmul.mosaic_tiles import MosaicTiles
from pallas_kernels.rms_norm import add_rms_norm

CASES = (
    (Case(name="ragged_g64", m=5, n=200, k=576, group_size=64), LimbTiles(tile_n=32)),
    (Case(name="short_group_g32", m=16, n=48, k=200, group_size=32), LimbTiles(tile_m=16, tile_n=16, tile_k=64)),
    (Case(name="short_group_g128", m=33, n=64, k=200, dtype="bfloat16"), LimbTiles(tile_m=32, k_splits=2)),
    (Case(name="rows_of_two_programs", m=128, n=64, k=256), LimbTiles(tile_m=64)),
)
DEMO_SHAPES = {"demo_gate_up": (3072, 576), "demo_down": (576, 1536)}


def grouped(x, group_size):
    x = np.asarray(x)
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group_size)]).reshape(*x.shape[:-1], -1, group_size)


def values_of(rows):
    """Returns f64[M I]: what limbs stand for."""
    high, low = np.asarray(rows.limbs).astype(np.float64)
    whole = grouped(256 * high + low, rows.group_size) * np.asarray(rows.scale, np.float64)[:, :, None]
    return whole.reshape(high.shape[0], -1)[:, : high.shape[1]]


def check_split(rows, expected, *, slack):
    """The scale follows from the largest value, and none is further off than half a step (and the slack of all)."""
    assert rows.limbs.dtype == jnp.int8 and rows.scale.dtype == jnp.float32
    largest = np.abs(grouped(expected, rows.group_size)).max(axis=-1)
    np.testing.assert_allclose(rows.scale, largest / 32512, rtol=1e-6 + slack)
    steps = np.repeat(np.asarray(rows.scale, np.float64), rows.group_size, axis=1)[:, : expected.shape[1]]
    assert (np.abs(values_of(rows) - expected) <= steps * (0.51 + 32512 * slack)).all()
    assert np.asarray(rows.limbs)[0].min() >= -127


def check_same_row(rows, row, alone):
    np.testing.assert_array_equal(rows.limbs[:, row : row + 1], alone.limbs)
    np.testing.assert_array_equal(rows.scale[row : row + 1], alone.scale)


def make_limbs(case):
    x, q, scale = make_inputs(case)
    return split_limbs_reference(x, group_size=case.group_size), q, scale


def check_product(found, x, q, scale):
    """Compares with float64 within the error of float32's sums."""
    weights = grouped(q, x.group_size) * np.asarray(scale, np.float64)[:, :, None]
    weights, values = weights.reshape(q.shape[0], -1)[:, : x.shape[1]], values_of(x)
    bound = (2 * math.ceil(math.log2(x.shape[1])) + 8) * 2.0**-24 * (np.abs(values) @ np.abs(weights).T)
    assert found.dtype == jnp.float32
    assert (np.abs(np.asarray(found, np.float64) - values @ weights.T) <= bound).all()


@pytest.mark.parametrize(("m", "k", "group_size", "dtype"), [(3, 200, 32, "float32"), (5, 576, 64, "bfloat16")])
def test_limbs_stand_for_the_values(m, k, group_size, dtype):
    x, *_ = make_inputs(Case(name="split", m=m, n=1, k=k, group_size=group_size, dtype=dtype))
    x = x.at[0, :group_size].set(0).at[0, -1].set(1e30).at[-1, group_size : 2 * group_size].multiply(1e-20)
    check_split(split_limbs_reference(x, group_size=group_size), np.asarray(x).astype(np.float64), slack=0)


def norm_of_parts(x, parts, weight, group_size):
    """Returns limbs, after checking that the sum beside them is that of the ordinary form, to the bit."""
    rows, total = add_rms_norm(x, parts, weight, eps=1e-5, group_size=group_size, interpret=True)
    np.testing.assert_array_equal(total, add_rms_norm(x, parts, weight, eps=1e-5, interpret=True)[1])
    return rows, np.asarray(total, np.float64)


@pytest.mark.parametrize(("num_parts", "size", "group_size"), [(0, 256, 128), (2, 200, 32), (2, 16, 64)])
def test_a_norm_gives_limbs(num_parts, size, group_size):
    rng = np.random.default_rng(size)
    x, parts = jnp.asarray(rng.standard_normal((3, size)), jnp.float32), rng.standard_normal((num_parts, 3, size))
    weight, parts = jnp.asarray(rng.standard_normal(size), jnp.bfloat16), jnp.asarray(parts, jnp.float32)
    if num_parts:
        found, exact = norm_of_parts(x, parts, weight, group_size)
        alone, _ = norm_of_parts(x[1:2], parts[:, 1:2], weight, group_size)
    else:
        normed = functools.partial(rms_norm, eps=1e-5, group_size=group_size, interpret=True)
        found, alone, exact = normed(x, weight), normed(x[1:2], weight), np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * np.asarray(weight, np.float64)
    check_split(found, exact, slack=1e-6)
    check_same_row(found, 1, alone)


@pytest.mark.parametrize(("num_parts", "size", "group_size"), [(1, 640, 128), (2, 200, 32)])
def test_a_gate_gives_limbs(num_parts, size, group_size):
    parts = jnp.asarray(np.random.default_rng(size).standard_normal((num_parts, 3, 2 * size)), jnp.float32)
    found = silu_mul_limbs(parts, group_size=group_size, interpret=True)
    gate, up = np.split(np.asarray(parts, np.float64).sum(axis=0), 2, axis=1)
    check_split(found, gate / (1 + np.exp(-gate)) * up, slack=2e-6)
    check_same_row(found, 1, silu_mul_limbs(parts[:, 1:2], group_size=group_size, interpret=True))


def test_values_too_small_for_a_scale_are_zeros_and_what_is_not_finite_stays_so():
    x = jnp.full((3, 64), 1e-38).at[1, 5].set(jnp.nan).at[2, 40].set(-jnp.inf)
    q, weight_scale = jnp.ones((16, 64), jnp.int8), jnp.ones((16, 2))
    gates = jnp.concatenate([jnp.full_like(x, 50.0), x], axis=1)[None]  # silu(50) is 50
    for rows in (split_limbs_reference(x, group_size=32), silu_mul_limbs(gates, group_size=32, interpret=True)):
        np.testing.assert_array_equal(np.asarray(rows.scale)[0], 0.0)
        np.testing.assert_array_equal(np.asarray(rows.limbs)[:, 0], 0)
        tiles = LimbTiles(tile_n=16, tile_k=32)
        product = limb_matmul_parts(rows, q, weight_scale, tiles=tiles, interpret=True)
        assert np.isfinite(product[0, 0]).all() and not np.isfinite(product[0, 1:]).any()


@pytest.mark.parametrize(("case", "tiles"), CASES, ids=lambda one: getattr(one, "name", None))
def test_the_product_is_exact_up_to_float32_sums_and_a_row_has_bits_of_its_own(case, tiles):
    x, *weights = make_limbs(case)
    check_product(limb_matmul_reference(x, *weights), x, *weights)
    product = functools.partial(limb_matmul_parts, tiles=tiles, interpret=True)
    parts = product(x, *weights)
    assert parts.shape == (tiles.k_splits, case.m, case.n)
    check_product(parts.sum(axis=0), x, *weights)
    np.testing.assert_array_equal(product(x, *weights), parts)
    row = case.m - 1
    one = LimbRows(limbs=x.limbs[:, row:], scale=x.scale[row:], group_size=x.group_size)
    np.testing.assert_array_equal(product(one, *weights)[:, 0], parts[:, row])
    mates = jnp.full_like(x.scale, jnp.nan).at[row].set(x.scale[row])
    spoilt = LimbRows(limbs=x.limbs, scale=mates, group_size=x.group_size)
    np.testing.assert_array_equal(product(spoilt, *weights)[:, row], parts[:, row])


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("shape", ["qkv", "gate_up", "down", *DEMO_SHAPES])
def test_the_default_tiles_give_rows_the_same_bits_in_every_company_at_real_sizes(shape, group_size):
    n, k = (llama_1b_shapes() | DEMO_SHAPES)[shape]
    x, *weights = make_limbs(Case(name=shape, m=128, n=n, k=k, group_size=group_size))

    def some(first, end):
        return limb_matmul_parts(
            LimbRows(limbs=x.limbs[:, first:end], scale=x.scale[first:end], group_size=group_size), *weights
        )

    few, whole = some(0, 32), limb_matmul_parts(x, *weights)
    check_product(whole.sum(axis=0), x, *weights)
    np.testing.assert_array_equal(limb_matmul_parts(x, *weights), whole)
    for first, end in ((0, 17), (3, 31)):
        np.testing.assert_array_equal(some(first, end), few[:, first:end])
    for first, end in ((0, 33), (40, 104)):  # another kernel, where a wide product has one for more rows
        np.testing.assert_array_equal(some(first, end), whole[:, first:end])


@pytest.mark.parametrize("shape", [*llama_1b_shapes(), *DEMO_SHAPES])
def test_the_default_splits_do_not_depend_on_the_number_of_rows(shape):
    n, k = (llama_1b_shapes() | DEMO_SHAPES)[shape]
    for has, group_size in itertools.product((False, True), (32, 64, 128)):
        facts = {"n": n, "k": k, "group_size": group_size, "scale_dtype": jnp.dtype("float32"), "has_mosaic": has}
        choices = [choose_limb_tiles(m=m, **facts) for m in range(1, 129)]
        of_triton = {(one.k_splits, one.tile_k) for one in choices if isinstance(one, LimbTiles)}
        is_mosaic = [isinstance(one, MosaicTiles) for one in choices]
        assert len(of_triton) <= 1
        assert all(splits == 1 for splits, _ in of_triton) or not any(is_mosaic)  # Mosaic's kernel never splits
        assert any(is_mosaic) == (has and group_size == 128 and shape in ("gate_up", "head"))
        assert all(is_mosaic[32:]) == any(is_mosaic)  # its bits differ, so it has all rows from 33 on or none


def test_a_cpu_has_no_mosaic():
    assert not has_mosaic()


@pytest.mark.lowers
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100"])
@pytest.mark.parametrize("m", [17, 32, 64, 128])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_products_lower_for_cuda(m, group_size, device):
    for n, k in (*llama_1b_shapes().values(), *DEMO_SHAPES.values()):
        groups = -(-k // group_size)
        arrays = ((2, m, k), jnp.int8), ((m, groups), jnp.float32), ((n, k), jnp.int8), ((n, groups), jnp.float32)
        limbs, x_scale, q, scale = (jax.ShapeDtypeStruct(*one) for one in arrays)
        x = LimbRows(limbs=limbs, scale=x_scale, group_size=group_size)
        text = lower_for_cuda(limb_matmul_parts, x, q, scale, device=device)
        assert text.count("xla.gpu.triton") == 1


@pytest.mark.lowers
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100"])
@pytest.mark.parametrize(("size", "group_size"), [(2048, 128), (8192, 64), (576, 32)])
def test_what_makes_limbs_lowers_for_cuda_without_anything_beside_it(size, group_size, device):
    def make(x, parts, weight):
        rows, total = add_rms_norm(x, parts, weight, eps=1e-5, group_size=group_size)
        gated = silu_mul_limbs(jnp.expand_dims(total, 0), group_size=group_size)
        return rows, gated, rms_norm(x, weight, eps=1e-5, group_size=group_size)

    shapes = ((64, size), jnp.float32), ((4, 64, size), jnp.float32), ((size,), jnp.bfloat16)
    text = lower_for_cuda(make, *(jax.ShapeDtypeStruct(*one) for one in shapes), device=device)
    assert text.count("xla.gpu.triton") == 3 and "stablehlo.add" not in text


def test_what_does_not_fit_is_named():
    case = Case(name="g128", m=2, n=64, k=256)
    x, q, scale = make_limbs(case)
    with pytest.raises(ValueError, match=r"weights \(64, 128\) with group_size 128 need scales \(64, 1\), got"):
        limb_matmul_parts(x, q[:, :128], scale)
    with pytest.raises(ValueError, match=r"expected limbs \[2 M I\] .* got \(2, 2, 256\), \(2, 2\) and \(64, 128\)"):
        limb_matmul_parts(x, q[:, :128], scale[:, :1])
    with pytest.raises(KernelUnsupportedError, match="tile_k must be a multiple of group_size 128, got 64"):
        limb_matmul_parts(x, q, scale, tiles=LimbTiles(tile_k=64))
    with pytest.raises(KernelUnsupportedError, match="limbs need groups of 32, 64 or 128, got 48"):
        rms_norm(jnp.ones((1, 96)), jnp.ones(96), eps=1e-5, group_size=48)
    with pytest.raises(ValueError, match=r"expected parts \[S M 2F\], got \(1, 1, 63\)"):
        silu_mul_limbs(jnp.ones((1, 1, 63)), group_size=32)
    with pytest.raises(ValueError, match="tile_n must be a power of two of at least 16, got 24"):
        LimbTiles(tile_n=24)
