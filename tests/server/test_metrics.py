"""/metrics and the histograms behind it: the names that dashboards look for, with numbers that add up."""

import httpx
import pytest
from helpers.web_process import completion
from helpers.web_server import MODEL, serving, tiny_llm
from prometheus_client.parser import text_string_to_metric_families

from photon_jax.histogram import SECONDS, Histogram
from photon_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput
from photon_jax.request import SamplingParams
from photon_jax.server.latencies import Latencies

GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "batch_slots_used",
)
COUNTERS = (
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success"),
    *("num_preemptions", "admission_rejections", "compiles", "compile_seconds", "padding_tokens"),
)
HISTOGRAMS = (
    *("iteration_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
)


def read(served, prefix="photon_jax:"):
    """Returns the families of /metrics by their names without the prefix."""
    response = httpx.get(f"{served.url}/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(response.text))
    assert all(family.name.startswith(prefix) for family in families)
    return {family.name.removeprefix(prefix): family for family in families}


def value(family, suffix="", **labels):
    """Returns the only sample with these labels."""
    (found,) = (
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    )
    return found


def complete(served, **fields):
    return httpx.post(f"{served.url}/v1/completions", json=completion(**fields), timeout=60).json()


@pytest.fixture(scope="module", params=["photon_jax:", "vllm:"])
def served(request):
    with serving(tiny_llm(), metrics_prefix=request.param) as served:
        yield served


def test_every_name_that_dashboards_and_gateways_look_for_is_there_with_its_type(served):
    families = read(served, served.state.settings.metrics_prefix)
    kinds = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
    for kind, names in kinds.items():
        assert {name: families[name].type for name in names} == dict.fromkeys(names, kind)
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL and sample.labels["engine"] == "0"
    assert value(families["cache_config_info"], block_size="16", num_gpu_blocks="39") == 1


def test_the_numbers_are_those_of_the_requests(served):
    prefix = served.state.settings.metrics_prefix
    before = read(served, prefix)
    complete(served, prompt=range(40), max_tokens=6, ignore_eos=True)
    complete(served, prompt=range(40), max_tokens=5, ignore_eos=True)  # most of it from the prefix cache
    after = read(served, prefix)

    def change(name, suffix, **labels):
        return value(after[name], suffix, **labels) - value(before[name], suffix, **labels)

    assert change("prompt_tokens", "_total") == 80
    assert change("generation_tokens", "_total") == 11
    assert change("prefix_cache_queries", "_total") == 80
    assert change("prefix_cache_hits", "_total") == 32
    assert change("request_success", "_total", finished_reason="length") == 2
    assert change("inter_token_latency_seconds", "_count") == 5 + 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert change(f"{name}_seconds", "_count") == 2
    assert change("iteration_tokens_total", "_sum") == 80 - 32 + 11 - 2
    assert change("iteration_tokens_total", "_count") == change("engine_steps", "_total")
    first, whole = (change(name, "_sum") for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"))
    assert 0 < first < whole
    assert value(after["num_requests_running"]) == 0 and value(after["kv_cache_usage_perc"]) == 0
    assert any(sample.labels["fn"] == "step" for sample in after["compiles"].samples)


def test_refused_requests_are_counted_as_a_lack_of_capacity(served):
    name, labels = "admission_rejections", {"reason": "capacity"}
    prefix = served.state.settings.metrics_prefix
    before = value(read(served, prefix)[name], "_total", **labels)
    served.state.phase = "draining"
    try:
        complete(served)
    finally:
        served.state.phase = "ready"
    assert value(read(served, prefix)[name], "_total", **labels) == before + 1


def test_a_value_on_a_bound_counts_below_it():
    histogram = Histogram((1.0, 2.0))
    for number, count in ((0.0, 1), (1.0, 2), (1.5, 1), (2.0, 1), (2.1, 3)):
        histogram.add(number, count)
    assert histogram.counts == [3, 2, 3]
    assert histogram.total == pytest.approx(11.8)


def output(finish_reason="length", first=0.25, num_tokens=(5, 3)):
    completions = [
        CompletionOutput(
            index=index,
            text="",
            token_ids=tuple(range(count)),
            logprobs=None,
            cumulative_logprob=0.0,
            finish_reason=finish_reason,
            stop_reason=None,
        )
        for index, count in enumerate(num_tokens)
    ]
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1,),
        outputs=tuple(completions),
        sampling_params=SamplingParams(),
        num_cached_tokens=0,
        metrics=RequestMetrics(queue_s=0.125, time_to_first_token_s=first, total_s=1.25, num_preemptions=0),
    )


def test_times_of_a_request_are_told_apart():
    latencies = Latencies()
    latencies.observe(output())
    assert {name: histogram.total for name, (histogram, _) in latencies.by_name.items()} == {
        "time_to_first_token_seconds": 0.25,
        "request_time_per_output_token_seconds": 0.25,
        "e2e_request_latency_seconds": 1.25,
        "request_queue_time_seconds": 0.125,
        "request_inference_time_seconds": 1.125,
        "request_prefill_time_seconds": 0.125,
        "request_decode_time_seconds": 1.0,
    }
    assert all(sum(histogram.counts) == 1 for histogram, _ in latencies.by_name.values())


@pytest.mark.parametrize("fields", [{"finish_reason": "abort"}, {"first": None, "num_tokens": (0,)}])
def test_a_request_that_was_left_has_no_times(fields):
    latencies = Latencies()
    latencies.observe(output(**fields))
    assert not any(sum(histogram.counts) for histogram, _ in latencies.by_name.values())


def test_buckets_begin_at_half_a_millisecond():
    assert SECONDS[0] == 0.0005 and sorted(SECONDS) == list(SECONDS)
