"""Engine: scheduler and runner joined in a synchronous loop; it takes requests of token ids and gives token deltas."""

import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import Protocol

import jax

from photon_jax.cache.kv_cache import bytes_per_block
from photon_jax.cache.layout import CacheLayout, plan_cache
from photon_jax.config import CacheConfig, EngineConfig
from photon_jax.engine.buckets import BucketSpec, padded_buckets, tiled_buckets
from photon_jax.engine.metrics import CompileCounter, MemoryLedger
from photon_jax.engine.runner import ModelRunner, StepHandle
from photon_jax.engine.step import StepConfig
from photon_jax.engine.tile_check import choose_tiles
from photon_jax.errors import ConfigError, EngineDeadError
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params, num_bytes
from photon_jax.request import TokenDelta
from photon_jax.scheduler.plan import StepPlan, StepResult
from photon_jax.scheduler.scheduler import Scheduler

CPU_CACHE_TOKENS = 16_384  # on a CPU the cache is the host's memory: it is not filled because it is free


class Runner(Protocol):
    """What the engine needs of a model: to start a step, and later to read it."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step."""

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for a step."""

    def reset(self) -> None:
        """Makes the cache anew, empty."""


class Engine:
    """The synchronous loop: schedule, launch, collect, apply.

    Attributes:
      scheduler: queue, blocks and counters.
      last_plan: of the last step that ran.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.last_plan = StepPlan(())
        self._runner = runner
        self._num_restarts = 0
        self._is_planning = False

    def step(self) -> list[TokenDelta]:
        """Runs one step; returns what each request got, nothing when there is nothing to do.

        When the device fails, or an interrupt comes while it works, the step's cache is lost: the running requests
        wait to be computed again, to the same tokens, and the next call goes on.

        Raises:
          EngineDeadError: an earlier step broke off while the host planned, so its books can't be trusted.
        """
        if self._is_planning:
            raise EngineDeadError("an earlier step of this engine broke off while it planned; make a new engine")
        self._is_planning = True
        plan = self.scheduler.schedule()
        deltas = []
        if plan.scheduled:
            self.last_plan = plan
            self._is_planning = False
            result = self._compute(plan)
            self._is_planning = True
            deltas = self.scheduler.apply(plan, result)
        self._is_planning = False
        return deltas

    def _compute(self, plan: StepPlan) -> StepResult:
        is_done = False
        try:
            result = self._runner.collect(self._runner.launch(plan))
            is_done = True
            return result
        finally:
            if not is_done:
                self._num_restarts += 1
                self._runner.reset()
                self.scheduler.restart(b"restart %d" % self._num_restarts)


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

    def memory_ledger(self) -> MemoryLedger:
        """Returns where the device memory goes."""
        cache = self.runner.cache
        return MemoryLedger(
            weight_bytes=num_bytes(self.runner.params),
            cache_bytes=cache.k.nbytes + cache.v.nbytes,
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
    kernels = config.kernels.resolve(device.platform)
    wanted_len = _model_len(config, model)
    layout = plan_cache(
        config.cache,
        bytes_per_block=bytes_per_block(model, config.cache.block_size),
        free_bytes=free_bytes(device),
        max_useful_tokens=_max_useful_tokens(config, wanted_len, device.platform),
    )
    max_model_len = wanted_len if config.max_model_len else min(wanted_len, layout.max_tokens + 1)
    step_config = StepConfig(model=model, kernels=kernels, max_model_len=max_model_len)
    with CompileCounter() as counter:
        buckets = _make_buckets(params, step_config, config, layout)
        runner = ModelRunner(params, step_config, layout, buckets, max_num_seqs=config.scheduler.max_num_seqs)
        ahead = buckets.layouts(has_scores=False)
        if config.warmup == "full":
            ahead += buckets.layouts(has_scores=True)
        else:
            ahead = [ahead[0], ahead[-1]]  # the largest mixed step and the smallest decode step: one request needs both
        for step_layout in ahead:
            runner.compile(step_layout)
    scheduler = Scheduler(config.scheduler, config.cache, layout, max_model_len=max_model_len)
    logging.info("kernels %s, buckets %s", kernels, buckets)
    seconds = time.perf_counter() - begin
    return StartedEngine(
        Engine(scheduler, runner), runner, layout, max_model_len, seconds, len(ahead), counter.num_compiles
    )


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
