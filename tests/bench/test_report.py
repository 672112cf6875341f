"""What a benchmark prints and draws."""

import sys

import pytest

from photon_jax.bench.report import plot, quantiles
from photon_jax.errors import ConfigError


def test_quantiles_end_with_the_maximum_and_no_values_have_none():
    found = quantiles([4.0, *[1.0] * 99])
    assert (found["p50"], found["p90"], found["p100"]) == (1.0, 1.0, 4.0)
    assert quantiles([]) == {}


def test_a_missing_plot_library_is_named_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib; pip install 'photon_jax\[bench\]'"):
        plot([], str(tmp_path / "plot.png"))


@pytest.mark.parametrize(
    "records", [[{"rate": 1.0}, {"rate": 2.0}], [{"batch_size": 1}, {"num_requests": 9, "rate": None}]]
)
def test_records_of_both_kinds_are_drawn(monkeypatch, records):
    calls = []

    class Figure:
        def __init__(self, **_):
            pass

        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.append((name, args)) or self

    monkeypatch.setitem(sys.modules, "matplotlib.figure", type("Module", (), {"Figure": Figure}))
    latencies = {"ttft_s_quantiles": {"p50": 0.1, "p99": 0.2}, "itl_s_quantiles": {}, "output_tokens_per_s": 5.0}
    plot([record | latencies for record in records], "latency.svg")
    names = [name for name, _ in calls]
    assert calls[-1] == ("savefig", ("latency.svg",))
    assert names.count("plot") == 4 if "rate" in records[0] else names.count("bar") == 1
