"""Processors of the logits: checked and traced when a request brings one; which can fail in a step that runs."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.controls import LogitsProcessor
from photon_jax.engine.settings import pinned_settings
from photon_jax.errors import RequestError
from photon_jax.ops.controls import PyTree

_CALLS_OUT = ("callback", "debug_print", "ffi_call", "pallas_call")  # in the names of JAX's primitives


def check_processor(processor: LogitsProcessor, vocab_size: int) -> None:
    """Traces a processor, as the step will.

    Raises:
      RequestError: it raises itself, its state holds something else than arrays, or what it returns doesn't fit.
    """
    name = processor.name
    _check_state(processor)
    try:
        result = _trace(processor, vocab_size).out_info
    except Exception as error:  # a function of the caller's may raise anything
        raise RequestError(
            f"logits_processor {name} can't be compiled: {type(error).__name__}: {error}"[:500]
        ) from error
    state, logits = _as_shapes(processor.init_state), jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    if not isinstance(result, tuple) or len(result) != 2:
        raise RequestError(f"logits_processor {name} must return (state, logits), got {_describe(result)}")
    if _describe(result[0]) != _describe(state):
        raise RequestError(
            f"logits_processor {name} must return a state like the first one, {_describe(state)}, got "
            f"{_describe(result[0])}"
        )
    if _describe(result[1]) != _describe(logits):
        raise RequestError(
            f"logits_processor {name} must return logits {_describe(logits)}, got {_describe(result[1])}"
        )


def calls_out(processor: LogitsProcessor, vocab_size: int) -> bool:
    """Returns whether a processor that was checked calls what is none of JAX's own operations, which can't fail."""
    names = _primitives(_trace(processor, vocab_size).jaxpr.jaxpr)
    return any(each in name for name in names for each in _CALLS_OUT)


def _primitives(jaxpr: Any) -> Iterator[str]:
    """Returns the names of a jaxpr's primitives, those of the jaxprs inside of it too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner)


def _trace(processor: LogitsProcessor, vocab_size: int) -> Any:
    logits, number = jax.ShapeDtypeStruct((vocab_size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    with pinned_settings():
        return jax.jit(processor.fn).trace(_as_shapes(processor.init_state), logits, number, number)


def _check_state(processor: LogitsProcessor) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(processor.init_state):
        place = jax.tree_util.keystr(path) or "its top"
        if not _is_array(leaf):
            raise RequestError(
                f"the first state of logits_processor {processor.name} must hold arrays and numbers, got {leaf!r} at "
                f"{place}; give the data of a random key with jax.random.key_data"
            )
        if not _fits_device(leaf):
            raise RequestError(
                f"the first state of logits_processor {processor.name} holds {leaf!r:.100} at {place}, which the "
                "device can't; it has numbers of 32 bits"
            )


def as_arrays(init_state: object) -> PyTree:
    """Returns the state with NumPy arrays as leaves, of the dtypes that they have on the device."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)), init_state
    )


def _as_shapes(init_state: object) -> PyTree:
    """Returns shape and dtype of each leaf."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), as_arrays(init_state))


def _is_array(leaf: object) -> bool:
    if isinstance(leaf, bool | int | float):
        return True
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    return is_array and (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == np.bool_)  # type: ignore[attr-defined]


def _fits_device(leaf: object) -> bool:
    """Returns whether a leaf keeps its value in the dtype that it has on the device."""
    if isinstance(leaf, jax.Array):
        return True
    array = np.asarray(leaf)
    if array.dtype == object or not array.dtype.isnative or array.dtype.itemsize > 8:
        return False
    with np.errstate(over="ignore"):
        placed = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return bool((np.isfinite(placed) == np.isfinite(array)).all())
    return bool((placed == array).all())


def _describe(tree: PyTree) -> str:
    """Returns a PyTree's structure with shape and dtype of each array."""
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree))
