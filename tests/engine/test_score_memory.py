"""Scores and most likely tokens cost a step no more memory than the logits of one tile."""

import dataclasses

import pytest
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig, SchedulerConfig
from photon_jax.engine.buckets import TileChoice, padded_buckets, tiled_buckets
from photon_jax.engine.runner import ModelRunner
from photon_jax.engine.step import SCORE_TILE, StepConfig

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
