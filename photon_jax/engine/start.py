"""The start of an engine on a real model: kernels, buckets, the size of the cache, programs compiled ahead."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import EngineConfig, KernelConfig
from photon_jax.engine.buckets import BucketSpec, TileChoice, padded_buckets, tiled_buckets
from photon_jax.engine.compile_cache import compile_cache
from photon_jax.engine.engine import Engine
from photon_jax.engine.memory import free_bytes, plan_pool
from photon_jax.engine.metrics import CompileCounter, EngineMetrics, MemoryLedger
from photon_jax.engine.programs import abstract_arguments, compile_step
from photon_jax.engine.runner import ModelRunner
from photon_jax.engine.step import StepConfig
from photon_jax.engine.tile_check import choose_tiles
from photon_jax.engine.warmup import compile_all
from photon_jax.engine.weights import StepWeights
from photon_jax.errors import ConfigError
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params, num_bytes
from photon_jax.ops.expansion import expand, expanded_bytes
from photon_jax.scheduler.scheduler import Scheduler
from photon_jax.step_io import StepLayout

# One row is computed as two where XLA has a form of its own for it. Dense products take half as long again then: a step
# of Llama-3.2-1B in bfloat16 on an H200 1.65 against 1.10 ms. Log-probabilities differ in their last bit, which the
# uniform form must not show.
MIN_ROWS_FOR_XLA = 2

# The share of the free memory that int8 weights may take a second time, in the model's dtype: dequantizing them in
# each step of many rows took 0.8 ms on an H200 (Llama-3.2-1B), and the cache has use for the rest.
MAX_EXPANDED = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine on a real model, and what its start found out.

    Attributes:
      config: the settings, those for the scheduler resolved.
      seconds: from the first check to the last warm-up program.
      num_programs: step programs compiled ahead.
      num_compiles: programs that the backend compiled or fetched from the compile cache, small ones included.
      num_fetched: those of them that the compile cache had.
    """

    engine: Engine
    runner: ModelRunner
    config: EngineConfig
    layout: CacheLayout
    max_model_len: int
    seconds: float
    num_programs: int
    num_compiles: int
    num_fetched: int

    def new_scheduler(self) -> Scheduler:
        """Returns a scheduler with the engine's limits, and no requests."""
        return _new_scheduler(self.config, self.layout, self.runner.buckets, self.max_model_len)

    def metrics(self) -> EngineMetrics:
        """Returns what the engine has done so far."""
        counters, clock, launched = self.engine.scheduler.counters, self.engine.clock, self.runner.launched
        return EngineMetrics(
            num_steps=counters.num_steps,
            num_dispatches=clock.num_dispatches,
            num_mixed_steps=launched.num_mixed_steps,
            num_tokens=launched.num_tokens,
            num_prompt_tokens=launched.num_prompt_tokens,
            num_rows=launched.num_rows,
            num_places=launched.num_places,
            host_s=clock.work_s,
            launch_s=clock.launch_s,
            wait_s=clock.wait_s,
            num_preemptions=counters.num_preemptions,
            num_prefix_hit_tokens=counters.num_prefix_hit_tokens,
            num_compiles=len(launched.layouts),
            max_num_seqs=self.engine.scheduler.max_num_seqs,
            kv_bytes_per_token=self.runner.cache.bytes_per_token,
        )

    def memory_ledger(self) -> MemoryLedger:
        """Returns where the device memory goes."""
        cache = self.runner.cache
        return MemoryLedger(
            weight_bytes=num_bytes(self.runner.params),
            expanded_bytes=self.runner.expanded_bytes,
            cache_bytes=cache.nbytes,
            kv_dtype=str(cache.k.dtype),
            control_bytes=self.runner.control_bytes,
            workspace_bytes=self.runner.workspace_bytes,
            free_bytes=free_bytes(jax.devices()[0]),
            num_blocks=self.layout.num_blocks,
            block_size=self.layout.block_size,
            max_cached_tokens=self.layout.max_tokens,
            max_request_tokens=min(self.max_model_len, self.layout.max_tokens + 1),
        )


def start_engine(
    params: Params,
    model: ModelConfig,
    config: EngineConfig,
    on_program: Callable[[int, int], None] = lambda num_done, num_total: None,
) -> StartedEngine:
    """Returns an engine that serves `params`: plans the cache, picks kernels, tiles and buckets, warms up.

    Args:
      on_program: called before the first program that is compiled ahead and after each, with how many are done, and
        of how many.

    Raises:
      ConfigError: no cache fits the memory, or a limit contradicts another.
    """
    begin = time.perf_counter()
    platform = jax.default_backend()
    kernels = config.kernels.resolve(platform, head_dim=model.head_dim)
    config = dataclasses.replace(config, scheduler=config.scheduler.resolve(platform))
    step_config = _step_config(params, model, config, kernels)
    expands = _expands_weights(params, step_config)
    with CompileCounter() as counter, compile_cache(config.compile_cache_dir):
        plan = _plan(params, step_config, config, expands=expands)
        runner = ModelRunner(
            params,
            dataclasses.replace(step_config, max_model_len=plan.max_model_len),
            plan.layout,
            plan.buckets,
            max_num_seqs=config.scheduler.max_num_seqs,
            expands_weights=expands,
            compile_cache_dir=config.compile_cache_dir,
            is_strict=config.strict_compile,
        )
        ahead = programs_ahead(plan.buckets, config)
        compile_all(runner, ahead, on_program=on_program)
    runner.has_warmed_up = True
    scheduler = _new_scheduler(config, plan.layout, plan.buckets, plan.max_model_len)
    engine = Engine(scheduler, runner, steps_ahead=config.scheduler.steps_ahead)
    logging.info("kernels %s, buckets %s", kernels, plan.buckets)
    return StartedEngine(
        engine,
        runner,
        config,
        plan.layout,
        plan.max_model_len,
        seconds=time.perf_counter() - begin,
        num_programs=len(ahead),
        num_compiles=counter.num_compiles,
        num_fetched=counter.num_fetched,
    )


