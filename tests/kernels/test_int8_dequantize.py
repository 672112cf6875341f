"""Int8 weights turned back into floating-point numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import KernelUnsupportedError
from pallas_kernels.int8_dequantize import int8_dequantize, int8_dequantize_reference


def make_weights(num_outputs, num_inputs, group_size, dtype=jnp.float32):
    rng = np.random.default_rng(num_inputs)
    q = rng.integers(-127, 128, (num_outputs, num_inputs), np.int8)
    return jnp.asarray(q), jnp.asarray(rng.uniform(0.001, 0.1, (num_outputs, -(-num_inputs // group_size))), dtype)


def check(q, scale, group_size, dtype, *, interpret):
    found = int8_dequantize(q, scale, group_size=group_size, dtype=dtype, interpret=interpret)
    expected = int8_dequantize_reference(q, scale, group_size=group_size, dtype=dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("num_inputs", [200, 576, 4096])
def test_each_weight_is_its_integer_times_the_scale_of_its_group_rounded_once(num_inputs, group_size):
    q, scale = make_weights(9, num_inputs, group_size, jnp.float16 if group_size == 32 else jnp.float32)
    check(q, scale, group_size, jnp.bfloat16, interpret=True)
    assert float(int8_dequantize_reference(q, scale, group_size=group_size, dtype=jnp.float32)[8, 199]) == float(
        np.float32(q[8, 199]) * np.float32(scale[8, 199 // group_size])
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16_384, 2048), (2048, 8192), (1536, 576)])
def test_gpu_weights_are_the_reference_ones_at_real_sizes(num_outputs, num_inputs):
    check(*make_weights(num_outputs, num_inputs, 64), 64, jnp.bfloat16, interpret=False)


@pytest.mark.lowers
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100"])
def test_it_lowers_for_cuda(device):
    arguments = jax.ShapeDtypeStruct((2048, 8192), jnp.int8), jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    text = lower_for_cuda(
        lambda q, scale: int8_dequantize(q, scale, group_size=128, dtype=jnp.bfloat16), *arguments, device=device
    )
    assert text.count("xla.gpu.triton") == 1


def test_wrong_arguments_are_named():
    q, scale = make_weights(4, 64, 32)
    with pytest.raises(ValueError, match=r"expected q int8\[O I\] and scale \[O ceil\(I/64\)\], got int8\(4, 64\) and"):
        int8_dequantize(q, scale, group_size=64, dtype=jnp.bfloat16)
    with pytest.raises(KernelUnsupportedError, match="power-of-two group_size of at least 16, got 24"):
        int8_dequantize(q, scale, group_size=24, dtype=jnp.bfloat16)
