"""Metrics: what an engine compiled and where its memory went, as plain numbers."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax

from photon_jax.histogram import COUNTS, Histogram
from photon_jax.scheduler.plan import StepPlan
from photon_jax.step_io import StepLayout

_FETCH_EVENT = "/jax/compilation_cache/cache_hits"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the programs that JAX's backend compiles or fetches from its compile cache while it is open.

    Attributes:
      num_compiles: of both kinds.
      num_fetched: those that the cache had.
      seconds: that they took.
    """

    def __init__(self) -> None:
        self.num_compiles = 0
        self.num_fetched = 0
        self.seconds = 0.0

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._listen_for_hits)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._listen_for_hits)

    def _listen_for_hits(self, event: str, **kwargs: str | int) -> None:
        self.num_fetched += event == _FETCH_EVENT

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.num_compiles += 1
            self.seconds += duration_secs


class HostClock:
    """Tells the host's work on an engine's steps from its waiting for the device.

    Attributes:
      num_dispatches: steps launched; several decode steps in one dispatch count once.
      work_s: planning, building, launching and applying.
      launch_s: of that, building and launching.
      wait_s: until results were there.
    """

    def __init__(self) -> None:
        self.num_dispatches = 0
        self.work_s = 0.0
        self.launch_s = 0.0
        self.wait_s = 0.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Counts the time inside as work, but for the waiting in it."""
        begin, waited = time.perf_counter(), self.wait_s
        yield
        self.work_s += time.perf_counter() - begin - (self.wait_s - waited)

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Counts the time inside, which is work, as launching too."""
        begin = time.perf_counter()
        yield
        self.num_dispatches += 1
        self.launch_s += time.perf_counter() - begin

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
      num_mixed_steps: steps that computed more than one token of some sequence.
      num_tokens: tokens computed, those computed again after a preemption included.
      num_prompt_tokens: those of them that came several of one sequence in a step.
      num_rows: sequences that the steps computed, each counted in each step.
      num_places: tokens that the programs had place for, padding included.
      host_s: the host's work: planning, building, launching, applying.
      launch_s: of that, building the inputs and launching.
      wait_s: what the host waited for results.
      num_preemptions: times that a running sequence lost its blocks.
      num_prefix_hit_tokens: tokens found in the prefix cache instead of computed.
      num_compiles: step programs that were compiled ahead, or met for the first time by a step.
      max_num_seqs: sequences that may run at once.
      kv_bytes_per_token: what the cache takes for a token, keys and values of all layers.
    """

    num_steps: int
    num_dispatches: int
    num_mixed_steps: int
    num_tokens: int
    num_prompt_tokens: int
    num_rows: int
    num_places: int
    host_s: float
    launch_s: float
    wait_s: float
    num_preemptions: int
    num_prefix_hit_tokens: int
    num_compiles: int
    max_num_seqs: int
    kv_bytes_per_token: int

    @property
    def mean_rows(self) -> float:
        """Mean sequences of a step."""
        return self.num_rows / max(self.num_steps, 1)

    @property
    def occupancy(self) -> float:
        """Mean rows of a step, as a share of max_num_seqs."""
        return self.mean_rows / self.max_num_seqs

    @property
    def padding_share(self) -> float:
        """Share of the computed token places that held no token."""
        return 1.0 - self.num_tokens / max(self.num_places, 1)

    @property
    def host_us_per_step(self) -> float:
        """Microseconds of the host's work."""
        return self.host_s * 1e6 / max(self.num_steps, 1)

    @property
    def wait_us_per_step(self) -> float:
        """Microseconds that the host waited for results."""
        return self.wait_s * 1e6 / max(self.num_steps, 1)

    def since(self, before: "EngineMetrics") -> "EngineMetrics":
        """Returns what was done since an earlier state of the same engine."""
        counted = [f.name for f in dataclasses.fields(self) if f.name not in ("max_num_seqs", "kv_bytes_per_token")]
        return dataclasses.replace(self, **{name: getattr(self, name) - getattr(before, name) for name in counted})


@dataclasses.dataclass(kw_only=True, slots=True)
class LaunchCounters:
    """What a runner has launched.

    Attributes:
      num_rows, num_tokens: in use, of all steps.
      num_mixed_steps, num_prompt_tokens: steps in which rows had several tokens, and the tokens of those rows.
      num_places: tokens that the programs had place for.
      layouts: of the programs that were compiled ahead or launched.
      step_tokens: tokens of each step.
    """

    num_rows: int = 0
    num_tokens: int = 0
    num_mixed_steps: int = 0
    num_prompt_tokens: int = 0
    num_places: int = 0
    layouts: set[StepLayout] = dataclasses.field(default_factory=set)
    step_tokens: Histogram = dataclasses.field(default_factory=lambda: Histogram(COUNTS))

    def count(self, plan: StepPlan, layout: StepLayout) -> None:
        """Adds a launched plan."""
        num_tokens = plan.num_tokens
        self.num_rows += num_tokens if plan.num_steps > 1 else len(plan.scheduled)
        self.num_tokens += num_tokens
        self.step_tokens.add(num_tokens / plan.num_steps, plan.num_steps)
        if plan.num_steps == 1 and num_tokens > len(plan.scheduled):
            self.num_mixed_steps += 1
            self.num_prompt_tokens += sum(row.num_new_tokens for row in plan.scheduled if row.num_new_tokens > 1)
        self.num_places += layout.num_tokens * layout.num_steps
        self.layouts.add(layout)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLedger:
    """Where an engine's device memory goes.

    Attributes:
      expanded_bytes: int8 weights in the model's dtype, which steps of many rows read.
      control_bytes: state of sampling controls, made for the first request that has some, and by a full warm-up.
      kv_dtype: of the keys and values; the scales of int8 ones are in cache_bytes.
      workspace_bytes: temporary memory of the largest step program compiled so far.
      free_bytes: what the device can still give; others in the process hold what is missing.
      max_cached_tokens: tokens whose keys and values fit.
      max_request_tokens: longest request that can be served, prompt and output together.
    """

    weight_bytes: int
    expanded_bytes: int
    cache_bytes: int
    kv_dtype: str
    control_bytes: int
    workspace_bytes: int
    free_bytes: int
    num_blocks: int
    block_size: int
    max_cached_tokens: int
    max_request_tokens: int

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"memory: weights {self.weight_bytes / mib:.0f} MiB, "
            f"int8 ones a second time for long steps {self.expanded_bytes / mib:.0f} MiB, "
            f"KV cache {self.cache_bytes / mib:.0f} MiB of {self.kv_dtype} ({self.num_blocks - 1} blocks of "
            f"{self.block_size} tokens = {self.max_cached_tokens} tokens, and the null block), "
            f"sampling controls {self.control_bytes / mib:.0f} MiB, workspace {self.workspace_bytes / mib:.0f} MiB, "
            f"free {self.free_bytes / mib:.0f} MiB; "
            f"longest request {self.max_request_tokens} tokens"
        )
