"""Root-mean-square normalization in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels.rms_norm import rms_norm, rms_norm_reference


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


@pytest.mark.parametrize("num_rows", [1, 64])
def test_it_lowers_for_cuda(num_rows):
    x, weight = jax.ShapeDtypeStruct((num_rows, 2048), jnp.float32), jax.ShapeDtypeStruct((2048,), jnp.bfloat16)
    text = lower_for_cuda(lambda x, weight: rms_norm(x, weight, eps=1e-5), x, weight)
    assert text is None or text.count("xla.gpu.triton") == 1


def test_shapes_that_do_not_fit_are_named():
    x, _ = make_inputs(2, 48)
    with pytest.raises(ValueError, match=r"expected x \[M D\] and weight \[D\], got \(2, 48\) and \(47,\)"):
        rms_norm(x, jnp.ones(47), eps=1e-5)
