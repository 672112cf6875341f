"""Metrics: what an engine compiled and where its memory went, as plain numbers."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax

from photon_jax.scheduler.plan import StepPlan
from photon_jax.step_io import StepLayout

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the programs that JAX's backend compiles or fetches from its compile cache while it is open."""

    def __init__(self) -> None:
        self.num_compiles = 0
        self.seconds = 0.0

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.num_compiles += 1
            self.seconds += duration_secs


class HostClock:
    """Tells the host's work on an engine's steps from its waiting for the device.

    Attributes:
      num_dispatches: steps launched; several decode steps in one dispatch count once.
      work_s: planning, building, launching and applying.
      wait_s: until results were there.
    """

    def __init__(self) -> None:
        self.num_dispatches = 0
        self.work_s = 0.0
        self.wait_s = 0.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Counts the time inside as work, but for the waiting in it."""
        begin, waited = time.perf_counter(), self.wait_s
        yield
        self.work_s += time.perf_counter() - begin - (self.wait_s - waited)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waiting."""
        begin = time.perf_counter()
        yield
        self.wait_s += time.perf_counter() - begin


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineMetrics:
    """What an engine has done since it started, as plain numbers.

    Attributes:
      num_steps: steps of the model; a dispatch of several counts each.
      num_dispatches: programs launched.
      num_tokens: tokens computed, those computed again after a preemption included.
      occupancy: mean rows of a step, as a share of max_num_seqs.
      padding_share: share of the computed token places that held no token.
      host_us_per_step: microseconds of the host's work: planning, building, launching, applying.
      wait_us_per_step: microseconds that the host waited for results.
      num_preemptions: times that a running sequence lost its blocks.
      num_prefix_hit_tokens: tokens found in the prefix cache instead of computed.
      num_compiles: step programs that were compiled ahead, or met for the first time by a step.
    """

    num_steps: int
    num_dispatches: int
    num_tokens: int
    occupancy: float
    padding_share: float
    host_us_per_step: float
    wait_us_per_step: float
    num_preemptions: int
    num_prefix_hit_tokens: int
    num_compiles: int


@dataclasses.dataclass(kw_only=True, slots=True)
class LaunchCounters:
    """What a runner has launched.

    Attributes:
      num_rows, num_tokens: in use, of all steps.
      num_places: tokens that the programs had place for.
      layouts: of the programs that were compiled ahead or launched.
    """

    num_rows: int = 0
    num_tokens: int = 0
    num_places: int = 0
    layouts: set[StepLayout] = dataclasses.field(default_factory=set)

    def count(self, plan: StepPlan, layout: StepLayout) -> None:
        """Adds a launched plan."""
        self.num_rows += plan.num_tokens if plan.num_steps > 1 else len(plan.scheduled)
        self.num_tokens += plan.num_tokens
        self.num_places += layout.num_tokens * layout.num_steps
        self.layouts.add(layout)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLedger:
    """Where an engine's device memory goes.

    Attributes:
      control_bytes: state of sampling controls, made for the first request that has some, and by a full warm-up.
      workspace_bytes: temporary memory of the largest step program compiled so far.
      max_cached_tokens: tokens whose keys and values fit.
      max_request_tokens: longest request that can be served, prompt and output together.
    """

    weight_bytes: int
    cache_bytes: int
    control_bytes: int
    workspace_bytes: int
    num_blocks: int
    block_size: int
    max_cached_tokens: int
    max_request_tokens: int

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"memory: weights {self.weight_bytes / mib:.0f} MiB, "
            f"KV cache {self.cache_bytes / mib:.0f} MiB ({self.num_blocks - 1} blocks of {self.block_size} tokens = "
            f"{self.max_cached_tokens} tokens, and the null block), "
            f"sampling controls {self.control_bytes / mib:.0f} MiB, workspace {self.workspace_bytes / mib:.0f} MiB; "
            f"longest request {self.max_request_tokens} tokens"
        )
