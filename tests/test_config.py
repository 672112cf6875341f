"""Settings that contradict each other, or that no kernel serves, are refused when they are made."""

import dataclasses

import pytest

from photon_jax.config import (
    CacheConfig,
    EngineConfig,
    EngineSettings,
    KernelConfig,
    SchedulerConfig,
    make_engine_config,
)
from photon_jax.errors import ConfigError


def test_auto_becomes_the_choice_of_the_platform():
    assert KernelConfig().resolve("cpu", head_dim=16) == KernelConfig(linear="reference", attention="reference")
    assert KernelConfig().resolve("gpu", head_dim=128) == KernelConfig(linear="triton", attention="triton")
    assert KernelConfig().resolve("gpu", head_dim=96) == KernelConfig(linear="triton", attention="xla")
    assert KernelConfig(attention="triton").resolve("gpu", head_dim=64).attention == "triton"


def test_a_kernel_that_the_platform_lacks_is_refused():
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, JAX runs on 'cpu'"):
        KernelConfig(attention="triton").resolve("cpu", head_dim=64)
    with pytest.raises(ConfigError, match="linear='triton' needs an NVIDIA GPU"):
        KernelConfig(linear="triton").resolve("cpu", head_dim=64)


def test_invariant_ops_are_the_reference_on_a_cpu_and_uniform_kernels_on_a_gpu():
    config = KernelConfig(invariant=True)
    assert config.resolve("cpu", head_dim=96) == KernelConfig(linear="reference", attention="reference", invariant=True)
    on_gpu = config.resolve("gpu", head_dim=64)
    assert on_gpu == KernelConfig(linear="uniform", attention="uniform", invariant=True)
    assert on_gpu.resolve("gpu", head_dim=64) == on_gpu
    assert make_engine_config(None, invariant=True).kernels == config


@pytest.mark.parametrize(
    ("fields", "platform", "message"),
    [
        ({"invariant": True, "linear": "xla"}, "cpu", "linear='xla' is not invariant, which invariant=True asks for"),
        ({"invariant": True, "attention": "triton"}, "gpu", "attention='triton' is not invariant"),
        ({"linear": "uniform"}, "gpu", "linear='uniform' is what auto becomes with invariant=True; use that"),
        ({"invariant": True, "linear": "uniform"}, "cpu", "linear='uniform' needs an NVIDIA GPU, JAX runs on 'cpu'"),
        ({"invariant": True, "linear": "reference"}, "gpu", "linear='reference' is invariant on a CPU alone, JAX runs"),
        ({"invariant": True}, "tpu", "invariant=True needs a CPU, or an NVIDIA GPU .* JAX runs on 'tpu'"),
        ({"invariant": True}, "gpu", "a power of two of at least 16; .* the model's head size is 96"),
        ({"invariant": 1}, "cpu", "invariant must be True or False, got 1"),
    ],
)
def test_what_contradicts_invariant_is_named(fields, platform, message):
    with pytest.raises(ConfigError, match=message):
        KernelConfig(**fields).resolve(platform, head_dim=96)


@pytest.mark.parametrize("name", ["linear", "attention"])
@pytest.mark.parametrize(("invariant", "others"), [(False, "auto or xla"), (True, "auto")])
def test_a_kernel_that_does_not_exist_is_refused_and_one_that_does_named(name, invariant, others):
    with pytest.raises(ConfigError, match=f"{name}='mosaic' has no kernel in this release; use {others}$"):
        KernelConfig(**{name: "mosaic", "invariant": invariant})


def test_strict_compile_and_a_lazy_warmup_serve_no_company():
    EngineConfig(strict_compile=True, warmup="full").check_serves()
    EngineConfig(warmup="lazy").check_serves()
    with pytest.raises(ConfigError, match='strict_compile needs warmup="full" to serve requests'):
        EngineConfig(strict_compile=True, warmup="lazy").check_serves()


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
        (
            lambda: make_engine_config(None, blocksize=16),
            "unknown engine setting 'blocksize'; the settings are attention, block_size, compile_cache_dir, ",
        ),
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


def test_the_flat_settings_are_the_fields_of_the_configs():
    parts = (EngineConfig, CacheConfig, SchedulerConfig, KernelConfig)
    names = {field.name for part in parts for field in dataclasses.fields(part)}
    assert set(EngineSettings.__annotations__) == names - {"cache", "scheduler", "kernels"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization": "int4"}, "quantization must be one of int8"),
        ({"quantization": "int8", "group_size": 96}, "group_size must be 32, 64 or 128, got 96"),
        ({"quantize_embedding": True}, "quantize_embedding needs quantization"),
    ],
)
def test_int8_settings_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_engine_config(None, **fields)


def test_the_engine_looks_a_step_ahead_and_several_steps_a_dispatch_are_for_fast_devices():
    unset, given = SchedulerConfig(), SchedulerConfig(steps_ahead=0, max_steps_per_dispatch=3)
    for platform, expected in (("cpu", (1, 1)), ("gpu", (1, 8))):
        resolved = unset.resolve(platform)
        assert (resolved.steps_ahead, resolved.max_steps_per_dispatch) == expected
        assert given.resolve(platform) == given


@pytest.mark.parametrize("field", [{"steps_ahead": -1}, {"max_steps_per_dispatch": 0}])
def test_steps_ahead_and_steps_of_a_dispatch_are_counts(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        SchedulerConfig(**field)