def _new_scheduler(config: EngineConfig, layout: CacheLayout, buckets: BucketSpec, max_model_len: int) -> Scheduler:
    options: dict[str, Any] = {"max_model_len": max_model_len, "step_sizes": buckets.filled_tokens}
    return Scheduler(config.scheduler, config.cache, layout, **options)


def _step_config(params: Params, model: ModelConfig, config: EngineConfig, kernels: KernelConfig) -> StepConfig:
    """Returns what all steps have in common, with the length that is asked for."""
    return StepConfig(
        model=model,
        kernels=kernels,
        max_model_len=_model_len(config, model),
        kv_dtype=config.cache.kv_dtype,
    )


def _expands_weights(params: Params, config: StepConfig) -> bool:
    """Returns whether there are int8 weights that steps of many rows dequantize, and memory to do it once for all."""
    num_bytes = expanded_bytes(params, jnp.dtype(config.model.dtype))
    return config.kernels.linear == "triton" and 0 < num_bytes <= MAX_EXPANDED * free_bytes(jax.devices()[0])


def programs_ahead(buckets: BucketSpec, config: EngineConfig) -> list[StepLayout]:
    """Returns what a warm-up compiles, the largest steps first.

    A lazy one takes what one request needs: the largest mixed step, and the smallest decode step, once and several
    times in a dispatch.
    """
    if config.warmup == "full":
        return buckets.layouts()
    return [buckets.plain_layouts()[0], *buckets.smallest_decode_layouts()]


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What depends on the size of the cache."""

    layout: CacheLayout
    buckets: BucketSpec
    max_model_len: int


def _plan(params: Params, step_config: StepConfig, config: EngineConfig, *, expands: bool) -> _Plan:
    """Returns the cache's layout, and what follows from it.

    The workspace of the largest steps is measured by compiling them for the largest cache; where that leaves too little
    for them, they are compiled again for a smaller one. On a CPU the cache is bounded in any case.
    """
    free, workspace, weights = free_bytes(jax.devices()[0]), 0, StepWeights(params)
    if expands:
        dtype = jnp.dtype(step_config.model.dtype)
        free -= expanded_bytes(params, dtype)
        weights = StepWeights(params, jax.eval_shape(functools.partial(expand, dtype=dtype), params))
    is_tiled = step_config.kernels.linear == "reference"
    tiles = choose_tiles(params, step_config, config.cache.block_size) if is_tiled else None
    plan = None
    while True:
        layout = plan_pool(
            step_config.model, config, max_model_len=step_config.max_model_len, free=free, workspace=workspace
        )
        if plan is not None and plan.layout == layout:
            return plan
        plan = _plan_for(layout, step_config, config, tiles)
        if jax.default_backend() == "cpu":
            return plan
        workspace = max(workspace, _measure_workspace(weights, step_config, config, plan))


def _plan_for(layout: CacheLayout, step_config: StepConfig, config: EngineConfig, tiles: TileChoice | None) -> _Plan:
    longest = min(step_config.max_model_len, layout.max_tokens + 1)
    if tiles is not None:
        buckets = tiled_buckets(config.scheduler, layout, max_model_len=longest, tiles=tiles)
    else:
        linear, is_dense = step_config.kernels.linear, step_config.model.quantization is None
        min_rows = MIN_ROWS_FOR_XLA if linear == "uniform" or (linear == "triton" and is_dense) else 1
        buckets = padded_buckets(config.scheduler, layout, max_model_len=longest, min_rows=min_rows)
    return _Plan(layout, buckets, step_config.max_model_len if config.max_model_len else longest)


def _measure_workspace(weights: StepWeights, step_config: StepConfig, config: EngineConfig, plan: _Plan) -> int:
    """Returns the temporary memory of the steps that need the most, of those compiled ahead."""
    needed, max_num_seqs = 0, config.scheduler.max_num_seqs
    step_config = dataclasses.replace(step_config, max_model_len=plan.max_model_len)
    for step_layout in plan.buckets.largest_layouts(has_rare=config.warmup == "full"):
        params = weights.of(step_layout)
        arguments = abstract_arguments(params, step_config, plan.layout, step_layout, max_num_seqs=max_num_seqs)
        analysis = compile_step(arguments, step_layout, step_config).memory_analysis()
        needed = max(needed, 0 if analysis is None else analysis.temp_size_in_bytes)
    return needed


def _model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Returns the longest sequence asked for, by default what the model was made for."""
    stretch = model.rope.factor if model.rope.kind == "dynamic" else 1.0
    limit = int(model.max_position_embeddings * stretch)
    if config.max_model_len is not None and not 2 <= config.max_model_len <= limit:
        raise ConfigError(
            f"max_model_len must be between 2 and the model's {limit} positions, got {config.max_model_len}"
        )
    return config.max_model_len or model.max_position_embeddings
