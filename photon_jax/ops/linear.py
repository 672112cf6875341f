"""Linear layers, output projection and embedding: one function each for every weight type."""

import functools
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import (
    LimbRows,
    add_parts,
    fused_matmul,
    int8_dequantize,
    limb_matmul_parts,
    matmul_parts,
    silu_mul_limbs,
    uniform_gated,
    uniform_parts,
)
from photon_jax.config import Backend
from photon_jax.models.params import DenseLinear, Linear, Table
from photon_jax.quantization.int8 import QuantizedLinear, dequantize, round_activations

KERNEL_ROWS = 128  # the most rows that the int8 kernel was measured with; for more, weights are dequantized
LIMB_ROWS = range(17, KERNEL_ROWS + 1)  # with fewer, what the limbs save is lost by the gate's launch (measured)
DENSE_ROWS = range(33, KERNEL_ROWS + 1)  # of dense weights: our kernel is 6 to 12 % faster than XLA there (measured)
OUTPUT_BLOCK = 64  # outputs that a CPU dequantizes at once: their float32 weights stay in its cache

Rows = jax.Array | LimbRows  # activations [M I], as an array or in the limbs that `limb_group` asks for


def linear(
    x: Rows,  # [M I]
    layer: Linear,
    *,
    backend: Backend,
) -> jax.Array:  # f32[M O]
    """Returns x @ weight + bias in float32; the caller rounds, once, at the end of its fusion.

    An int8 layer is dequantized to float32: only its weights are rounded, and that happened when it was made. The
    backend "triton" multiplies a few rows with our int8 kernels and dequantizes for more rows to the dtype of the
    activations; dense weights it leaves to XLA but for DENSE_ROWS. "uniform" has one kernel for all weights and any
    number of rows, which "triton" takes for those rows too.
    """
    if isinstance(x, LimbRows):
        return add_parts(linear_parts(x, layer, backend=backend))
    if _takes_uniform(layer, x, backend):
        y = add_parts(_uniform(x, layer))
    else:
        y = _contract_int8(x, layer, backend) if isinstance(layer, QuantizedLinear) else _contract_dense(x, layer)
    if layer.bias is not None:
        y = y + jnp.expand_dims(layer.bias.astype(jnp.float32), 0)
    return y


def linear_parts(
    x: Rows,  # [M I]
    layer: Linear,
    *,
    backend: Backend,
    may_round: bool = False,
) -> jax.Array:  # [S M O]
    """Returns what linear(x) is the sum of: the parts of a kernel's splits, or itself as the only one.

    Args:
      may_round: whether a product of many rows may come in their dtype, see `comes_rounded`; else parts are float32.
    """
    if isinstance(x, LimbRows):
        assert fits_kernel(layer, x.shape[0], backend), f"limbs are for our kernels alone, not for {backend}"
        return limb_matmul_parts(x, layer.q, layer.scale)
    if fits_kernel(layer, x.shape[0], backend):
        return matmul_parts(x, layer.q, layer.scale, group_size=layer.group_size)
    if layer.bias is None and _takes_uniform(layer, x, backend):
        return _uniform(x, layer)
    is_rounded = may_round and comes_rounded(layer, x, backend)
    product = _rounded(x, layer) if is_rounded else linear(x, layer, backend=backend)
    return jnp.expand_dims(product, 0)


