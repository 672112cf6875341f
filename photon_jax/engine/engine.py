"""Engine: scheduler and runner joined in a loop; it takes requests of token ids and gives token deltas."""

import collections
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import jax

from photon_jax.cache.kv_cache import bytes_per_block
from photon_jax.cache.layout import CacheLayout, plan_cache
from photon_jax.config import CacheConfig, EngineConfig
from photon_jax.engine.buckets import BucketSpec, padded_buckets, tiled_buckets
from photon_jax.engine.controls import control_bytes
from photon_jax.engine.metrics import CompileCounter, EngineMetrics, HostClock, MemoryLedger
from photon_jax.engine.runner import ModelRunner, StepHandle
from photon_jax.engine.step import StepConfig
from photon_jax.engine.tile_check import choose_tiles
from photon_jax.errors import ConfigError, EngineDeadError
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params, num_bytes
from photon_jax.request import TokenDelta
from photon_jax.scheduler.plan import StepPlan, StepResult
from photon_jax.scheduler.scheduler import Scheduler

Argument = TypeVar("Argument")
Value = TypeVar("Value")

CPU_CACHE_TOKENS = 16_384  # on a CPU the cache is the host's memory: it is not filled because it is free


class Runner(Protocol):
    """What the engine needs of a model: to start a step, and later to read it."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step."""

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for a step."""

    def reset(self) -> None:
        """Makes the cache anew, empty."""

    def set_params(self, params: Params) -> None:
        """Makes the steps launched from now on use other weights."""


class Engine:
    """The loop: it plans and launches a step while the one before it runs, and then takes that one's results.

    Sampled tokens stay on the device, so a step needs none of the results before it. That a sequence ended at a stop
    id is noticed when the next step is on its way; what this one computes for it is dropped.

    Attributes:
      scheduler: queue, blocks and counters.
      last_plan: of the last step that was launched.
      weights_version: how often the weights were replaced.
      clock: how long the host worked and waited.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, steps_ahead: int = 0) -> None:
        """Joins the two.

        Args:
          steps_ahead: steps that may be on their way when another one is launched; 0 takes turns.
        """
        self.scheduler = scheduler
        self.last_plan = StepPlan(())
        self.clock = HostClock()
        self.weights_version = 0
        self._runner = runner
        self._steps_ahead = steps_ahead
        self._in_flight: collections.deque[tuple[StepPlan, StepHandle]] = collections.deque()
        self._num_restarts = 0
        self._is_planning = False

    def step(self) -> list[TokenDelta]:
        """Launches a step if there is one, and takes the results of the oldest one if enough are on their way.

        Returns what each request got: nothing while the first steps are on their way, or when there is nothing to do.
        When the device fails, or an interrupt comes while it works, its cache is lost: the running requests wait to
        be computed again, to the same tokens, and the next call goes on.

        Raises:
          EngineDeadError: an earlier step broke off while the host planned, so its books can't be trusted.
        """
        with self._planning():
            plan = self.scheduler.schedule()
            if plan.scheduled:
                self.last_plan = plan
                self._in_flight.append((plan, self._on_device(self._runner.launch, plan)))
                self.clock.num_dispatches += 1
            is_due = len(self._in_flight) > self._steps_ahead or not plan.scheduled
            return self._take_oldest() if self._in_flight and is_due else []

    def set_params(self, params: Params) -> None:
        """Replaces the weights; no sequence may have begun. What the prefix cache holds of the old ones is forgotten.

        Args:
          params: of the structure, shapes and dtypes of those before.
        """
        assert not self.scheduler.has_begun, "weights were replaced under sequences that have begun"
        self._runner.set_params(params)
        self.weights_version += 1
        self.scheduler.set_namespace(b"weights %d" % self.weights_version)

    def drain(self) -> list[TokenDelta]:
        """Takes the results of all steps on their way, and launches none."""
        with self._planning():
            return [delta for _ in range(len(self._in_flight)) for delta in self._take_oldest()]

    def _take_oldest(self) -> list[TokenDelta]:
        plan, handle = self._in_flight[0]
        with self.clock.waiting():
            result = self._on_device(self._runner.collect, handle)
        self._in_flight.popleft()
        return self.scheduler.apply(plan, result)

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        if self._is_planning:
            raise EngineDeadError("an earlier step of this engine broke off while it planned; make a new engine")
        self._is_planning = True
        with self.clock.working():
            yield
        self._is_planning = False

    def _on_device(self, call: Callable[[Argument], Value], argument: Argument) -> Value:
        """Returns what the runner returns; if it doesn't, all that is on its way is forgotten."""
        is_done = False
        try:
            value = call(argument)
            is_done = True
            return value
        finally:
            if not is_done:
                self._in_flight.clear()
                self._num_restarts += 1
                self._runner.reset()
                self.scheduler.restart(b"restart %d" % self._num_restarts)
                self._is_planning = False


