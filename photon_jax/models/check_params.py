"""A check of parameters that come from outside: same structure, shapes and dtypes as the model asks for."""

from typing import Any

import jax
import numpy as np

from photon_jax.errors import CheckpointError
from photon_jax.models.params import Params


def check_params(params: Params, expected: Params) -> None:
    """Raises CheckpointError, which names the first leaf that differs, unless the trees are alike.

    Args:
      params: a tree of JAX or NumPy arrays; of other libraries' arrays none is taken.
      expected: a tree of arrays or of `jax.ShapeDtypeStruct`, such as `abstract_params` returns.
    """
    given, wanted = _leaves(params), _leaves(expected)
    for path, leaf in wanted.items():
        if path not in given:
            raise CheckpointError(f"params have no leaf {path}, expected {_text(leaf)} there")
        if _given_text(given[path]) != _text(leaf):
            raise CheckpointError(f"params: leaf {path} is {_given_text(given[path])}, expected {_text(leaf)}")
    for path, leaf in given.items():
        if path not in wanted:
            raise CheckpointError(f"params have a leaf {path}, {_given_text(leaf)}, expected none there")
    is_same = jax.tree.structure(params) == jax.tree.structure(expected)  # type: ignore[operator]
    if not is_same:  # the leaves are: so another type holds them, or a static field differs
        raise CheckpointError(
            f"params are a tree of another structure: got {jax.tree.structure(params)}, "
            f"expected {jax.tree.structure(expected)}"
        )


def _leaves(tree: Params) -> dict[str, Any]:
    try:
        pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    except (TypeError, ValueError) as error:  # keys of a dictionary that have no order, say
        raise CheckpointError(f"params are no tree that JAX can take apart: {error}") from error
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def _given_text(leaf: Any) -> str:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return f"an abstract {_text(leaf)}"
    if isinstance(leaf, jax.core.Tracer):
        return f"a {_text(leaf)} that a transformation of JAX traces"
    if not isinstance(leaf, jax.Array | np.ndarray):
        return f"a {type(leaf).__module__}.{type(leaf).__qualname__}, which is no array of JAX or NumPy"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return f"a deleted {_text(leaf)} (donated to a function, say)"
    if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        return f"{leaf.dtype.str}{_shape_text(leaf)}, not in this machine's byte order"
    return _text(leaf)


def _text(leaf: Any) -> str:
    """Returns an array's dtype and shape, such as float32[2 3]."""
    return f"{leaf.dtype}{_shape_text(leaf)}"


def _shape_text(leaf: Any) -> str:
    return f"[{' '.join(map(str, leaf.shape))}]"
