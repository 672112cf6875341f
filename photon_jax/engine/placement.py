"""Placement: puts arrays on the engine's device, in the one form that its programs are compiled for."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


def engine_sharding() -> jax.sharding.SingleDeviceSharding:
    """Returns where an engine's arrays are: on the default device."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def place(tree: Tree) -> Tree:
    """Returns the tree with each leaf committed to the engine's device.

    A program is compiled for how its arguments were placed, by the user or by default, and for weak types: here all
    become one. What is on the device already is not copied: the leaf shares its memory. NumPy arrays are copied, so
    that they may be written to afterwards.
    """
    placed: Tree = jax.tree.map(functools.partial(_place_leaf, sharding=engine_sharding()), tree)
    return placed


def placed_shapes(tree: Tree) -> Tree:
    """Returns the tree of `jax.ShapeDtypeStruct` of arrays that `place` returned, or that a program made of them."""
    sharding = engine_sharding()
    abstract: Tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
    return abstract


def _place_leaf(leaf: jax.Array | np.ndarray, *, sharding: jax.sharding.SingleDeviceSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        leaf = jnp.asarray(leaf, leaf.dtype)
    if isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding == sharding:
        return leaf
    # on a CPU the array may be the NumPy memory itself
    placed: jax.Array = jax.device_put(leaf if isinstance(leaf, jax.Array) else np.array(leaf), sharding)
    return placed
