"""Model runner: owns weights, cache and batch state on the device, launches steps and collects their results."""

import dataclasses
import logging
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.cache.kv_cache import KVCache, init_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.controls import LogitsProcessor
from photon_jax.engine.buckets import BucketSpec
from photon_jax.engine.compile_cache import compile_cache
from photon_jax.engine.controls import ControlSlots, StepProcessors
from photon_jax.engine.foresight import Foresight
from photon_jax.engine.input_builder import InputBuilder
from photon_jax.engine.metrics import LaunchCounters
from photon_jax.engine.placement import place
from photon_jax.engine.processors import calls_out
from photon_jax.engine.programs import (
    ARGUMENTS,
    TraceWatch,
    abstract_arguments,
    compile_step,
    describe_changes,
    signature,
)
from photon_jax.engine.settings import pinned_settings
from photon_jax.engine.stand_ins import are_enough, find_stand_in
from photon_jax.engine.step import BatchState, StepConfig, init_batch_state, jit_step
from photon_jax.engine.token_masks import TokenMasks
from photon_jax.engine.weights import StepWeights
from photon_jax.errors import ConfigError
from photon_jax.models.params import Params
from photon_jax.ops.controls import States
from photon_jax.ops.expansion import expanded_bytes
from photon_jax.request import Request
from photon_jax.scheduler.plan import StepPlan, StepResult
from photon_jax.step_io import StepLayout, host_views, output_fields

