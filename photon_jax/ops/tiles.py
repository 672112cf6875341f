"""Row tiles: row-wise work in fixed tiles in a fixed order, so that a row's bits don't depend on its company."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class RowTiles:
    """How the reference ops walk over rows.

    Attributes:
      size: rows computed at once; every array that is mapped has a multiple of it.
      num_rows: i32[], rows in use; tiles past them are not computed and stay zero.
    """

    size: int = dataclasses.field(metadata={"static": True})
    num_rows: jax.Array  # i32[]


def map_rows(
    fn: Callable[..., tuple[jax.Array, ...]], tiles: RowTiles | None, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns fn(*arrays), computed tile by tile over the leading axis.

    XLA compiles the loop's body by itself: nothing of it is fused with what is around, and one shape of body gives a
    row the same bits wherever it stands. The trip count is data, so padding costs nothing.

    Args:
      fn: maps arrays with equal leading sizes to arrays with that leading size; row i of its results depends on row i
        of its arguments alone.
      tiles: None applies fn to the whole arrays at once.
      arrays: [M *] each.
    """
    if tiles is None:
        return fn(*arrays)
    size, num_rows = tiles.size, arrays[0].shape[0]
    assert num_rows % size == 0, f"{num_rows} rows are no multiple of the row tile {size}"
    results = jax.eval_shape(fn, *(jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype) for a in arrays))

    def body(index: jax.Array, outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = index * size
        parts = fn(*(lax.dynamic_slice_in_dim(array, start, size) for array in arrays))
        return tuple(
            lax.dynamic_update_slice_in_dim(output, part, start, 0) for output, part in zip(outputs, parts, strict=True)
        )

    empty = tuple(jnp.zeros((num_rows, *r.shape[1:]), r.dtype) for r in results)
    outputs: tuple[jax.Array, ...] = lax.fori_loop(0, (tiles.num_rows + size - 1) // size, body, empty)
    return outputs
