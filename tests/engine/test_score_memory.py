"""Scores and most likely tokens cost a step no more memory than the logits of one tile."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig, SchedulerConfig, make_engine_config
from photon_jax.engine.buckets import TileChoice, padded_buckets, tiled_buckets
from photon_jax.engine.runner import ModelRunner
from photon_jax.engine.start import start_engine
from photon_jax.engine.step import SCORE_TILE, StepConfig
from photon_jax.models.params import random_params
from photon_jax.request import Request, SamplingParams

NUM_TOKENS, VOCAB_SIZE = 1024, 16_384
ROW_TILE = 32
LIMITS = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=NUM_TOKENS)
LAYOUT = CacheLayout(num_blocks=33, block_size=64)


def start(linear):
    """Returns a runner whose longest prompt is one step, and the layout of that step."""
    config = tiny_config(vocab_size=VOCAB_SIZE, num_layers=1)
    kernels = KernelConfig(linear=linear, attention="reference")
    if linear == "xla":
        buckets = padded_buckets(LIMITS, LAYOUT, max_model_len=NUM_TOKENS)
    else:
        tiles = TileChoice((2, 8, ROW_TILE), query_tile=16)
        buckets = tiled_buckets(LIMITS, LAYOUT, max_model_len=NUM_TOKENS, tiles=tiles)
    step_config = StepConfig(model=config, kernels=kernels, max_model_len=NUM_TOKENS)
    runner = ModelRunner(tiny_params(config), step_config, LAYOUT, buckets, max_num_seqs=LIMITS.max_num_seqs)
    return runner, next(layout for layout in buckets.plain_layouts() if not layout.is_greedy)


@pytest.mark.parametrize(("linear", "tile"), [("reference", ROW_TILE), ("xla", SCORE_TILE)])
def test_twenty_log_probabilities_for_each_token_of_the_longest_prompt_take_one_tile_more(linear, tile):
    runner, plain = start(linear)
    assert plain.num_tokens == NUM_TOKENS
    scored = dataclasses.replace(plain, has_scores=True, has_top=True)
    used = [runner.compile(layout).memory_analysis().temp_size_in_bytes for layout in (plain, scored)]
    assert used[1] - used[0] < 2 * tile * VOCAB_SIZE * 4, used


LLAMA_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "mlp_size": 8192,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
    "dtype": "bfloat16",
    "max_position_embeddings": 16_384,
}


def print_peaks():
    """Prints the peaks of device memory after the longest prompt alone, and after one with log-probabilities too."""
    config = tiny_config(**LLAMA_1B)
    settings = make_engine_config(
        None, max_model_len=config.max_position_embeddings, max_num_seqs=1, max_num_batched_tokens=2048, num_blocks=257
    )
    engine = start_engine(random_params(config, jax.random.key(0)), config, settings).engine
    token_ids = tuple(np.random.default_rng(0).integers(config.vocab_size, size=16_383).tolist())
    peaks = []
    for num_top in (None, 20):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=num_top).resolve({})
        engine.scheduler.add(Request(request_id=str(num_top), prompt_token_ids=token_ids, params=params))
        while engine.scheduler.has_unfinished:
            deltas = engine.step()
        peaks.append(jax.devices()[0].memory_stats()["peak_bytes_in_use"])
    assert deltas[0].scores.top_ids.shape == (16_382, 20)
    print(json.dumps(peaks))


@pytest.mark.gpu
def test_the_longest_prompt_of_a_large_model_takes_one_tile_of_logits_more_with_its_log_probabilities():
    """In a process that compiles without trying kernels out: XLA tries them on copies of what they multiply."""
    flags = {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    folder = Path(__file__).parent
    environment = os.environ | flags | {"PYTHONPATH": os.pathsep.join([*sys.path, str(folder)])}
    command = [sys.executable, "-c", "import test_score_memory; test_score_memory.print_peaks()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    print(f"peak bytes without and with prompt_logprobs=20: {peaks}")
    assert peaks[1] - peaks[0] <= SCORE_TILE * LLAMA_1B["vocab_size"] * 4, peaks