def linear_gated(
    x: Rows,  # [M I]
    layer: Linear,
    *,
    backend: Backend,
    dtype: jnp.dtype,
    group_size: int | None = None,
) -> Rows:  # [M O/2]
    """Returns silu(gate) * up of the two halves of linear(x), in one launch where a kernel can.

    Args:
      dtype: of the result.
      group_size: where given, the result is not rounded to a dtype but split into limbs of such groups.
    """
    if group_size is not None:
        limbs: LimbRows = silu_mul_limbs(linear_parts(x, layer, backend=backend), group_size=group_size)
        return limbs
    if not isinstance(x, LimbRows) and fits_kernel(layer, x.shape[0], backend):
        return _kernel(x, layer, is_gated=True, out_dtype=dtype)
    if not isinstance(x, LimbRows) and layer.bias is None and _takes_uniform(layer, x, backend):
        return _uniform(x, layer, is_gated=True, out_dtype=dtype)
    halves = jnp.split(add_parts(linear_parts(x, layer, backend=backend, may_round=True)), 2, axis=-1)
    gate, up = (half.astype(jnp.float32) for half in halves)
    return (jax.nn.silu(gate) * up).astype(dtype)


def head_logits(
    x: Rows,  # [M D]
    head: Table,  # [V D]
    *,
    backend: Backend,
) -> jax.Array:  # f32[M V]
    """Returns x @ head.T in float32."""
    if isinstance(head, QuantizedLinear):
        return linear(x, head, backend=backend)
    assert not isinstance(x, LimbRows), "limbs are made for int8 weights"
    if backend == "uniform":
        return add_parts(uniform_parts(x, head))
    return _contract(x, head, 1)


def embedding_rows(
    embedding: Table,  # [V D]
    token_ids: jax.Array,  # i32[T]
) -> jax.Array:  # f32[T D]
    """Returns the row of each token."""
    if isinstance(embedding, QuantizedLinear):
        rows, scales = embedding.q[token_ids], embedding.scale[token_ids]
        return dequantize(rows, scales, group_size=embedding.group_size)
    return embedding[token_ids].astype(jnp.float32)


def _contract_dense(x: jax.Array, layer: DenseLinear) -> jax.Array:
    return _contract(x, layer.weight, int(layer.has_outputs_first))


