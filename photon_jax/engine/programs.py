"""Step programs: what they are compiled for, and what changed when one is traced that should be there already."""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from photon_jax.cache.kv_cache import abstract_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.engine.placement import engine_sharding, placed_shapes
from photon_jax.engine.settings import pinned_settings
from photon_jax.engine.step import BatchState, StepConfig, jit_step
from photon_jax.engine.token_masks import TokenMasks
from photon_jax.models.params import Params
from photon_jax.ops.controls import control_state_shapes
from photon_jax.step_io import StepLayout, input_fields, packed_size

ARGUMENTS = ("params", "cache", "state", "packed", "processor_states", "token_masks")
MAX_CHANGES = 3  # that a message names
_TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"

Signature = dict[str, tuple[object, ...]]  # name of a leaf -> shape, dtype, weak type, sharding


def abstract_arguments(
    params: Params, config: StepConfig, cache_layout: CacheLayout, layout: StepLayout, *, max_num_seqs: int
) -> tuple[Any, ...]:
    """Returns shapes, dtypes and shardings of the ARGUMENTS of a step in one layout without processors.

    Args:
      params: arrays, or their abstract tree.
    """
    last_token, controls, masks = jax.ShapeDtypeStruct((max_num_seqs + 1,), jnp.int32), None, None
    if layout.has_controls:
        controls = control_state_shapes(max_num_seqs + 1, config.model.vocab_size)
        masks = TokenMasks(vocab_size=config.model.vocab_size).shape(layout.num_rows)
    state = placed_shapes(BatchState(last_token=last_token, controls=controls))  # type: ignore[arg-type]
    cache = placed_shapes(abstract_kv_cache(config.model, cache_layout, config.kv_dtype))
    packed = jax.ShapeDtypeStruct((packed_size(input_fields(layout)),), jnp.int32)
    return placed_shapes(params), cache, state, packed, (), masks


def compile_step(
    arguments: tuple[Any, ...],
    layout: StepLayout,
    config: StepConfig,
    turn: contextlib.AbstractContextManager[object] | None = None,
) -> jax.stages.Compiled:
    """Returns the program for `abstract_arguments`; a later call of the step with such arguments finds it compiled.

    Args:
      turn: held while Python traces, and not while XLA compiles, which takes longer and leaves Python to others.
    """
    with pinned_settings():
        with turn or contextlib.nullcontext():
            lowered = jit_step.lower(*arguments, layout=layout, config=config)
        return lowered.compile()


def signature(arguments: Mapping[str, object]) -> Signature:
    """Returns what a program is compiled for: shape, dtype, weak type and sharding of each leaf, by its name."""
    found: Signature = {}
    for name, tree in arguments.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            sharding = getattr(leaf, "sharding", None) or engine_sharding()
            weak = bool(getattr(leaf, "weak_type", False))
            found[name + jax.tree_util.keystr(path)] = (tuple(leaf.shape), str(leaf.dtype), weak, sharding)
    return found


def describe_changes(expected: Signature, found: Signature) -> str:
    """Returns which leaves differ, and how: "cache.k: dtype float32, compiled for bfloat16"."""
    changes = [f"{name}: missing" for name in expected.keys() - found.keys()]
    changes += [f"{name}: not there when it was compiled" for name in found.keys() - expected.keys()]
    for name in sorted(expected.keys() & found.keys()):
        pairs = zip(("shape", "dtype", "weak type", "sharding"), expected[name], found[name], strict=True)
        changes += [f"{name}: {what} {new}, compiled for {old}" for what, old, new in pairs if old != new]
    if not changes:
        return "no argument; a setting of JAX or a static argument changed"
    more = f", and {len(changes) - MAX_CHANGES} more" if len(changes) > MAX_CHANGES else ""
    return "; ".join(changes[:MAX_CHANGES]) + more


class TraceWatch:
    """Notices whether this thread traces a program while it is open.

    Attributes:
      has_traced: whether it did.
    """

    def __init__(self) -> None:
        self.has_traced = False
        self._thread = threading.get_ident()

    def __enter__(self) -> "TraceWatch":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.has_traced |= event == _TRACE_EVENT and threading.get_ident() == self._thread
