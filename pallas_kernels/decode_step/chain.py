"""One decode step of a Llama: embedding, layers, head and the greedy choice, in several implementations.

Letters: B rows, D hidden, F MLP, H query heads, K KV heads, G = H/K, d head size, L layers, N blocks, S block size,
P table width, V vocabulary.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int8_matmul import fused_matmul, fused_matmul_reference, matmul_parts
from pallas_kernels.int8_matmul.reference import dequantize
from pallas_kernels.paged_attention import paged_attention, paged_attention_reference
from pallas_kernels.paged_attention.bench import xla_paged_attention
from pallas_kernels.paged_attention.tiles import TileConfig as AttentionTiles
from pallas_kernels.rms_norm import add_rms_norm, rms_norm
from pallas_kernels.rope_append import rope_append, rope_append_reference

EPS = 1e-5
_ROPE_THETA = 5e5
Weight = tuple[jax.Array, jax.Array | None]  # dense bf16[O I] and None, or int8[O I] and f16 scales


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a model; those of Llama-3.2-1B by default."""

    num_layers: int = 16
    hidden: int = 2048
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 64
    mlp: int = 8192
    vocabulary: int = 128256
    block_size: int = 64

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the linear layers of one layer."""
        return {
            "qkv": ((self.num_heads + 2 * self.num_kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.num_heads * self.head_dim),
            "gate_up": (2 * self.mlp, self.hidden),
            "down": (self.hidden, self.mlp),
        }


class State(NamedTuple):
    """What one step hands to the next."""

    tokens: jax.Array  # i32[B]
    lens: jax.Array  # i32[B] tokens in the cache
    k: jax.Array  # [L N K S d]
    v: jax.Array  # [L N K S d]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Which implementation each part of a step uses.

    Attributes:
      name: in results.
      matmul: `reference`, `xla`, `fused` with gate and residual in the kernels, or `parts` with the gate in them and
        the parts of the others added by norm and rope, as the engine does.
      append: rope and cache write.
      attention: which.
      attention_tiles: where not the measured or heuristic ones.
      interpret: run kernels without a GPU.
    """

    name: str
    matmul: Literal["reference", "xla", "fused", "parts"]
    append: Literal["xla", "kernel"] = "xla"
    attention: Literal["reference", "xla", "kernel"] = "kernel"
    attention_tiles: AttentionTiles | None = None
    interpret: bool = False


def _norm(
    variant: Variant, x: jax.Array, parts: jax.Array | None, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:  # bf16[B D], f32[B D]
    """Returns the normed rows of x + parts, and that sum."""
    if variant.matmul != "parts":
        assert parts is None
        scaled = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight.astype(jnp.float32)[None]
        return scaled.astype(jnp.bfloat16), x
    if parts is None:
        return rms_norm(x, weight, eps=EPS, interpret=variant.interpret), x
    normed, total = add_rms_norm(x, parts, weight, eps=EPS, interpret=variant.interpret)
    return normed, total


def _split(variant: Variant, group_size: int, x: jax.Array, weight: Weight) -> jax.Array:
    """Returns the parts f32[S B O] of a product."""
    matrix, scale = weight
    group = group_size if scale is not None else 0
    return matmul_parts(x, matrix, scale, group_size=group, interpret=variant.interpret)


def _multiply(
    variant: Variant,
    group_size: int,
    name: str,
    x: jax.Array,
    weight: Weight,
    *,
    residual: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
) -> jax.Array:
    matrix, scale = weight
    group = group_size if scale is not None else 0
    around: dict[str, Any] = {"residual": residual, "is_gated": name == "gate_up", "out_dtype": out_dtype}
    if variant.matmul == "reference":
        exact: jax.Array = fused_matmul_reference(x, matrix, scale, group_size=group, **around)
        return exact
    if variant.matmul in ("fused", "parts"):
        return fused_matmul(x, matrix, scale, group_size=group, interpret=variant.interpret, **around)
    if scale is not None:
        matrix = dequantize(matrix, scale, group_size=group).astype(x.dtype)
    out = jnp.einsum("BI,OI->BO", x, matrix, preferred_element_type=jnp.float32)
    if name == "gate_up":
        gate, up = jnp.split(out, 2, axis=1)
        out = jax.nn.silu(gate) * up
    return (out if residual is None else residual + out).astype(out_dtype)


def _attend(variant: Variant, q: jax.Array, state: State, tables: jax.Array, layer: int) -> jax.Array:
    if variant.attention == "kernel":
        attend: Any = functools.partial(paged_attention, tiles=variant.attention_tiles, interpret=variant.interpret)
    else:
        attend = paged_attention_reference if variant.attention == "reference" else xla_paged_attention
    out: jax.Array = attend(q, state.k, state.v, tables, state.lens + 1, layer)
    return out


def forward(
    weights: dict[str, Any], state: State, tables: jax.Array, *, variant: Variant, group_size: int
) -> tuple[jax.Array, State]:
    """Returns logits f32[B V] of one token a row, and the state with its keys and values.

    Args:
      weights: `embedding`, `layers` (a list), `norm` and `head`.
      state: token and context of each row.
      tables: i32[B P]
      variant: which implementations.
      group_size: of int8 weights.
    """
    multiply = functools.partial(_multiply, variant, group_size)
    block_size, head_dim = state.k.shape[3:]
    rows = jnp.arange(state.lens.shape[0], dtype=jnp.int32)
    slots = tables[rows, state.lens // block_size] * block_size + state.lens % block_size
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = state.lens.astype(jnp.float32)[:, None] * (_ROPE_THETA**-exponents)[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    append: Any = rope_append_reference
    if variant.append == "kernel":
        append = functools.partial(rope_append, interpret=variant.interpret)
    x = weights["embedding"][state.tokens].astype(jnp.float32)
    parts: jax.Array | None = None

    def add(name: str, y: jax.Array, weight: Weight) -> tuple[jax.Array, jax.Array | None]:
        if variant.matmul == "parts":
            return x, _split(variant, group_size, y, weight)
        return multiply(name, y, weight, residual=x, out_dtype=jnp.float32), None

    for index, layer in enumerate(weights["layers"]):
        normed, x = _norm(variant, x, parts, layer["norm"])
        if variant.matmul == "parts":
            qkv = _split(variant, group_size, normed, layer["qkv"])
        else:
            qkv = multiply("qkv", normed, layer["qkv"])[None]
        q, k, v = append(qkv, cos, sin, state.k, state.v, slots, index)
        state = state._replace(k=k, v=v)
        mixed = _attend(variant, q, state, tables, index)
        x, parts = add("o", mixed.reshape(x.shape[0], -1), layer["o"])
        normed, x = _norm(variant, x, parts, layer["mlp_norm"])
        x, parts = add("down", multiply("gate_up", normed, layer["gate_up"]), layer["down"])
    normed, _ = _norm(variant, x, parts, weights["norm"])
    return multiply("head", normed, weights["head"], out_dtype=jnp.float32), state


def decode(
    weights: dict[str, Any], state: State, tables: jax.Array, *, variant: Variant, group_size: int, num_steps: int
) -> jax.Array:
    """Returns the last tokens i32[B] after num_steps greedy steps, each fed with the tokens of the one before."""

    def step(state: State, _: None) -> tuple[State, None]:
        logits, state = forward(weights, state, tables, variant=variant, group_size=group_size)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return state._replace(tokens=tokens, lens=state.lens + 1), None

    return lax.scan(step, state, None, length=num_steps)[0].tokens
