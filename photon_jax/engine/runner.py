"""Model runner: owns weights, cache and batch state on the device, launches steps and collects their results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.cache.kv_cache import KVCache, abstract_kv_cache, init_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.engine.buckets import BucketSpec
from photon_jax.engine.controls import ControlSlots, StepProcessors
from photon_jax.engine.input_builder import InputBuilder
from photon_jax.engine.metrics import LaunchCounters
from photon_jax.engine.placement import place, placed_shapes
from photon_jax.engine.settings import pinned_settings
from photon_jax.engine.step import BatchState, StepConfig, init_batch_state, jit_step
from photon_jax.models.params import Params
from photon_jax.scheduler.plan import StepPlan, StepResult
from photon_jax.step_io import StepLayout, host_views, input_fields, output_fields, packed_size


@dataclasses.dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step whose results are still on the device."""

    plan: StepPlan
    layout: StepLayout
    outputs: jax.Array  # i32[num_steps*packed_size(output_fields(layout))]


class ModelRunner:
    """Launches steps in the bucket that holds them.

    Attributes:
      params: weights; they may be the caller's own arrays, and are never donated.
      cache: keys and values; replaced by every step, the old arrays are dead.
      state: batch state; likewise.
      launched: what was launched.
    """

    def __init__(
        self, params: Params, config: StepConfig, cache_layout: CacheLayout, buckets: BucketSpec, *, max_num_seqs: int
    ) -> None:
        self.set_params(params)
        self.config = config
        self.buckets = buckets
        self._cache_layout = cache_layout
        self._max_num_seqs = max_num_seqs
        self._control_slots = ControlSlots(vocab_size=config.model.vocab_size, num_slots=max_num_seqs + 1)
        self.reset()
        self.launched = LaunchCounters()
        self._workspaces: dict[StepLayout, int] = {}

    def set_params(self, params: Params) -> None:
        """Makes the steps launched from now on use other weights, of the same structure, shapes and dtypes."""
        self.params: Params = place(params)

    def reset(self) -> None:
        """Makes cache and state anew; those of a step that broke off may be gone with it."""
        self.cache: KVCache = place(init_kv_cache(self.config.model, self._cache_layout))
        self.state: BatchState = place(init_batch_state(self._max_num_seqs))
        self._builder = InputBuilder(block_size=self._cache_layout.block_size, max_num_seqs=self._max_num_seqs)
        with pinned_settings():
            self._control_slots.reset()

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts the plan's step and returns without waiting for it."""
        layout, processors = self.buckets.choose(plan), StepProcessors()
        with pinned_settings():
            self._control_slots.release()
            if layout.has_controls:
                processors = self._prepare_controls(plan)
                layout = dataclasses.replace(layout, processors=processors.fns)
            packed = jax.device_put(self._builder.build(plan, layout, processors.row_ids))
            outputs, self.cache, state, states = jit_step(
                self.params,
                self.cache,
                self._state_for(layout),
                packed,
                processors.states,
                layout=layout,
                config=self.config,
            )
        outputs.copy_to_host_async()
        self.launched.count(plan, layout)
        self.state = dataclasses.replace(state, controls=state.controls or self.state.controls)
        self._control_slots.launched(processors, states)
        return StepHandle(plan, layout, outputs)

    def _prepare_controls(self, plan: StepPlan) -> StepProcessors:
        """Fills the slots of rows with controls; returns their processors."""
        self._make_control_state()
        assert self.state.controls is not None
        self.state = dataclasses.replace(self.state, controls=self._control_slots.fill(self.state.controls, plan))
        return self._control_slots.processors(plan)

    def _make_control_state(self) -> None:
        if self.state.controls is None:
            self.state = dataclasses.replace(self.state, controls=self._control_slots.init_state())

    def _state_for(self, layout: StepLayout) -> BatchState:
        """Returns the state as the layout's program takes it: the control state stays out of steps without controls."""
        return self.state if layout.has_controls else BatchState(last_token=self.state.last_token)

    def collect(self, handle: StepHandle) -> StepResult:
        """Blocks until the step is done; the only device-to-host copy of the engine."""
        fields, packed = output_fields(handle.layout), jax.device_get(handle.outputs)
        steps = [host_views(part, fields) for part in np.split(packed, handle.layout.num_steps)]
        if handle.layout.processors:
            with pinned_settings():
                self._control_slots.collected()
        num_rows, num_tokens = len(handle.plan.scheduled), handle.plan.num_tokens
        counts = {name: num_tokens if name.startswith("score_") else num_rows for name in steps[0]}
        if len(steps) == 1:
            used = {name: steps[0][name][:count] for name, count in counts.items()}
        else:
            used = {name: np.concatenate([views[name][:count] for views in steps]) for name, count in counts.items()}
        if "score_is_greedy" in used:
            used["score_is_greedy"] = used["score_is_greedy"].astype(np.bool_)
        return StepResult(**used)

    def compile(self, layout: StepLayout) -> jax.stages.Compiled:
        """Compiles the step of one layout ahead; a later launch in that layout finds it compiled."""
        packed = jax.ShapeDtypeStruct((packed_size(input_fields(layout)),), jnp.int32)
        cache = placed_shapes(abstract_kv_cache(self.config.model, self._cache_layout))
        with pinned_settings():
            if layout.has_controls:
                self._make_control_state()
            state = placed_shapes(self._state_for(layout))
            lowered = jit_step.lower(
                placed_shapes(self.params), cache, state, packed, (), layout=layout, config=self.config
            )
            compiled = lowered.compile()
        self.launched.layouts.add(layout)
        analysis = compiled.memory_analysis()
        self._workspaces[layout] = analysis.temp_size_in_bytes if analysis is not None else 0
        return compiled

    @property
    def control_bytes(self) -> int:
        """Memory of the sampling controls' state, as far as it was made, processors not included."""
        return sum(array.nbytes for array in jax.tree.leaves(self.state.controls))

    @property
    def workspace_bytes(self) -> int:
        """Temporary memory of the largest step that was compiled ahead."""
        return max(self._workspaces.values(), default=0)