_logger = logging.getLogger(__name__)


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
      has_warmed_up: whether all that is to be compiled ahead was.
    """

    def __init__(
        self,
        params: Params,
        config: StepConfig,
        cache_layout: CacheLayout,
        buckets: BucketSpec,
        *,
        max_num_seqs: int,
        expands_weights: bool = False,
        compile_cache_dir: str | None = None,
        is_strict: bool = False,
    ) -> None:
        """Takes the weights and makes the cache.

        Args:
          expands_weights: there is memory for the int8 weights in the model's dtype too, see `StepWeights`.
          compile_cache_dir: where programs are kept that are compiled when a step needs them.
          is_strict: whether a program that is compiled after the warm-up is an error.
        """
        self.has_warmed_up = False
        self._compile_cache_dir = compile_cache_dir
        self._is_strict = is_strict
        self.config = config
        self._expands_weights = expands_weights
        self.set_params(params)
        self._compiled_for = self._weights.shapes()
        self.buckets = buckets
        self._cache_layout = cache_layout
        self._max_num_seqs = max_num_seqs
        self._control_slots = ControlSlots(vocab_size=config.model.vocab_size, num_slots=max_num_seqs + 1)
        self.reset()
        self.launched = LaunchCounters()
        self._workspaces: dict[StepLayout, int] = {}
        self._foresight = Foresight(buckets, cache_layout)
        self._coming: frozenset[StepLayout] = frozenset()  # programs that others compile
        self._tracing = threading.Lock()  # one traces at a time, so that steps that are launched meanwhile get turns

    def set_params(self, params: Params) -> None:
        """Makes the steps launched from now on use other weights, of the same structure, shapes and dtypes."""
        self.params: Params = place(params)
        self._weights = StepWeights(self.params)  # those of before give their memory back first
        if self._expands_weights:
            with pinned_settings():
                self._weights = StepWeights.expanding(self.params, self.config.model.dtype)

    def deleted_leaf(self) -> str | None:
        """Returns the key path of one of the weights that does not exist any longer, None where all do."""
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        return next((jax.tree_util.keystr(path) for path, leaf in leaves if leaf.is_deleted()), None)

    def calls_out(self, processor: LogitsProcessor) -> bool:
        """Returns whether a processor calls what can fail while it runs."""
        return calls_out(processor, self.config.model.vocab_size)

    def reset(self) -> None:
        """Makes cache and state anew; those of a step that broke off may be gone with it."""
        self.cache: KVCache = place(init_kv_cache(self.config.model, self._cache_layout, self.config.kv_dtype))
        self.state: BatchState = place(init_batch_state(self._max_num_seqs))
        self._token_masks = TokenMasks(vocab_size=self.config.model.vocab_size)
        self._builder = InputBuilder(block_size=self._cache_layout.block_size, max_num_seqs=self._max_num_seqs)
        with pinned_settings():
            self._control_slots.reset()

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts the plan's step and returns without waiting for it."""
        layout, processors, token_masks = self._choose(plan), StepProcessors(), None
        with pinned_settings():
            self._control_slots.release()
            if layout.has_controls:
                processors = self._prepare_controls(plan)
                layout = dataclasses.replace(layout, processors=processors.fns)
                token_masks = self._token_masks.upload(plan, layout.num_rows)
            packed = self._builder.build(plan, layout, processors.row_ids)
            outputs, states = self.dispatch(layout, packed, processors.states, token_masks)
        self.launched.count(plan, layout)
        self._control_slots.launched(processors, states)
        return StepHandle(plan, layout, outputs)

    def _choose(self, plan: StepPlan) -> StepLayout:
        """Returns the smallest layout that holds the plan, or one that stands in for it while it is compiled."""
        layout = self.buckets.choose(plan)
        if layout in self._coming and layout not in self.launched.layouts:
            return find_stand_in(layout, list(self.launched.layouts)) or layout
        return layout

    def dispatch(
        self,
        layout: StepLayout,
        packed: np.ndarray,  # i32[packed_size(input_fields(layout))]
        processor_states: States = (),
        token_masks: jax.Array | None = None,
    ) -> tuple[jax.Array, States]:
        """Starts the step of packed inputs; returns its results, which are on their way, and the processor states."""
        is_new = layout not in self.launched.layouts
        if is_new and self.has_warmed_up:
            self._note_new(layout)
        with pinned_settings(), compile_cache(self._compile_cache_dir if is_new else None):
            state = self._state_for(layout)
            params = self._weights.of(layout)
            arguments = (params, self.cache, state, jax.device_put(packed), processor_states, token_masks)
            with TraceWatch() as watch:
                outputs, self.cache, state, states = jit_step(*arguments, layout=layout, config=self.config)
        if watch.has_traced and not is_new:
            self._note_trace(layout, arguments)
        self.launched.layouts.add(layout)
        with jax.transfer_guard_device_to_host("allow"):  # the one copy of a step; a caller may forbid all others
            outputs.copy_to_host_async()
        self.state = dataclasses.replace(state, controls=state.controls or self.state.controls)
        return outputs, states

    def _note_new(self, layout: StepLayout) -> None:
        """Says, or raises, that a step comes in a layout that was not compiled ahead."""
        message = f"a step of {layout} was not compiled ahead; full warm-up compiles every layout without processors"
        if self._is_strict:
            raise ConfigError(f'{message}; give warmup="full", or leave strict_compile out')
        _logger.info("%s; compiling it now", message)

    def _note_trace(self, layout: StepLayout, arguments: tuple[object, ...]) -> None:
        """Says, or raises, which argument made a known program be traced again."""
        expected = self._abstract_arguments(layout)
        changes = describe_changes(
            signature(dict(zip(ARGUMENTS, expected, strict=True))),
            signature(dict(zip(ARGUMENTS, arguments, strict=True))),
        )
        message = f"a step of {layout} was traced again; {changes}"
        if self._is_strict:
            raise ConfigError(f"strict_compile: {message}")
        _logger.warning(message)

    def _prepare_controls(self, plan: StepPlan) -> StepProcessors:
        """Fills the slots of rows with controls; returns their processors."""
        self.make_control_state()
        assert self.state.controls is not None
        self.state = dataclasses.replace(self.state, controls=self._control_slots.fill(self.state.controls, plan))
        return self._control_slots.processors(plan)

    def make_control_state(self) -> None:
        """Makes the state of sampling controls if there is none yet."""
        if self.state.controls is None:
            with pinned_settings():
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
        arguments = self._abstract_arguments(layout)
        compiled = compile_step(arguments, layout, self.config, self._tracing)
        self.launched.layouts.add(layout)
        analysis = compiled.memory_analysis()
        self._workspaces[layout] = analysis.temp_size_in_bytes if analysis is not None else 0
        return compiled

    def _abstract_arguments(self, layout: StepLayout) -> tuple[Any, ...]:
        params, sizes = self._compiled_for.of(layout), {"max_num_seqs": self._max_num_seqs}
        return abstract_arguments(params, self.config, self._cache_layout, layout, **sizes)

    def missing(self, requests: Sequence[Request], num_prompt_tokens: int) -> list[StepLayout]:
        """Returns the layouts that steps of these requests may come in and that would be compiled late, in their order.

        Args:
          num_prompt_tokens: of prompts that are not computed yet.
        """
        if self._is_strict:
            return []
        return self._foresight.missing(requests, num_prompt_tokens, self.launched.layouts)

    def announce(self, layouts: Sequence[StepLayout]) -> bool:
        """Takes note of all programs that others compile from now on, in place of those of the call before.

        A step that would come in one of them comes in a larger one that is there, and none has several steps while one
        of several is among them. Returns whether there is a larger one for all steps.
        """
        self._coming = frozenset(layouts)
        return are_enough(list(self.launched.layouts), layouts)

    @property
    def allows_several(self) -> bool:
        """Whether a plan may have several steps: not while others compile programs for that."""
        return not any(layout.num_steps > 1 for layout in self._coming)

    def compile_late(self, layout: StepLayout) -> None:
        """Compiles the step of one layout after the warm-up, unless it was meanwhile; any thread may, steps go on."""
        if layout not in self.launched.layouts:
            with compile_cache(self._compile_cache_dir):
                if layout.has_controls and self.state.controls is None:
                    with pinned_settings(), self._tracing:
                        self._control_slots.compile_ahead()
                self.compile(layout)

    @property
    def expanded_bytes(self) -> int:
        """Memory of the int8 weights' dequantized form."""
        return expanded_bytes(self.params, jnp.dtype(self.config.model.dtype)) if self._expands_weights else 0

    @property
    def control_bytes(self) -> int:
        """Memory of the sampling controls' state, as far as it was made, processors not included."""
        return sum(array.nbytes for array in jax.tree.leaves(self.state.controls))

    @property
    def workspace_bytes(self) -> int:
        """Temporary memory of the largest step that was compiled ahead."""
        return max(self._workspaces.values(), default=0)
