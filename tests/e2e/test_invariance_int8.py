"""The tokens and log-probabilities of a request depend on the request alone, with int8 in all places too."""

import dataclasses

from helpers.invariance import Tally, World, run_schedule, without_extras
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.models.config import QuantizationConfig
from photon_jax.quantization.weights import with_int8_activations

NUM_REQUESTS = 20


def run_schedules(world, requests):
    """Runs ten schedules of requests without what takes programs of its own, which all have to be compiled."""
    world, tally = world.with_requests(requests), Tally()
    world.buckets = dataclasses.replace(world.buckets, mixed_tokens=world.buckets.mixed_tokens[-1:])
    for seed in range(10):
        run_schedule(world, seed, tally)
    assert tally.with_preemption >= 4 and tally.with_chunks >= 4 and tally.with_prefix_hits >= 4, tally


def test_requests_do_not_depend_on_their_company_with_int8_weights():
    quantization = QuantizationConfig(group_size=64, has_embedding=True)  # the layers' 96 inputs are a group and a half
    world = World(num_requests=NUM_REQUESTS, config=tiny_config(quantization=quantization))
    run_schedules(world, [without_extras(request) for request in world.requests])


def test_requests_and_scores_do_not_depend_on_their_company_with_everything_int8():
    """Weights, activations, keys and values."""
    config = tiny_config(quantization=QuantizationConfig(group_size=64, has_embedding=True))
    params = with_int8_activations(tiny_params(config))
    world = World(num_requests=NUM_REQUESTS, config=config, params=params, kv_dtype="int8")
    world.most_steps = (1,)
    plain = [dataclasses.replace(without_extras(request), score=request.score) for request in world.requests]
    assert any(request.score for request in plain)
    run_schedules(world, plain)