@dataclasses.dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine on a real model, and what its start found out.

    Attributes:
      seconds: from the first check to the last warm-up program.
      num_programs: step programs compiled ahead.
      num_compiles: programs that the backend compiled or fetched from the compile cache, small ones included.
    """

    engine: Engine
    runner: ModelRunner
    layout: CacheLayout
    max_model_len: int
    seconds: float
    num_programs: int
    num_compiles: int

    def metrics(self) -> EngineMetrics:
        """Returns what the engine has done so far."""
        counters, clock, launched = self.engine.scheduler.counters, self.engine.clock, self.runner.launched
        num_steps = max(counters.num_steps, 1)
        return EngineMetrics(
            num_steps=counters.num_steps,
            num_dispatches=clock.num_dispatches,
            num_tokens=launched.num_tokens,
            occupancy=launched.num_rows / (num_steps * self.engine.scheduler.max_num_seqs),
            padding_share=1.0 - launched.num_tokens / max(launched.num_places, 1),
            host_us_per_step=clock.work_s * 1e6 / num_steps,
            wait_us_per_step=clock.wait_s * 1e6 / num_steps,
            num_preemptions=counters.num_preemptions,
            num_prefix_hit_tokens=counters.num_prefix_hit_tokens,
            num_compiles=len(launched.layouts),
        )

    def memory_ledger(self) -> MemoryLedger:
        """Returns where the device memory goes."""
        cache = self.runner.cache
        return MemoryLedger(
            weight_bytes=num_bytes(self.runner.params),
            cache_bytes=cache.k.nbytes + cache.v.nbytes,
            control_bytes=self.runner.control_bytes,
            workspace_bytes=self.runner.workspace_bytes,
            num_blocks=self.layout.num_blocks,
            block_size=self.layout.block_size,
            max_cached_tokens=self.layout.max_tokens,
            max_request_tokens=min(self.max_model_len, self.layout.max_tokens + 1),
        )


def start_engine(params: Params, model: ModelConfig, config: EngineConfig) -> StartedEngine:
    """Returns an engine that serves `params`: plans the cache, picks kernels, tiles and buckets, warms up.

    Raises:
      ConfigError: no cache fits the memory, or a limit contradicts another.
    """
    begin = time.perf_counter()
    device = jax.devices()[0]
    kernels = config.kernels.resolve(device.platform, head_dim=model.head_dim)
    limits = config.scheduler.resolve(device.platform)
    config = dataclasses.replace(config, scheduler=limits)
    wanted_len = _model_len(config, model)
    layout = plan_cache(
        config.cache,
        bytes_per_block=bytes_per_block(model, config.cache.block_size),
        free_bytes=free_bytes(device) - _control_bytes(config, model),
        max_useful_tokens=_max_useful_tokens(config, wanted_len, device.platform),
    )
    max_model_len = wanted_len if config.max_model_len else min(wanted_len, layout.max_tokens + 1)
    step_config = StepConfig(model=model, kernels=kernels, max_model_len=max_model_len)
    with CompileCounter() as counter:
        buckets = _make_buckets(params, step_config, config, layout)
        runner = ModelRunner(params, step_config, layout, buckets, max_num_seqs=config.scheduler.max_num_seqs)
        if config.warmup == "full":
            ahead = buckets.layouts()
        else:
            # one request needs the largest mixed step, and the smallest decode step once and several times
            ahead = [buckets.plain_layouts()[0], *buckets.smallest_decode_layouts()]
        for step_layout in ahead:
            runner.compile(step_layout)
    scheduler = Scheduler(limits, config.cache, layout, max_model_len=max_model_len)
    engine = Engine(scheduler, runner, steps_ahead=limits.steps_ahead or 0)
    logging.info("kernels %s, buckets %s", kernels, buckets)
    seconds = time.perf_counter() - begin
    return StartedEngine(engine, runner, layout, max_model_len, seconds, len(ahead), counter.num_compiles)


def _model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Returns the longest sequence asked for, by default what the model was made for."""
    stretch = model.rope.factor if model.rope.kind == "dynamic" else 1.0
    limit = int(model.max_position_embeddings * stretch)
    if config.max_model_len is not None and not 2 <= config.max_model_len <= limit:
        raise ConfigError(
            f"max_model_len must be between 2 and the model's {limit} positions, got {config.max_model_len}"
        )
    return config.max_model_len or model.max_position_embeddings


def _make_buckets(params: Params, step_config: StepConfig, config: EngineConfig, layout: CacheLayout) -> BucketSpec:
    max_model_len = min(step_config.max_model_len, layout.max_tokens + 1)
    if step_config.kernels.linear != "reference":
        return padded_buckets(config.scheduler, layout, max_model_len=max_model_len)
    tiles = choose_tiles(params, step_config)
    return tiled_buckets(config.scheduler, layout, max_model_len=max_model_len, tiles=tiles)


def _control_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Returns what the cache leaves free for the state of sampling controls, which comes with the first of them."""
    return control_bytes(vocab_size=model.vocab_size, num_slots=config.scheduler.max_num_seqs + 1)


def _max_useful_tokens(config: EngineConfig, max_model_len: int, platform: str) -> int:
    most = config.scheduler.max_num_seqs * max_model_len
    if platform != "cpu":
        return most
    return min(most, max(CPU_CACHE_TOKENS, config.max_model_len or 0))


def affordable_blocks(model: ModelConfig, cache: CacheConfig) -> int:
    """Returns how many blocks a cache can have, the null block not counted, without taking the machine's memory."""
    device = jax.devices()[0]
    fitting = int(free_bytes(device) * cache.memory_fraction) // bytes_per_block(model, cache.block_size) - 1
    return fitting if device.platform != "cpu" else min(fitting, CPU_CACHE_TOKENS // cache.block_size)


def free_bytes(device: jax.Device) -> int:
    """Returns the memory that a device can still give; on a CPU the host's available memory."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
