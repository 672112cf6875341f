"""The parts of a split product, added in one order wherever it happens."""

import functools
import operator
from collections.abc import Sequence

import jax


def add_parts(parts: jax.Array | Sequence[jax.Array]) -> jax.Array:
    """Returns ((parts[0] + parts[1]) + parts[2]) + ..., one after the other.

    Args:
      parts: f32[S *], or S arrays of one shape, inside a kernel or outside.
    """
    total: jax.Array = functools.reduce(operator.add, [parts[index] for index in range(len(parts))])
    return total
