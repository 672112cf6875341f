"""Offline runs on a small model: what they count, and that the steps planned without a device are the real ones."""

import dataclasses

import pytest

from photon_jax.bench.batches import Setting, time_replay, time_text
from photon_jax.bench.dry_run import dry_run
from photon_jax.bench.offline import bench_offline, compile_plain
from photon_jax.bench.shapes import SHAPES, shape_config
from photon_jax.bench.workloads import WorkloadSpec, make_workload
from photon_jax.errors import ConfigError
from photon_jax.models.config import QuantizationConfig
from photon_jax.request import SamplingParams

SPEC = WorkloadSpec(num_requests=7, lengths="uniform", prompt_len=8, output_len=5)


def test_a_run_says_what_it_served_and_where_the_time_went(llm):
    record = bench_offline(llm, SPEC, repeats=2, replays=True)  # strict: all it needs was compiled ahead
    workload = make_workload(SPEC, vocab_size=2, seed=0)
    assert record["num_output_tokens"] == workload.num_output_tokens
    assert record["num_prompt_tokens"] == workload.num_prompt_tokens
    assert len(record["total_s_runs"]) == 2 and record["num_compiles_while_timed"] == 0
    assert record["total_s"] == max(record["total_s_runs"])  # of two runs, not the one that flatters
    assert record["output_tokens_per_s"] > 0 and record["share_of_replay"] > 0
    assert 1.0 <= record["mean_rows"] <= 3.0 and 0.0 <= record["padding_share"] < 1.0
    parts = sum(record[f"{name}_us_per_step"] for name in ("host", "wait", "client"))
    assert parts == pytest.approx(record["step_us"], abs=1.0)
    assert record["launch_us_per_step"] < record["host_us_per_step"]


def test_the_steps_of_a_dry_run_are_those_that_the_engine_takes(llm):
    workload = make_workload(SPEC, vocab_size=llm.config.vocab_size, seed=5)
    planned = [layout for layout, _ in dry_run(llm.started, workload)]
    bench_offline(llm, SPEC, repeats=1)
    runner, before = llm.started.runner, llm.metrics()
    met = []
    dispatch = runner.dispatch
    runner.dispatch = lambda layout, *rest: met.append(layout) or dispatch(layout, *rest)
    bench_offline(llm, SPEC, repeats=1)
    del runner.dispatch
    assert met == planned * 2  # once to warm up
    assert llm.metrics().since(before).num_dispatches == len(met)


def test_the_steps_of_a_batch_are_timed_without_scheduler_too(llm):
    setting = Setting(batch_size=3, prompt_len=7, output_len=5)
    runner, met = llm.started.runner, []
    dispatch = runner.dispatch
    runner.dispatch = lambda layout, *rest: met.append(layout) or dispatch(layout, *rest)
    record = time_replay(llm, setting, repeats=2)
    del runner.dispatch
    one, whole = (
        [layout for layout, _ in dry_run(llm.started, make_workload(spec, vocab_size=2, seed=0))]
        for spec in (dataclasses.replace(setting.spec, output_len=1), setting.spec)
    )
    assert met == one * 3 + whole * 3  # once to warm up
    assert record["replay_output_tokens_per_s"] == pytest.approx(15 / record["replay_s"], rel=0.05)
    (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True), progress=False)
    assert len(output.outputs[0].token_ids) == 3  # the engine serves on


def test_text_cannot_be_timed_without_a_tokenizer(llm):
    with pytest.raises(ConfigError, match="--text needs a model with a tokenizer"):
        time_text(llm, Setting(batch_size=1, prompt_len=2, output_len=2), repeats=1, first_seed=0)


def test_a_second_wave_finds_the_prefix_that_it_shares_with_the_first(llm):
    spec = WorkloadSpec(num_requests=3, prompt_len=4, output_len=2, mix="shared_prefix", prefix_len=16)
    before = llm.metrics()
    record = bench_offline(llm, spec, repeats=1)
    assert record["first_wave_ttft_s"] > 0 and record["second_wave_ttft_s"] > 0
    # each second wave finds the block that all of its requests begin with
    assert llm.metrics().since(before).num_prefix_hit_tokens >= 3 * 16


def test_every_step_of_greedy_requests_can_be_compiled_ahead(llm):
    compile_plain(llm, progress=False)
    assert set(llm.started.runner.buckets.plain_layouts()) <= llm.started.runner.launched.layouts


def test_shapes_have_the_dtype_and_the_quantization_that_are_asked_for():
    config = shape_config("llama-3.2-1b", "bfloat16", QuantizationConfig(group_size=128, has_embedding=True))
    assert (config.dtype, config.num_layers, config.quantization.group_size) == ("bfloat16", 16, 128)
    with pytest.raises(ConfigError, match=f"shape must be one of {', '.join(sorted(SHAPES))}, got 'odd'"):
        shape_config("odd", "auto")
