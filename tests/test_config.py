"""Settings that contradict each other, or that no kernel serves, are refused when they are made."""

import pytest

from photon_jax.config import CacheConfig, EngineConfig, KernelConfig, SchedulerConfig, make_engine_config
from photon_jax.errors import ConfigError


def test_auto_becomes_the_choice_of_the_platform():
    assert KernelConfig().resolve("cpu") == KernelConfig(linear="reference", attention="reference")
    assert KernelConfig().resolve("gpu") == KernelConfig(linear="xla", attention="xla")
    assert KernelConfig(attention="triton").resolve("gpu").attention == "triton"


def test_a_kernel_that_the_platform_lacks_is_refused():
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, JAX runs on 'cpu'"):
        KernelConfig(attention="triton").resolve("cpu")


@pytest.mark.parametrize("fields", [{"linear": "triton"}, {"linear": "mosaic"}, {"attention": "mosaic"}])
def test_a_kernel_that_does_not_exist_is_refused(fields):
    with pytest.raises(ConfigError, match="has no kernel in this release"):
        KernelConfig(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheConfig(block_size=48), "block_size must be a power of two, got 48"),
        (lambda: CacheConfig(num_blocks=1), "num_blocks must be at least 2"),
        (lambda: CacheConfig(memory_fraction=0.0), r"memory_fraction must be in \(0, 1\], got 0.0"),
        (lambda: SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8), "must be at least max_num_seqs"),
        (lambda: SchedulerConfig(max_waiting=0), "max_waiting must be a positive integer, got 0"),
        (lambda: EngineConfig(dtype="int4"), "dtype must be one of auto, float32, bfloat16, float16, got 'int4'"),
        (lambda: EngineConfig(max_model_len=-1), "max_model_len must be a positive integer, got -1"),
        (lambda: make_engine_config(EngineConfig(), block_size=16), "give engine_config or the fields block_size"),
        (lambda: make_engine_config(None, blocksize=16), "unknown engine setting 'blocksize'"),
    ],
)
def test_wrong_settings_are_errors_that_name_them(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_flat_fields_find_their_place():
    config = make_engine_config(None, dtype="float16", block_size=16, max_num_seqs=1000, linear="xla")
    assert (config.dtype, config.cache.block_size, config.kernels.linear) == ("float16", 16, "xla")
    assert config.scheduler.max_num_batched_tokens == 1000  # a budget that isn't given follows the sequences
    assert make_engine_config(None, max_num_batched_tokens=8).scheduler.max_num_seqs == 8
