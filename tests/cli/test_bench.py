import contextlib
import json
import math
import types

import jax
import pytest
from absl import flags
from helpers.fake_llm import FakeLLM

import photon_jax
from photon_jax.bench import batches
from photon_jax.bench.online import Timeline
from photon_jax.cli import bench
from photon_jax.engine.metrics import CompileCounter
from photon_jax.errors import ConfigError


@pytest.fixture
def llms(monkeypatch):
    made = []

    def make(*args, **kwargs):
        made.append(FakeLLM(*args, **kwargs))
        return made[-1]

    monkeypatch.setitem(photon_jax.__dict__, "LLM", make)
    return made


def run_main(*arguments):
    flag_values = flags.FlagValues()
    bench.define_flags(flag_values)
    flag_values(["photon-bench", "--compile_cache_dir=", *arguments])
    bench.main(flag_values)


def test_each_setting_is_one_line_of_json_that_says_what_ran_where(llms, capsys):
    run_main("--model=/models/tiny/", "--batch_sizes=1,4", "--prompt_len=6", "--output_len=5", "--repeats=2")
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["batch_size"] for record in records] == [1, 4]
    for record in records:
        assert (record["model"], record["prompt_len"], record["output_len"]) == ("tiny", 6, 5)
        assert record["versions"]["jax"] == jax.__version__
        assert record["platform"] == jax.devices()[0].platform
        assert record["device"].endswith(jax.devices()[0].device_kind)
        assert record["output_tokens_per_s"] > 0 and record["prefill_tokens_per_s"] > 0
        assert record["ttft_s"] == 0.01
        assert record["host_peak_rss_bytes"] > 2**20
        assert len(record["total_s_runs"]) == record["repeats"] == 2


def test_every_run_has_new_prompts_and_ends_at_its_length_alone(llms, capsys):
    run_main("--batch_sizes=2", "--prompt_len=16", "--output_len=5", "--repeats=3")
    (llm,) = llms
    batches = [prompts for _, prompts, _ in llm.calls]
    assert len(batches) == 2 * (1 + 3)
    everything = [tuple(prompt) for batch in batches for prompt in batch]
    assert len(set(everything)) == len(everything)
    assert {len(prompt) for prompt in everything} == {16}
    assert [params.max_tokens for _, _, params in llm.calls] == [1, 5] * 4
    assert all(params.ignore_eos and params.temperature == 0.0 for _, _, params in llm.calls)


def test_rates_follow_from_the_times(monkeypatch):
    times = iter([(9.0, 9.0), (9.0, 9.0), (2.0, 0.5), (10.0, 0.7)])
    monkeypatch.setattr(batches, "_time_generate", lambda *_args, **_kwargs: next(times))
    setting = batches.Setting(batch_size=2, prompt_len=10, output_len=5)
    record = batches.bench_batch(FakeLLM(), setting, 1, CompileCounter(), first_seed=0)
    assert record["prefill_tokens_per_s"] == 10.0  # 20 tokens in 2 s
    assert record["decode_tokens_per_s"] == 1.0  # 8 tokens in 8 s
    assert record["output_tokens_per_s"] == 1.0  # 10 tokens in 10 s
    assert (record["ttft_s"], record["total_s"]) == (0.7, 10.0)


def test_limits_make_room_for_the_settings_unless_they_are_given(llms, capsys):
    run_main("--batch_sizes=100", "--prompt_len=6", "--output_len=5", "--repeats=1")
    config = llms[0].engine_config
    assert config.max_model_len == 11
    assert config.scheduler.max_num_seqs == 100
    run_main("--batch_sizes=100", "--prompt_len=6", "--output_len=5", "--repeats=1", "--max_num_seqs=7")
    assert llms[1].engine_config.scheduler.max_num_seqs == 7


@pytest.mark.parametrize("sizes", ["0", "a", "-1", "1,,2", ""])
def test_batch_sizes_are_positive_integers(llms, sizes):
    with pytest.raises(ConfigError, match="batch_sizes"):
        run_main(f"--batch_sizes={sizes}")
    assert not llms


def test_compiles_while_timed_are_told_apart(monkeypatch):
    compiles = CompileCounter()

    def compile_in_warm_up_and_once_more(*_args, num_tokens):
        compiles.num_compiles += next(compiled)
        return 2.0 if num_tokens == 1 else 3.0, 1.0

    compiled = iter([3, 2, 0, 1])
    monkeypatch.setattr(batches, "_time_generate", compile_in_warm_up_and_once_more)
    setting = batches.Setting(batch_size=2, prompt_len=10, output_len=5)
    record = batches.bench_batch(FakeLLM(), setting, 1, compiles, first_seed=0)
    assert (record["num_compiles"], record["num_compiles_while_timed"]) == (6, 1)


