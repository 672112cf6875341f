"""The uniform product: right within its rounding, and a row's bits are the same for any number of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import (
    KernelUnsupportedError,
    add_parts,
    uniform_gated,
    uniform_gated_reference,
    uniform_parts,
    uniform_parts_reference,
)
from pallas_kernels.int8_matmul.cases import Case, llama_1b_shapes, make_inputs
from pallas_kernels.uniform_matmul.tiles import TileConfig, choose_tiles

MAX_ROWS = 130  # more than two tiles
FORMS = ("int8", "outputs first", "inputs first")
SMALL = TileConfig(tile_m=16, tile_n=32, tile_k=64, k_splits=2)  # with edges at small sizes
GATED = TileConfig(tile_m=16, tile_n=32, tile_k=64)


def arguments(form, *, m, n, k, dtype="float32", group_size=64):
    """Returns x, and what else a call takes."""
    x, weight, scale = make_inputs(
        Case(name=form, m=m, n=n, k=k, group_size=group_size if form == "int8" else 0, dtype=dtype)
    )
    if form == "int8":
        return x, {"weight": weight, "scale": scale, "group_size": group_size}
    is_first = form == "inputs first"
    return x, {"weight": jnp.asarray(weight.T) if is_first else weight, "has_inputs_first": is_first}


def exact(x, weights):
    """Returns the product in float64, and the product of the magnitudes."""
    weight = np.asarray(weights["weight"]).astype(np.float64)
    if "scale" in weights:
        scale = np.asarray(weights["scale"]).astype(np.float64)
        weight = weight * np.repeat(scale, weights["group_size"], axis=1)[:, : weight.shape[1]]
    weight = weight if weights.get("has_inputs_first") else weight.T
    x = np.asarray(x).astype(np.float64)
    return x @ weight, np.abs(x) @ np.abs(weight)


def check_against_float64(form, *, dtype, interpret, tiles=None, gated_tiles=None, **sizes):
    x, weights = arguments(form, dtype=dtype, **sizes)
    expected, magnitude = exact(x, weights)
    found = np.asarray(add_parts(uniform_parts(x, **weights, tiles=tiles, interpret=interpret)), np.float64)
    factor = (2 * np.ceil(np.log2(sizes["k"])) + 8) * 2.0**-24
    assert found.shape == expected.shape
    assert np.all(np.abs(found - expected) <= factor * magnitude), np.max(np.abs(found - expected) / magnitude)
    reference = uniform_parts_reference(x, **weights)[0]
    assert np.all(np.abs(np.asarray(reference, np.float64) - expected) <= factor * magnitude)

    gated = uniform_gated(x, **weights, tiles=gated_tiles, interpret=interpret)
    gate, up = np.split(expected, 2, axis=1)
    assert gated.dtype == x.dtype
    wanted = gate / (1 + np.exp(-gate)) * up
    tolerance = 1e-5 if dtype == "float32" else 2.0**-7
    for each in (gated, uniform_gated_reference(x, **weights)):
        difference = np.linalg.norm(np.asarray(each.astype(jnp.float32)) - wanted)
        assert difference < tolerance * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("form", "dtype", "k"),
    [("int8", "bfloat16", 576), ("outputs first", "float32", 200), ("inputs first", "bfloat16", 576)],
)
def test_the_product_is_right_within_the_rounding_of_its_sum(form, dtype, k):
    """19 rows, 72 outputs and these inputs end inside of a tile each."""
    check_against_float64(form, dtype=dtype, m=19, n=72, k=k, interpret=True, tiles=SMALL, gated_tiles=GATED)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (2048, 8192), (576, 1536)])
def test_gpu_the_product_is_right_within_the_rounding_of_its_sum(form, n, k):
    check_against_float64(form, dtype="bfloat16", m=130, n=n, k=k, interpret=False, group_size=128)


def check_that_company_changes_no_bit(form, compute, *, counts, **sizes):
    """All rows at once, the first ones of them, and some in other places."""
    x, weights = arguments(form, m=MAX_ROWS, **sizes)
    whole = np.asarray(compute(x, **weights).astype(jnp.float32))
    for count in counts:
        shifted = np.arange(3, 3 + count) % MAX_ROWS
        for rows in (np.arange(count), shifted[::-1]):
            found = np.asarray(compute(x[rows], **weights).astype(jnp.float32))
            np.testing.assert_array_equal(found, whole[..., rows, :])


@pytest.mark.parametrize(
    ("form", "dtype", "counts"), [("int8", "bfloat16", (1, 7, 64)), ("inputs first", "float32", (1, 7, 16, 64))]
)
def test_a_row_has_the_same_bits_for_any_number_of_rows_and_in_any_place(form, dtype, counts):
    compute = functools.partial(uniform_parts, tiles=SMALL, interpret=True)
    check_that_company_changes_no_bit(form, compute, counts=counts, dtype=dtype, n=64, k=200)


def test_a_gated_row_has_the_same_bits_alone_and_in_company():
    compute = functools.partial(uniform_gated, tiles=GATED, interpret=True)
    check_that_company_changes_no_bit("outputs first", compute, counts=(1, 64), dtype="bfloat16", n=64, k=200)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (2048, 8192), (576, 1536)])
def test_gpu_a_row_has_the_same_bits_for_any_number_of_rows_and_in_any_place(form, dtype, n, k):
    for compute in (uniform_parts, uniform_gated):
        sizes = {"dtype": dtype, "n": n, "k": k, "group_size": 128}
        check_that_company_changes_no_bit(form, compute, counts=(1, 2, 7, 16, 64, 129), **sizes)


@pytest.mark.lowers
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_lowers_for_cuda(form, dtype, device):
    for group_size in (32, 128) if form == "int8" else (0,):
        for n, k in (llama_1b_shapes()["down"], (576, 1536)):
            weights = [
                jax.ShapeDtypeStruct((k, n) if form == "inputs first" else (n, k), jnp.int8 if group_size else dtype)
            ]
            if group_size:
                weights.append(jax.ShapeDtypeStruct((n, k // group_size), jnp.float32))
            options = {"group_size": group_size, "has_inputs_first": form == "inputs first"}
            x = jax.ShapeDtypeStruct((100, k), dtype)
            for compute in (uniform_parts, uniform_gated):
                text = lower_for_cuda(functools.partial(compute, **options), x, *weights, device=device)
                assert text.count("xla.gpu.triton") == 1


def test_splits_fill_the_chip_where_outputs_are_few_and_the_caller_adds_the_parts():
    options = {"k": 2048, "group_size": 0, "dtype": "bfloat16"}
    assert choose_tiles(n=2048, is_split=True, **options).k_splits == 4
    assert choose_tiles(n=128256, is_split=True, **options).k_splits == 1
    assert choose_tiles(n=2048, is_split=False, **options).k_splits == 1
    assert choose_tiles(n=64, k=96, group_size=32, dtype="bfloat16", is_split=True).k_splits == 1


def test_wrong_arguments_are_named():
    x, weights = arguments("int8", m=2, n=32, k=128)
    q, scale = weights["weight"], weights["scale"]
    with pytest.raises(ValueError, match=r"expected x \[M I\] and weights \[I O\], got \(2, 128\) and \(32, 128\)"):
        uniform_parts(x, jnp.zeros((32, 128)), has_inputs_first=True)
    with pytest.raises(ValueError, match=r"int8 weights \[O I\] with scales \(32, 4\), got int8 and \(32, 2\)"):
        uniform_parts(x, q, scale, group_size=32)
    with pytest.raises(ValueError, match="need x's dtype and group_size 0, got float32, int8, 0"):
        uniform_parts(x, q)
    with pytest.raises(ValueError, match=r"two equal halves of outputs, got \(31, 128\)"):
        uniform_gated(x, q[:31], scale[:31], group_size=64)
    with pytest.raises(KernelUnsupportedError, match="power-of-two group_size of at least 16, got 24"):
        uniform_parts(x, q, scale, group_size=24)
    with pytest.raises(KernelUnsupportedError, match="a gate has one split, got m16"):
        uniform_gated(x, q, scale, group_size=64, tiles=SMALL)
    with pytest.raises(ValueError, match="tile_n must be a power of two of at least 16, got 8"):
        TileConfig(tile_n=8)
