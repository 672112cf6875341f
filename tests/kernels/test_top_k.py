"""The greatest entries of rows in the order of lax.top_k."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels.top_k import top_k, top_k_reference
from pallas_kernels.top_k.triton import PART

WIDTH = 20


def check(x, k, *, interpret):
    for found, expected in zip(top_k(x, k, interpret=interpret), top_k_reference(x, k), strict=True):
        np.testing.assert_array_equal(found, expected)


def draw(num_rows, size):
    """Returns rows of both signs whose entries tie often, with infinities and whole parts of -inf."""
    x = np.random.default_rng(size).normal(0, 4, (num_rows, size)).round(1).astype(np.float32)
    x[0, : size // 2] = -np.inf
    x[1, size // 3], x[1, size // 5] = np.inf, -np.inf
    x[2] = -np.abs(x[2]) - 1.0
    x[3] = 0.5
    return jnp.asarray(x)


@pytest.mark.parametrize("size", [WIDTH, 50, PART, 3 * PART + 5])
def test_kernel_gives_the_greatest_entries_and_the_lowest_of_equal_places_first(size):
    check(draw(5, size), WIDTH, interpret=True)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_kernel_gives_as_many_as_are_asked_for(k):
    check(draw(4, PART + 9), k, interpret=True)


def test_entries_that_are_all_minus_infinity_come_in_order_each_once():
    _, places = top_k(jnp.full((1, PART + 3), -jnp.inf), WIDTH, interpret=True)
    assert places.tolist() == [list(range(WIDTH))]


def test_places_are_of_the_row_where_entries_are_not_numbers():
    x = np.full((2, PART + 3), np.nan, np.float32)
    x[1] = np.where(np.arange(PART + 3) % 2, -np.nan, 1.0)
    _, places = top_k(jnp.asarray(x), WIDTH, interpret=True)
    assert np.min(places) >= 0 and np.max(places) < PART + 3


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64, 1024])
@pytest.mark.parametrize("size", [49_152, 128_256])
def test_gpu_kernel_gives_the_greatest_at_real_sizes(num_rows, size):
    check(draw(max(num_rows, 4), size)[:num_rows], WIDTH, interpret=False)


@pytest.mark.lowers
@pytest.mark.parametrize(("device", "size"), [("NVIDIA H200", 128_256), ("NVIDIA A100", 49_152), ("NVIDIA H200", 9)])
def test_it_lowers_for_cuda(device, size):
    x = jax.ShapeDtypeStruct((64, size), jnp.float32)
    text = lower_for_cuda(functools.partial(top_k, k=min(WIDTH, size)), x, device=device)
    assert text.count("xla.gpu.triton") == 2


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"expected x \[M V\] and k from 1 to V, got \(2, 5\) and 6"):
        top_k(jnp.zeros((2, 5)), 6)
