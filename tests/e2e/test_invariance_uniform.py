"""With `invariant` the bits of a request depend on the request alone on a GPU too; a CPU interprets its kernels."""

import collections
import dataclasses

import numpy as np
import pytest
from helpers.interpreted import interpret_kernels
from helpers.invariance import MAX_NUM_SEQS, NUM_BLOCKS, STOP_IDS, Result, World, take, without_extras
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import CacheConfig, KernelConfig, SchedulerConfig
from photon_jax.engine.buckets import padded_buckets
from photon_jax.engine.engine import Engine
from photon_jax.engine.runner import ModelRunner
from photon_jax.engine.step import StepConfig
from photon_jax.models.config import QuantizationConfig
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.scheduler import Scheduler

UNIFORM = KernelConfig(invariant=True).resolve("gpu", head_dim=16)
INT8 = QuantizationConfig(group_size=32, has_embedding=False)


def run(engine, requests):
    """Returns what each request got, by its name."""
    results = collections.defaultdict(Result)
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_unfinished:
        take(engine.step(), results)
    return dict(results)


def test_interpreted_requests_do_not_depend_on_company_chunks_and_preemption(monkeypatch):
    """A request alone goes token by token through a program of six rows; in company prompts go through one of 32."""
    interpret_kernels(monkeypatch)
    config = tiny_config(quantization=INT8, has_qkv_bias=True)
    world = World(config=config, params=tiny_params(config), kernels=UNIFORM)
    sizes = {"decode_rows": (MAX_NUM_SEQS,), "mixed_tokens": (32,)}
    world.buckets = dataclasses.replace(world.buckets, **sizes, has_greedy_programs=False)
    plain = [without_extras(request) for request in world.requests]
    long = [each for each in plain if len(each.prompt_token_ids) > 20 and each.params.max_tokens > 1]
    is_random = [each.params.temperature > 0.0 and each.params.top_p < 1.0 for each in long]
    requests = [long[is_random.index(True)], long[is_random.index(True) + 1], long[is_random.index(False)]]
    engine, _ = world.engine(num_blocks=28, max_num_seqs=MAX_NUM_SEQS, budget=32, prefix_caching=False)
    together = run(engine, requests)
    counters = engine.scheduler.counters
    assert counters.num_preemptions > 0 and counters.num_chunks > 0
    for request in requests:
        alone, _ = world.engine(num_blocks=NUM_BLOCKS, max_num_seqs=1, budget=1, prefix_caching=False)
        assert run(alone, [request]) == {request.request_id: together[request.request_id]}


def make_requests(count):
    rng = np.random.default_rng(0)
    requests = []
    for index in range(count):
        params = SamplingParams(temperature=(0.0, 0.8)[index % 2], top_p=(1.0, 0.9)[index // 2 % 2], max_tokens=30)
        prompt = tuple(rng.integers(256, size=rng.integers(1, 80)).tolist())
        options = {"params": params.resolve({}), "stop_token_ids": STOP_IDS, "seed": (index, 0)}
        requests.append(Request(request_id=f"r{index}", prompt_token_ids=prompt, **options))
    return requests


def check_engines(config, *, kv_dtype="auto"):
    """The same requests in a crowd, crowded so that they are chunked and preempted, and some of them alone."""
    layout = CacheLayout(num_blocks=400, block_size=16)
    limits = SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=256)
    buckets = padded_buckets(limits, layout, max_model_len=200)
    widths = buckets.table_widths[-1:]
    buckets = dataclasses.replace(buckets, decode_rows=(2, 20), mixed_tokens=(32, 256), table_widths=widths)
    step_config = StepConfig(model=config, kernels=UNIFORM, max_model_len=200, kv_dtype=kv_dtype)

    def engine(num_blocks, max_num_seqs, budget, num_steps=1):
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_steps_per_dispatch=num_steps),
            CacheConfig(block_size=16, num_blocks=num_blocks, enable_prefix_caching=False),
            CacheLayout(num_blocks=num_blocks, block_size=16),
            max_model_len=200,
        )
        runner = ModelRunner(tiny_params(config), step_config, layout, buckets, max_num_seqs=20)
        return Engine(scheduler, runner, steps_ahead=1)

    requests = make_requests(20)
    expected = run(engine(400, 20, 256, num_steps=4), requests)
    crowded = engine(16, 20, 24)
    assert run(crowded, requests) == expected
    counters = crowded.scheduler.counters
    assert counters.num_preemptions > 0 and counters.num_chunks > 0
    for request in requests[:6]:
        assert run(engine(400, 1, 256), [request]) == {request.request_id: expected[request.request_id]}


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_gpu_requests_do_not_depend_on_company_chunks_and_preemption(form):
    if form == "bfloat16":
        check_engines(tiny_config(dtype="bfloat16"))
    else:
        int8 = dataclasses.replace(INT8, has_embedding=True)
        check_engines(tiny_config(dtype="bfloat16", quantization=int8), kv_dtype="int8")