@pytest.mark.parametrize("rates", ["0", "a", "-1", "nan", "1,inf", "%", "0%", "-5%"])
def test_rates_are_positive_numbers(llms, rates):
    with pytest.raises(ConfigError, match="--rates must be positive numbers"):
        run_main("--num_requests=3", f"--rates={rates}")
    assert not llms


def test_a_server_is_measured_with_a_mix_alone(llms):
    with pytest.raises(ConfigError, match="--url needs --num_requests"):
        run_main("--url=http://localhost:1/v1", "--rates=1")
    assert not llms


def test_shares_are_of_what_is_served_at_once_and_not_of_a_server(llms, monkeypatch, capsys):
    asked = []

    async def answer_at_once(send, workload, rate, *, max_concurrency):
        assert max_concurrency == 2
        asked.append(rate)
        return [Timeline(sent_at=0.0, deliveries=[(1.0, 1)])]

    monkeypatch.setattr(bench, "bench_offline", lambda *_args, **_kwargs: {"total_s": 0.075})  # 40 requests a second
    monkeypatch.setattr(bench, "run_online", answer_at_once)
    monkeypatch.setattr(bench, "AsyncLLM", lambda llm: contextlib.nullcontext(llm))
    monkeypatch.setattr(bench, "compile_plain", lambda *_args: None)
    monkeypatch.setattr(bench, "describe_steps", lambda *_args: {})
    counted = types.SimpleNamespace(since=lambda before: counted)
    monkeypatch.setattr(FakeLLM, "metrics", lambda self: counted, raising=False)
    monkeypatch.setattr(FakeLLM, "memory_report", lambda self: "", raising=False)
    run_main("--num_requests=3", "--prompt_len=2", "--output_len=2", "--rates=50%,80%,7", "--max_concurrency=2")
    assert asked == [20.0, 32.0, 7.0]
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record.get("rate") for record in records] == [None, *asked]  # first all at once
    with pytest.raises(ConfigError, match="--rates of a server must be requests per second, got '50%'"):
        run_main("--url=http://localhost:1/v1", "--num_requests=3", "--rates=50%")


def test_text_adds_a_stop_string_and_log_probabilities_to_the_same_batch(llms, capsys):
    run_main("--batch_sizes=2", "--prompt_len=16", "--output_len=5", "--repeats=2", "--text")
    (record,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert record["text_output_tokens_per_s"] > 0
    with_text = [(prompts, params) for _, prompts, params in llms[0].calls if params.logprobs is not None]
    assert len(with_text) == 4  # two warm up
    assert all(params.stop == (batches.NEVER,) and params.logprobs == 1 for _, params in with_text)
    assert {(len(prompts), len(prompts[0]), params.max_tokens) for prompts, params in with_text} == {(2, 16, 5)}


@pytest.mark.parametrize(("arguments", "rates"), [((), [math.inf]), (("--rates=1,2",), [1.0, 2.0])])
def test_without_rates_all_requests_come_at_once_to_a_server(llms, monkeypatch, capsys, arguments, rates):
    asked = []

    async def answer_at_once(send, workload, rate, *, max_concurrency):
        assert max_concurrency == 64
        asked.append((rate, len(workload.prompts)))
        return [Timeline(sent_at=0.0, deliveries=[(1.0, 1)])]

    monkeypatch.setattr(bench, "run_online", answer_at_once)
    run_main("--url=http://localhost:1/v1", "--num_requests=3", "--max_concurrency=64", *arguments)
    assert asked == [(rate, 3) for rate in rates]
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["rate"] for record in records] == [None if math.isinf(rate) else rate for rate in rates]


def test_lognormal_mixes_are_chats_unless_other_means_are_given():
    flag_values = flags.FlagValues()
    bench.define_flags(flag_values)
    flag_values(["photon-bench", "--num_requests=5", "--lengths=lognormal"])
    spec = bench.spec_from_flags(flag_values)
    assert (spec.num_requests, spec.prompt_len, spec.output_len) == (5, 220, 180)
    flag_values(["photon-bench", "--lengths=lognormal", "--num_requests=5", "--prompt_len=7"])
    assert (bench.spec_from_flags(flag_values).prompt_len, bench.spec_from_flags(flag_values).output_len) == (7, 180)
