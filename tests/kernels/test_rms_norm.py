"""Root-mean-square normalization in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference


def make_inputs(num_rows, size, dtype=jnp.float32):
    rng = np.random.default_rng(size)
    return jnp.asarray(rng.standard_normal((num_rows, size)), jnp.float32), jnp.asarray(
        rng.standard_normal(size), dtype
    )


@pytest.mark.parametrize("size", [16, 48, 576])
def test_kernel_gives_the_reference_result(size):
    x, weight = make_inputs(3, size)
    found = rms_norm(x, weight, eps=1e-5, interpret=True)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * np.asarray(weight, np.float64)
    np.testing.assert_allclose(found, exact, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(found, rms_norm_reference(x, weight, eps=1e-5), rtol=1e-6, atol=1e-7)


def make_parts(num_parts, num_rows, size):
    return jnp.asarray(np.random.default_rng(1).standard_normal((num_parts, num_rows, size)), jnp.float32)


@pytest.mark.parametrize(("num_parts", "size"), [(1, 48), (3, 576), (8, 64)])
def test_parts_are_added_in_their_order_and_then_to_the_residual_before_the_norm(num_parts, size):
    (x, weight), parts = make_inputs(3, size), make_parts(num_parts, 3, size)
    found, total = add_rms_norm(x, parts, weight, eps=1e-5, interpret=True)
    expected = np.asarray(parts[0])
    for part in np.asarray(parts[1:]):
        expected = expected + part
    np.testing.assert_array_equal(total, np.asarray(x) + expected)
    np.testing.assert_array_equal(found, rms_norm(total, weight, eps=1e-5, interpret=True))
    for one, other in zip((found, total), add_rms_norm_reference(x, parts, weight, eps=1e-5), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_row_with_parts_has_the_same_bits_alone_and_in_company():
    (x, weight), parts = make_inputs(5, 576, jnp.bfloat16), make_parts(4, 5, 576)
    together = add_rms_norm(x, parts, weight, eps=1e-5, interpret=True)
    alone = add_rms_norm(x[3:4], parts[:, 3:4], weight, eps=1e-5, interpret=True)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(np.asarray(one[0], np.float32), np.asarray(other[3], np.float32))


def test_result_has_the_dtype_of_the_weight_and_zeros_stay_zeros():
    _, weight = make_inputs(1, 48, jnp.bfloat16)
    found = rms_norm(jnp.zeros((2, 48)), weight, eps=1e-5, interpret=True)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [576, 2048, 4096])
def test_kernel_gives_the_reference_result_at_real_sizes_and_bits_of_a_row_alone(size):
    x, weight = make_inputs(64, size)
    found = rms_norm(x, weight, eps=1e-5)
    np.testing.assert_allclose(found, rms_norm_reference(x, weight, eps=1e-5), rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(rms_norm(x[5:6], weight, eps=1e-5), found[5:6])
    parts = make_parts(8, 64, size)
    found, total = add_rms_norm(x, parts, weight, eps=1e-5)
    expected, expected_total = add_rms_norm_reference(x, parts, weight, eps=1e-5)
    np.testing.assert_array_equal(total, expected_total)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(add_rms_norm(x[5:6], parts[:, 5:6], weight, eps=1e-5)[0], found[5:6])


@pytest.mark.lowers
@pytest.mark.parametrize("num_rows", [1, 64])
def test_it_lowers_for_cuda(num_rows):
    x, weight = jax.ShapeDtypeStruct((num_rows, 2048), jnp.float32), jax.ShapeDtypeStruct((2048,), jnp.bfloat16)
    text = lower_for_cuda(lambda x, weight: rms_norm(x, weight, eps=1e-5), x, weight)
    assert text.count("xla.gpu.triton") == 1


@pytest.mark.lowers
@pytest.mark.parametrize("num_parts", [1, 8])
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_it_lowers_for_cuda_with_parts_and_nothing_beside_it(num_parts, device):
    x, weight = jax.ShapeDtypeStruct((8, 2048), jnp.float32), jax.ShapeDtypeStruct((2048,), jnp.bfloat16)
    parts = jax.ShapeDtypeStruct((num_parts, 8, 2048), jnp.float32)
    text = lower_for_cuda(lambda *arrays: add_rms_norm(*arrays, eps=1e-5), x, parts, weight, device=device)
    assert text.count("xla.gpu.triton") == 1 and "stablehlo.add" not in text


def test_shapes_that_do_not_fit_are_named():
    x, _ = make_inputs(2, 48)
    with pytest.raises(ValueError, match=r"expected x \[M D\] and weight \[D\], got \(2, 48\) and \(47,\)"):
        rms_norm(x, jnp.ones(47), eps=1e-5)
    with pytest.raises(ValueError, match=r"expected parts \[S M D\] of x \[M D\], got \(0, 2, 48\) and \(2, 48\)"):
        add_rms_norm(x, make_parts(0, 2, 48), jnp.ones(48), eps=1e-5)
