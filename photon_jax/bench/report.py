"""What a benchmark prints: the machine and the versions, quantiles, peak memory."""

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import photon_jax
from photon_jax.errors import ConfigError

QUANTILES = (0.5, 0.9, 0.99, 1.0)


def describe_machine() -> dict[str, object]:
    """Returns the device and the versions of what computes."""
    device = jax.devices()[0]
    return {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "platform": device.platform,
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {
            "photon_jax": photon_jax.__version__,
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def quantiles(values: Sequence[float], digits: int = 5) -> dict[str, float]:
    """Returns p50, p90, p99 and the maximum, which is p100; no values have none."""
    if not values:
        return {}
    found = np.quantile(np.asarray(values, np.float64), QUANTILES)
    return {f"p{100 * q:g}": round(float(value), digits) for q, value in zip(QUANTILES, found, strict=True)}


def plot(records: Sequence[dict[str, Any]], path: str) -> None:
    """Draws records to a picture: latencies over the rate of requests, else output tokens per second of each record.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install 'photon_jax[bench]'") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if all(record.get("rate") for record in records):
        rates = [record["rate"] for record in records]
        for name, label in (("ttft_s_quantiles", "first token"), ("itl_s_quantiles", "between tokens")):
            for key in ("p50", "p99"):
                values = [1e3 * record[name].get(key, float("nan")) for record in records]
                axes.plot(rates, values, marker="o", label=f"{label}, {key}")
        axes.set(xlabel="requests per second", ylabel="ms", yscale="log")
        axes.legend()
    else:
        labels = [str(record.get("batch_size", record.get("num_requests"))) for record in records]
        axes.bar(labels, [record["output_tokens_per_s"] for record in records])
        axes.set(xlabel="requests at once", ylabel="output tokens per second")
    figure.savefig(path)


def peak_rss_bytes() -> int:
    """Returns the most memory that this process has held on the host."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
