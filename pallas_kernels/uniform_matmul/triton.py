"""Products in one form for any number of rows, Pallas with the Triton backend: Ampere and later.

Letters: M rows, O outputs, I inputs, g inputs per scale. One program multiplies a tile of rows with a tile of outputs,
in steps over the inputs that always come in one order. Rows beyond the last one are zeros, tiles and splits don't
depend on M, and a row of a product of tiles doesn't depend on the others: so a row has the same bits alone, in a crowd
and in a whole prompt. Weights are the left operand, which may come from registers: int8 ones are converted there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.uniform_matmul.tiles import TileConfig, choose_tiles


def _kernel(
    x_ref,  # [M I]
    w_ref,  # [O I], int8 or dense, or [I O]
    *refs,  # scale [O ceil(I/g)] of int8 weights; the output f32[splits M O], or gated [M O/2]
    tiles: TileConfig,
    group_size: int,
    has_inputs_first: bool,
    is_gated: bool,
):
    *scale_refs, out_ref = refs
    (num_rows, num_inputs), num_outputs = x_ref.shape, out_ref.shape[-1]
    chunk = min(group_size or tiles.tile_k, tiles.tile_k)  # inputs that share a scale
    steps = pl.cdiv(num_inputs, tiles.tile_k * tiles.k_splits)
    first_step = pl.program_id(2) * steps
    rows = pl.program_id(0) * tiles.tile_m + lax.iota(jnp.int32, tiles.tile_m)
    outputs = pl.program_id(1) * tiles.tile_n + lax.iota(jnp.int32, tiles.tile_n)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def load_weights(half, inputs):  # [tile_n chunk]
        is_input = inputs < num_inputs
        if has_inputs_first:
            mask = is_input[:, None] & is_output[None, :]
            return plt.load(w_ref.at[inputs[:, None], half[None, :]], mask=mask, other=0).T
        mask = is_output[:, None] & is_input[None, :]
        return plt.load(w_ref.at[half[:, None], inputs[None, :]], mask=mask, other=0)

    def accumulate(step, accs):
        for index in range(tiles.tile_k // chunk):
            first = (first_step + step) * tiles.tile_k + index * chunk
            inputs = first + lax.iota(jnp.int32, chunk)
            x_mask = is_row[:, None] & (inputs < num_inputs)[None, :]
            x = plt.load(x_ref.at[rows[:, None], inputs[None, :]], mask=x_mask, other=0.0)
            found = []
            for half, acc in zip(_halves(outputs, num_outputs, is_gated), accs, strict=True):
                weights = load_weights(half, inputs).astype(x.dtype)
                part = jnp.dot(weights, x.T, precision=precision, preferred_element_type=jnp.float32)
                if scale_refs:
                    scale_mask = is_output & (first < num_inputs)
                    scales = plt.load(scale_refs[0].at[half, first // group_size], mask=scale_mask, other=0.0)
                    part = part * scales.astype(jnp.float32)[:, None]
                found.append(part + acc)
            accs = tuple(found)
        return accs

    empty = jnp.zeros((tiles.tile_n, tiles.tile_m), jnp.float32)
    accs = lax.fori_loop(0, steps, accumulate, (empty,) * (2 if is_gated else 1))
    value = accs[0] * jax.nn.sigmoid(accs[0]) * accs[1] if is_gated else accs[0]
    place = (rows[None, :], outputs[:, None]) if is_gated else (pl.program_id(2), rows[None, :], outputs[:, None])
    plt.store(out_ref.at[place], value.astype(out_ref.dtype), mask=is_row[None, :] & is_output[:, None])


def _halves(outputs: jax.Array, num_outputs: int, is_gated: bool) -> tuple[jax.Array, ...]:
    """Returns which outputs of the weights those of a tile are: of gated ones the gate's and the up projection's."""
    return (outputs, outputs + num_outputs) if is_gated else (outputs,)


def _check(x: jax.Array, weight: jax.Array, scale: jax.Array | None, group_size: int, has_inputs_first: bool) -> None:
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[0 if has_inputs_first else 1] != x.shape[1]:
        order = "[I O]" if has_inputs_first else "[O I]"
        raise ValueError(f"expected x [M I] and weights {order}, got {x.shape} and {weight.shape}")
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise KernelUnsupportedError(f"the Triton backend needs bfloat16, float16 or float32, got {x.dtype}")
    if scale is None:
        if weight.dtype != x.dtype or group_size:
            raise ValueError(
                f"weights without scales need x's dtype and group_size 0, got {x.dtype}, {weight.dtype}, {group_size}"
            )
        return
    if group_size & (group_size - 1) or group_size < 16:
        raise KernelUnsupportedError(
            f"the Triton backend needs a power-of-two group_size of at least 16, got {group_size}"
        )
    scale_shape = (weight.shape[0], pl.cdiv(x.shape[1], group_size))
    if weight.dtype != jnp.int8 or has_inputs_first or scale.shape != scale_shape:
        raise ValueError(f"expected int8 weights [O I] with scales {scale_shape}, got {weight.dtype} and {scale.shape}")


def _call(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    *,
    group_size: int,
    has_inputs_first: bool,
    is_gated: bool,
    out_dtype: jnp.dtype,
    tiles: TileConfig | None,
    interpret: bool,
) -> jax.Array:
    """Returns [M O/2] of gated weights, else [S M O]."""
    _check(x, weight, scale, group_size, has_inputs_first)
    (m, k), n = x.shape, weight.shape[1 if has_inputs_first else 0]
    n = n // 2 if is_gated else n
    tiles = tiles or choose_tiles(n=n, k=k, group_size=group_size, dtype=x.dtype.name, is_split=not is_gated)
    if is_gated and tiles.k_splits > 1:
        raise KernelUnsupportedError(f"a gate has one split, got {tiles.label}")
    out = jax.ShapeDtypeStruct((m, n) if is_gated else (tiles.k_splits, m, n), out_dtype)
    options: dict[str, Any] = {"group_size": group_size, "has_inputs_first": has_inputs_first, "is_gated": is_gated}
    found: jax.Array = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, **options),
        out_shape=out,
        grid=(pl.cdiv(m, tiles.tile_m), pl.cdiv(n, tiles.tile_n), tiles.k_splits),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name=f"uniform_matmul_g{group_size}_{tiles.label}",
    )(x, weight, *(() if scale is None else (scale,)))
    return found


_STATIC = ("group_size", "has_inputs_first", "tiles", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)
def uniform_parts(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    *,
    group_size: int = 0,
    has_inputs_first: bool = False,
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns a product as f32[S M O], for whoever reads it to add: `add_parts` of them is x @ weight.T in float32.

    S depends on the weights alone. A row has the same bits whatever M is and wherever it stands.

    Args:
      x: bf16, f16 or f32[M I]
      weight: int8[O I] with scales; or dense, of x's dtype, [O I], or [I O] if has_inputs_first.
      scale: f16 or f32[O ceil(I/group_size)]
      group_size: inputs per scale, a power of two of at least 16; the last group may be short.
      tiles: sizes; by default those that `choose_tiles` has for the weights.
      interpret: run without a GPU, slowly.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    options: dict[str, Any] = {
        "group_size": group_size,
        "has_inputs_first": has_inputs_first,
        "tiles": tiles,
        "interpret": interpret,
    }
    return _call(x, weight, scale, is_gated=False, out_dtype=jnp.dtype(jnp.float32), **options)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "out_dtype"))
def uniform_gated(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None = None,
    *,
    group_size: int = 0,
    has_inputs_first: bool = False,
    out_dtype: jnp.dtype | None = None,
    tiles: TileConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns silu(gate) * up [M O/2], where the weights hold a gate's outputs, then an up projection's.

    Args:
      x, weight, scale, group_size, has_inputs_first, tiles, interpret: as in `uniform_parts`; tiles have one split.
      out_dtype: of the result, x's by default.

    Raises:
      ValueError: shapes or dtypes don't fit each other.
      KernelUnsupportedError: the backend can't compute these shapes or dtypes.
    """
    if weight.shape[1 if has_inputs_first else 0] % 2:
        raise ValueError(f"gated weights hold two equal halves of outputs, got {weight.shape}")
    options: dict[str, Any] = {
        "group_size": group_size,
        "has_inputs_first": has_inputs_first,
        "tiles": tiles,
        "interpret": interpret,
    }
    return _call(x, weight, scale, is_gated=True, out_dtype=jnp.dtype(out_dtype or x.dtype), **options)
