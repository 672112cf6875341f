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

from pallas_kernels.int8_matmul import dense_matmul, fused_matmul, fused_matmul_reference, int8_matmul
from pallas_kernels.int8_matmul.reference import dequantize, rms_norm
from pallas_kernels.int8_matmul.tiles import TileConfig
from pallas_kernels.paged_attention import paged_attention, paged_attention_one_launch, paged_attention_reference
from pallas_kernels.paged_attention.bench import xla_paged_attention
from pallas_kernels.paged_attention.tiles import TileConfig as AttentionTiles
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
    counters: jax.Array  # i32[B K]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """Which implementation each part of a step uses.

    Attributes:
      name: in results.
      matmul: `reference`; `xla`; `kernel` with norm, gate and residual left to XLA; `fused` with them in the kernels.
      append: rope and cache write.
      attention: `one_launch` combines splits in the attention kernel.
      tiles: of linear layers by name, where not the measured or heuristic ones.
      attention_tiles: where not the measured or heuristic ones.
      is_touching: attention reads the weights of o and the first of gate_up's into the L2 (`one_launch`).
      is_norm_outside: the norm is left to XLA in `fused` too.
      interpret: run kernels without a GPU.
    """

    name: str
    matmul: Literal["reference", "xla", "kernel", "fused"]
    append: Literal["xla", "kernel"] = "xla"
    attention: Literal["reference", "xla", "kernel", "one_launch"] = "kernel"
    tiles: dict[str, TileConfig] = dataclasses.field(default_factory=dict)
    attention_tiles: AttentionTiles | None = None
    is_touching: bool = False
    is_norm_outside: bool = False
    interpret: bool = False


def _multiply(
    variant: Variant,
    group_size: int,
    name: str,
    x: jax.Array,
    weight: Weight,
    *,
    norm_weight: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
) -> jax.Array:
    matrix, scale = weight
    if norm_weight is not None and (variant.is_norm_outside or variant.matmul in ("xla", "kernel")):
        x, norm_weight = rms_norm(x, norm_weight, eps=EPS).astype(jnp.bfloat16), None
    group = group_size if scale is not None else 0
    around: dict[str, Any] = {
        "norm_weight": norm_weight,
        "residual": residual,
        "is_gated": name == "gate_up",
        "eps": EPS,
        "out_dtype": out_dtype,
    }
    if variant.matmul == "reference":
        exact: jax.Array = fused_matmul_reference(x, matrix, scale, group_size=group, **around)
        return exact
    tiles = variant.tiles.get(name)
    if variant.matmul == "fused":
        return fused_matmul(x, matrix, scale, group_size=group, tiles=tiles, interpret=variant.interpret, **around)
    if variant.matmul == "xla":
        if scale is not None:
            matrix = dequantize(matrix, scale, group_size=group).astype(x.dtype)
        out = jnp.einsum("BI,OI->BO", x, matrix, preferred_element_type=jnp.float32)
    elif scale is None:
        out = dense_matmul(x, matrix, tiles=tiles, interpret=variant.interpret)
    else:
        out = int8_matmul(x, matrix, scale, group_size=group, tiles=tiles, interpret=variant.interpret)
    if name == "gate_up":
        gate, up = jnp.split(out.astype(jnp.float32), 2, axis=1)
        out = jax.nn.silu(gate) * up
    return (out if residual is None else residual + out.astype(jnp.float32)).astype(out_dtype)


def _attend(
    variant: Variant, q: jax.Array, state: State, tables: jax.Array, layer: int, later: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    lens = state.lens + 1
    if variant.attention == "one_launch":
        return paged_attention_one_launch(
            *(q, state.k, state.v, tables, lens, layer, state.counters),
            touched=later if variant.is_touching else (),
            tiles=variant.attention_tiles,
            interpret=variant.interpret,
        )
    if variant.attention == "kernel":
        attend: Any = functools.partial(paged_attention, tiles=variant.attention_tiles, interpret=variant.interpret)
    else:
        attend = paged_attention_reference if variant.attention == "reference" else xla_paged_attention
    out: jax.Array = attend(q, state.k, state.v, tables, lens, layer)
    return out, state.counters


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
    for index, layer in enumerate(weights["layers"]):
        qkv = multiply("qkv", x, layer["qkv"], norm_weight=layer["norm"])
        q, k, v = append(qkv, cos, sin, state.k, state.v, slots, index)
        state = state._replace(k=k, v=v)
        mixed, counters = _attend(variant, q, state, tables, index, (layer["o"][0], layer["gate_up"][0]))
        state = state._replace(counters=counters)
        x = multiply("o", mixed.reshape(x.shape[0], -1), layer["o"], residual=x, out_dtype=jnp.float32)
        hidden = multiply("gate_up", x, layer["gate_up"], norm_weight=layer["mlp_norm"])
        x = multiply("down", hidden, layer["down"], residual=x, out_dtype=jnp.float32)
    return multiply("head", x, weights["head"], norm_weight=weights["norm"], out_dtype=jnp.float32), state


def decode(
    weights: dict[str, Any], state: State, tables: jax.Array, *, variant: Variant, group_size: int, num_steps: int
) -> jax.Array:
    """Returns the last tokens i32[B] after num_steps greedy steps, each fed with the tokens of the one before."""

    def step(state: State, _: None) -> tuple[State, None]:
        logits, state = forward(weights, state, tables, variant=variant, group_size=group_size)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return state._replace(tokens=tokens, lens=state.lens + 1), None

    return lax.scan(step, state, None, length=num_steps)[0].tokens
