"""Model runner: owns weights, cache and batch state on the device, launches steps and collects their results."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.cache.kv_cache import KVCache, abstract_kv_cache, init_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.engine.buckets import BucketSpec
from photon_jax.engine.input_builder import InputBuilder
from photon_jax.engine.step import BatchState, StepConfig, init_batch_state, jit_step
from photon_jax.models.params import Params
from photon_jax.scheduler.plan import StepPlan, StepResult
from photon_jax.step_io import StepLayout, host_views, input_fields, output_fields, packed_size


@dataclasses.dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step whose results are still on the device."""

    plan: StepPlan
    layout: StepLayout
    outputs: jax.Array  # i32[packed_size(output_fields(layout))]


@contextlib.contextmanager
def pinned_settings() -> Iterator[None]:
    """Holds the settings of JAX that would change a step's results, whatever the process has set for itself."""
    with jax.enable_x64(False), jax.threefry_partitionable(True):
        yield


class ModelRunner:
    """Launches steps in the bucket that holds them.

    Attributes:
      cache: keys and values; replaced by every step, the old arrays are dead.
      state: batch state; likewise.
    """

    def __init__(
        self, params: Params, config: StepConfig, cache_layout: CacheLayout, buckets: BucketSpec, *, max_num_seqs: int
    ) -> None:
        self.params = params
        self.config = config
        self.buckets = buckets
        self._cache_layout = cache_layout
        self._max_num_seqs = max_num_seqs
        self.reset()
        self._workspaces: dict[StepLayout, int] = {}

    def reset(self) -> None:
        """Makes cache and state anew; those of a step that broke off may be gone with it."""
        self.cache: KVCache = init_kv_cache(self.config.model, self._cache_layout)
        self.state: BatchState = init_batch_state(self._max_num_seqs)
        self._builder = InputBuilder(block_size=self._cache_layout.block_size, max_num_seqs=self._max_num_seqs)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts the plan's step and returns without waiting for it."""
        layout = self.buckets.choose(plan)
        packed = jax.device_put(self._builder.build(plan, layout))
        with pinned_settings():
            outputs, self.cache, self.state = jit_step(
                self.params, self.cache, self.state, packed, layout=layout, config=self.config
            )
        return StepHandle(plan, layout, outputs)

    def collect(self, handle: StepHandle) -> StepResult:
        """Blocks until the step is done; the only device-to-host copy of the engine."""
        views = host_views(jax.device_get(handle.outputs), output_fields(handle.layout))
        num_rows, num_tokens = len(handle.plan.scheduled), handle.plan.num_tokens
        result = StepResult(views["token_ids"][:num_rows], views["logprobs"][:num_rows])
        if not handle.layout.has_scores:
            return result
        return dataclasses.replace(
            result,
            score_logprobs=views["score_logprobs"][:num_tokens],
            score_is_greedy=views["score_is_greedy"][:num_tokens].astype(np.bool_),
        )

    def compile(self, layout: StepLayout) -> jax.stages.Compiled:
        """Compiles the step of one layout ahead; a later launch in that layout finds it compiled."""
        abstract = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
        packed = jax.ShapeDtypeStruct((packed_size(input_fields(layout)),), jnp.int32)
        cache = abstract_kv_cache(self.config.model, self._cache_layout)
        with pinned_settings():
            lowered = jit_step.lower(
                abstract(self.params), cache, abstract(self.state), packed, layout=layout, config=self.config
            )
            compiled = lowered.compile()
        analysis = compiled.memory_analysis()
        self._workspaces[layout] = analysis.temp_size_in_bytes if analysis is not None else 0
        return compiled

    @property
    def workspace_bytes(self) -> int:
        """Temporary memory of the largest step that was compiled ahead."""
        return max(self._workspaces.values(), default=0)