def _contract(x: jax.Array, weight: jax.Array, weight_axis: int, dtype: jnp.dtype | None = None) -> jax.Array:
    """Returns the product in dtype, by default float32."""
    return lax.dot_general(
        x,
        weight,
        (((1,), (weight_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype or jnp.float32,
    )


def limb_group(layer: Linear | Table, num_rows: int, dtype: jnp.dtype, backend: Backend) -> int | None:
    """Returns the group size of the limbs that linear(rows, layer) wants its rows in, None for an array of the dtype.

    Whoever makes the rows asks, a norm or a gate: limbs cost it nothing, and a launch of their own would cost more than
    they save. Int8 weights then go to the tensor cores as they are stored. Limbs have 16 bits: more than bfloat16 and
    float16 keep, and less than a model in float32 may expect.
    """
    if num_rows in LIMB_ROWS and dtype != jnp.float32 and fits_kernel(layer, num_rows, backend):
        return layer.group_size
    return None


def fits_kernel(layer: Linear | Table, num_rows: int, backend: Backend) -> TypeGuard[QuantizedLinear]:
    """Whether our kernels compute linear(rows) whole: int8 weights, few rows, and nothing to be done between."""
    is_plain = isinstance(layer, QuantizedLinear) and layer.bias is None and not layer.int8_activations
    return is_plain and backend == "triton" and num_rows <= KERNEL_ROWS


def has_parts(layer: Linear, x: jax.Array, backend: Backend) -> bool:
    """Whether linear(x) is computed by a kernel of ours, which may leave it in parts."""
    return fits_kernel(layer, x.shape[0], backend) or _takes_uniform(layer, x, backend)


def _takes_uniform(layer: Linear, x: jax.Array, backend: Backend) -> bool:
    """Whether linear(x), but for a bias, is computed by the kernel that any number of rows can have."""
    is_faster = isinstance(layer, DenseLinear) and x.shape[0] in DENSE_ROWS and x.dtype != jnp.float32
    return backend == "uniform" or (backend == "triton" and is_faster)


def comes_rounded(layer: Linear, x: jax.Array, backend: Backend) -> bool:
    """Whether XLA's product of many rows can come in bfloat16, the dtype of its factors, in place of float32.

    It is added up in float32 too, and rounded once. A rope or a gate, which rounds what it makes of it, is bound by its
    bytes; what goes to the residual stream stays as it is. Float16 has no range for it, and a bias is added before.
    """
    is_plain = layer.bias is None and not (isinstance(layer, QuantizedLinear) and layer.int8_activations)
    return is_plain and backend == "triton" and x.shape[0] > KERNEL_ROWS and x.dtype == jnp.bfloat16


def _rounded(x: jax.Array, layer: Linear) -> jax.Array:
    """Returns x @ weight in the dtype of x."""
    if isinstance(layer, DenseLinear):
        return _contract(x, layer.weight, int(layer.has_outputs_first), x.dtype)
    weight = int8_dequantize(layer.q, layer.scale, group_size=layer.group_size, dtype=x.dtype)
    return _contract(x, weight, 1, x.dtype)


def _kernel(
    x: jax.Array,
    layer: QuantizedLinear,
    *,
    is_gated: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    return fused_matmul(
        x,
        layer.q,
        layer.scale,
        group_size=layer.group_size,
        is_gated=is_gated,
        out_dtype=out_dtype or jnp.dtype(jnp.float32),
    )


def _uniform(x: Rows, layer: Linear, *, is_gated: bool = False, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Returns the parts f32[S M O] of the product without bias, or silu(gate) * up [M O/2] of its halves."""
    assert not isinstance(x, LimbRows), "the uniform kernel takes arrays"
    compute = functools.partial(uniform_gated, out_dtype=out_dtype) if is_gated else uniform_parts
    if isinstance(layer, DenseLinear):
        found: jax.Array = compute(x, layer.weight, has_inputs_first=not layer.has_outputs_first)
        return found
    if layer.int8_activations:
        x = round_activations(x.astype(jnp.float32), group_size=layer.group_size)
    found = compute(x, layer.q, layer.scale, group_size=layer.group_size)
    return found


def _contract_int8(x: jax.Array, layer: QuantizedLinear, backend: Backend) -> jax.Array:
    """Returns x @ dequantize(layer).T: on a CPU in blocks of outputs, elsewhere at once."""
    if backend == "triton" and not layer.int8_activations:
        if x.shape[0] <= KERNEL_ROWS:
            return _kernel(x, layer)
        return _contract(x, int8_dequantize(layer.q, layer.scale, group_size=layer.group_size, dtype=x.dtype), 1)
    x32 = x.astype(jnp.float32)
    if layer.int8_activations:
        x32 = round_activations(x32, group_size=layer.group_size)
    out: jax.Array = lax.platform_dependent(x32, layer, cpu=_contract_in_blocks, default=_contract_at_once)
    return out


def _contract_at_once(x: jax.Array, layer: QuantizedLinear) -> jax.Array:
    return _contract(x, dequantize(layer.q, layer.scale, group_size=layer.group_size), 1)


def _contract_in_blocks(x: jax.Array, layer: QuantizedLinear) -> jax.Array:
    """A whole dequantized weight would be written to memory and read again in every step.

    Measured with 8 rows on the demo model's gate and up projection: 0.83 ms in blocks, 1.23 at once, 0.61 dense.
    """
    num_outputs = layer.q.shape[0]
    size = min(OUTPUT_BLOCK, num_outputs)

    def compute_block(index: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(index * size, num_outputs - size)  # the last block may repeat some outputs
        q, scale = (lax.dynamic_slice_in_dim(array, start, size) for array in (layer.q, layer.scale))
        part = _contract(x, dequantize(q, scale, group_size=layer.group_size), 1)
        return lax.dynamic_update_slice_in_dim(out, part, start, 1)

    empty = jnp.zeros((x.shape[0], num_outputs), jnp.float32)
    out: jax.Array = lax.fori_loop(0, -(-num_outputs // size), compute_block, empty)
    return out
