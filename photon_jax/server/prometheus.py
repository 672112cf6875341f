"""Endpoint /metrics: what the engine and the server have done, in Prometheus's text format.

Names and meanings are those that dashboards and gateways of vLLM read, after a prefix of our own by default, and some
that only an engine of compiled shapes has.
"""

import itertools
from collections.abc import Iterator, Mapping

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from photon_jax.client.async_llm import AsyncLLM
from photon_jax.histogram import Histogram
from photon_jax.server.state import ServerState
from photon_jax.step_io import StepLayout

_LABELS = ("model_name", "engine")


class ServerCollector(Collector):
    """Reads the numbers when they are asked for; nothing is counted twice."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._prefix = state.settings.metrics_prefix
        self._values = (state.model_name, "0")

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics; those of the engine once it is there."""
        yield self._by_label(
            "admission_rejections",
            "Requests that were refused before a handler saw them.",
            "reason",
            self._state.refused,
        )
        for name, (histogram, text) in self._state.latencies.by_name.items():
            yield self._histogram(name, text, histogram)
        if self._state.engine is not None:
            yield from self._engine(self._state.engine)

    def _engine(self, engine: AsyncLLM) -> Iterator[Metric]:
        stats = engine.stats()
        yield self._gauge("num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for their turn.", stats.num_waiting)
        used = 1.0 - stats.num_free_blocks / stats.num_blocks
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's blocks that sequences hold, 0 to 1.", used)
        yield self._gauge(
            "batch_slots_used", "Share of the sequences that may run which do.", stats.num_running / stats.max_num_seqs
        )
        yield self._cache_info(engine, stats.num_blocks)
        counters = (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_prefix_query_tokens),
            ("prefix_cache_hits", "Tokens found there.", stats.num_prefix_hit_tokens),
            ("prompt_tokens", "Tokens of the prompts whose computation began.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens that were given out.", stats.num_output_tokens),
            ("num_preemptions", "Times that a running sequence lost its blocks.", stats.num_preemptions),
            ("engine_steps", "Steps of the model.", stats.num_steps),
        )
        for name, text, value in counters:
            yield self._counter(name, text, value)
        yield self._by_label("request_success", "Sequences that ended.", "finished_reason", stats.num_finished)
        yield from self._programs(engine)
        gaps, launched = engine.llm.client.token_gaps, engine.llm.started.runner.launched
        yield self._histogram("inter_token_latency_seconds", "Between the tokens of a sequence.", gaps)
        yield self._histogram("iteration_tokens_total", "Tokens computed in a step.", launched.step_tokens)

    def _programs(self, engine: AsyncLLM) -> Iterator[Metric]:
        metrics = engine.llm.metrics()
        padding = metrics.num_places - metrics.num_tokens
        yield self._counter("padding_tokens", "Places for tokens that steps computed for nothing.", padding)
        compiles = self._state.compiles
        yield self._counter(
            "compile_seconds", "Seconds that JAX spent on programs, compiled or fetched.", compiles.seconds
        )
        yield self._counter("programs_compiled", "Programs that JAX compiled or fetched.", compiles.num_compiles)
        layouts = sorted(engine.llm.started.runner.launched.layouts.copy(), key=str)
        family = CounterMetricFamily(
            self._prefix + "compiles", "Step programs, by their sizes.", labels=(*_LABELS, "fn", "bucket")
        )
        for layout in layouts:
            family.add_metric((*self._values, "step", _bucket(layout)), 1)
        yield family

    def _cache_info(self, engine: AsyncLLM, num_blocks: int) -> Metric:
        family = GaugeMetricFamily(
            self._prefix + "cache_config_info",
            "Geometry of the cache; the null block is not counted.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks"),
        )
        block_size = engine.llm.client.engine.scheduler.limits.layout.block_size
        family.add_metric((*self._values, str(block_size), str(num_blocks)), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _by_label(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=_LABELS)
        bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
        family.add_metric(self._values, buckets, histogram.total)
        return family


def _bucket(layout: StepLayout) -> str:
    """Returns the sizes of a step program, and what it computes beside plain tokens, as a word."""
    kinds = ("has_scores", "has_top", "is_greedy", "has_controls")
    extras = [name.partition("_")[2] for name in kinds if getattr(layout, name)]
    return "_".join([f"{layout.num_tokens}x{layout.num_rows}x{layout.table_width}x{layout.num_steps}", *extras])


def router(state: ServerState) -> APIRouter:
    """Returns the endpoints."""
    routes = APIRouter(tags=["health"])
    registry = CollectorRegistry()
    registry.register(ServerCollector(state))

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """The metrics in Prometheus's text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes
