"""Settings of the process and of the machine: JAX's own flags, memory, the model's limits."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from helpers.tiny_checkpoint import checkpoint_config
from helpers.tiny_model import tiny_config, tiny_params

import photon_jax
from photon_jax.cache.layout import plan_cache
from photon_jax.config import CacheConfig, make_engine_config
from photon_jax.engine.memory import free_bytes
from photon_jax.engine.start import start_engine
from photon_jax.errors import ConfigError
from photon_jax.models.config import RopeConfig

CONFIG = checkpoint_config()
PROMPTS = [[1, 2, 3], [5] * 130, [8], [9, 10]]  # one geometry with test_functional.py, whose programs these share
PARAMS = photon_jax.SamplingParams(max_tokens=6, seed=3, top_p=0.9)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.enable_x64(True),
        lambda: jax.threefry_partitionable(False),
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.numpy_dtype_promotion("standard"),
        lambda: jax.default_matmul_precision("bfloat16"),
    ],
    ids=["x64", "threefry", "rbg", "promotion", "precision"],
)
def test_tokens_do_not_depend_on_the_settings_of_the_process(setting):
    params = tiny_params(CONFIG)

    def tokens(context):
        with context:
            outputs = photon_jax.generate(params, CONFIG, PROMPTS, PARAMS, progress=False)
        return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]

    assert tokens(setting()) == tokens(contextlib.nullcontext())


def describe_bits():
    params = photon_jax.SamplingParams(max_tokens=6, seed=3, top_p=0.9, logprobs=0)
    outputs = photon_jax.generate(tiny_params(CONFIG), CONFIG, PROMPTS, params, progress=False)
    answers = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
    kinds = ("raw", "tempered", "sampling")
    return [[list(ids), *(getattr(logprobs, kind).tobytes().hex() for kind in kinds)] for ids, logprobs in answers]


def test_a_new_process_computes_the_same_bits():
    command = "import json; from e2e.test_settings import describe_bits; print(json.dumps(describe_bits()))"
    compiles_itself = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment = os.environ | compiles_itself | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    finished = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert json.loads(finished.stdout) == describe_bits(), finished.stderr


def test_free_memory_is_that_of_the_machine():
    assert 2**20 < free_bytes(jax.devices()[0]) < 2**50


def test_blocks_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="num_blocks 11 need 1100 bytes, 1000 are free"):
        plan_cache(CacheConfig(num_blocks=11), bytes_per_block=100, free_bytes=1000, max_useful_tokens=64)


@pytest.mark.parametrize("length", [1, 513])
def test_max_model_len_beyond_the_model_is_refused(length):
    config = tiny_config()
    with pytest.raises(ConfigError, match=f"between 2 and the model's 512 positions, got {length}"):
        start_engine(tiny_params(config), config, make_engine_config(None, max_model_len=length))


def test_dynamic_rope_may_be_stretched_by_its_factor():
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_position_embeddings=512)
    config = tiny_config(rope=rope)
    with pytest.raises(ConfigError, match="the model's 1024 positions, got 1025"):
        start_engine(tiny_params(config), config, make_engine_config(None, max_model_len=1025))


@pytest.mark.parametrize("fields", [{"stop": None}, {"stop_token_ids": None}])
def test_none_is_no_stop(fields):
    params = photon_jax.SamplingParams(**fields)
    assert (params.stop, params.stop_token_ids) == ((), ())


@pytest.mark.parametrize("fields", [{"n": None}, {"min_tokens": None}, {"stop": 5}, {"temperature": 10**400}])
def test_values_of_a_wrong_kind_are_request_errors(fields):
    with pytest.raises(photon_jax.RequestError, match=next(iter(fields))):
        photon_jax.SamplingParams(**fields)
