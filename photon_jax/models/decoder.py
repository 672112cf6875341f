"""The decoder of the Llama and Qwen family: one model code for the paged step and for the plain full forward."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from photon_jax.cache.kv_cache import KVCache
from photon_jax.config import KernelConfig, KVDType
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import LayerParams, Params
from photon_jax.ops.attention import attend, full_attention, project_qkv
from photon_jax.ops.linear import embedding_rows, head_logits
from photon_jax.ops.mlp import gate_up
from photon_jax.ops.norm import rms_norm
from photon_jax.ops.rope import rope_tables
from photon_jax.ops.stream import Stream, add_product
from photon_jax.ops.tiles import RowTiles
from photon_jax.quantization.kv import dequantize_kv, quantize_kv
from photon_jax.step_io import StepInputs

PLAIN_KERNELS = KernelConfig(linear="xla", attention="xla")  # of `forward`: differentiable, on any device


def forward_paged(
    params: Params,
    cache: KVCache,
    inputs: StepInputs,
    *,
    config: ModelConfig,
    kernels: KernelConfig,
    tiles: RowTiles | None,
    query_tile: int,
    seq_len: int,
) -> tuple[jax.Array, KVCache]:
    """Returns the residual stream f32[T D] after the last layer, and the cache with the step's keys and values.

    Args:
      tiles: how row-wise ops walk over the T tokens; None for all at once.
      query_tile: tokens of one attention item.
      seq_len: longest sequence that is served (rope kind "dynamic" depends on it).
    """
    stream = Stream(base=embedding_rows(params.embedding, inputs.token_ids))
    cos, sin = rope_tables(inputs.positions, config=config, seq_len=seq_len, tiles=tiles)
    run_layer = functools.partial(_paged_layer, config=config, kernels=kernels, query_tile=query_tile)
    for index, layer in enumerate(params.layers):
        stream, cache = run_layer(layer, stream, cache, jnp.int32(index), (cos, sin), inputs, tiles)
    return stream.settled(), cache


@functools.partial(jax.jit, static_argnames=("config", "kernels", "query_tile"))  # traced once, not once a layer
def _paged_layer(
    layer: LayerParams,
    stream: Stream,
    cache: KVCache,
    index: jax.Array,  # i32[]
    rope: tuple[jax.Array, jax.Array],  # cos and sin, f32[T d/2]
    inputs: StepInputs,
    tiles: RowTiles | None,
    *,
    config: ModelConfig,
    kernels: KernelConfig,
    query_tile: int,
) -> tuple[Stream, KVCache]:
    options: dict[str, Any] = {"config": config, "kernels": kernels, "tiles": tiles}
    cos, sin = rope
    attended, cache, residual = attend(
        stream, cos, sin, layer, cache, inputs, layer_index=index, query_tile=query_tile, **options
    )
    attended = attended.reshape(attended.shape[0], -1)
    stream = add_product(residual, attended, layer.o_proj, backend=kernels.linear, tiles=tiles)
    hidden, residual = gate_up(stream, layer, **options)
    return add_product(residual, hidden, layer.down_proj, backend=kernels.linear, tiles=tiles), cache


def forward(
    params: Params,
    config: ModelConfig,
    token_ids: jax.Array,  # i32[B T]
    *,
    kv_dtype: KVDType = "auto",
) -> jax.Array:  # f32[B T V]
    """Returns the logits at every position: the plain, differentiable forward, causal and with no cache.

    Shapes decide the program, so results may differ from the engine's in the last bits. Rope kind "dynamic" scales by
    the longer of T and the model's trained length, as Hugging Face does for a single pass. With kv_dtype "int8" keys
    and values are rounded as an int8 cache holds them, which lets no gradient through.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from photon_jax.models.config import ModelConfig, RopeConfig
      >>> from photon_jax.models.params import random_params
      >>> config = ModelConfig(
      ...     architecture="LlamaForCausalLM", vocab_size=32, hidden_size=16, mlp_size=32, num_layers=1, num_heads=2,
      ...     num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=64,
      ...     tie_word_embeddings=True,
      ... )
      >>> params = random_params(config, jax.random.key(0))
      >>> forward(params, config, jnp.zeros((2, 3), jnp.int32)).shape
      (2, 3, 32)
    """
    token_ids = jnp.asarray(token_ids)
    batch, num_tokens = token_ids.shape
    x = embedding_rows(params.embedding, token_ids.reshape(-1))  # f32[B*T D]
    positions = jnp.tile(jnp.arange(num_tokens, dtype=jnp.int32), batch)
    cos, sin = rope_tables(positions, config=config, seq_len=num_tokens, tiles=None)
    for layer in params.layers:
        x, *_ = full_layer(layer, x, (cos, sin), batch=batch, config=config, kv_dtype=kv_dtype)
    normed = rms_norm(x, params.final_norm, eps=config.rms_norm_eps)
    logits = head_logits(normed.astype(params.final_norm.dtype), params.head, backend=PLAIN_KERNELS.linear)
    return logits.reshape(batch, num_tokens, -1)


@functools.partial(jax.jit, static_argnames=("batch", "config", "kv_dtype"))  # compiled once, not once a layer
def full_layer(
    layer: LayerParams,
    x: jax.Array,  # f32[B*T D]
    rope: tuple[jax.Array, jax.Array],  # cos and sin, f32[B*T d/2]
    *,
    batch: int,
    config: ModelConfig,
    kv_dtype: KVDType = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns a layer of `forward`: the residual stream f32[B*T D] after it and after its attention, the attended
    values [B*T H d], and the MLP's hidden values [B*T F]."""
    heads = (batch, x.shape[0] // batch, -1, config.head_dim)
    options: dict[str, Any] = {"config": config, "kernels": PLAIN_KERNELS, "tiles": None}
    q, k, v = (array.reshape(heads) for array in project_qkv(Stream(base=x), *rope, layer, **options)[:3])
    if kv_dtype == "int8":
        k, v = (dequantize_kv(*quantize_kv(array), array.dtype) for array in (k, v))
    attended = full_attention(q, k, v).reshape(x.shape[0], config.num_heads, config.head_dim)
    added = functools.partial(add_product, backend=PLAIN_KERNELS.linear, tiles=None)
    stream = added(x, attended.reshape(x.shape[0], -1), layer.o_proj)
    hidden, middle = gate_up(stream, layer, **options)
    assert isinstance(hidden, jax.Array), "only our kernels take rows in limbs"
    return added(middle, hidden, layer.down_proj).settled(), middle, attended, hidden


def truncated(params: Params, config: ModelConfig, num_layers: int) -> tuple[Params, ModelConfig]:
    """Returns a model of the first layers only, sharing the arrays: enough to compare two ways of computing a step."""
    return (
        dataclasses.replace(params, layers=params.layers[:num_layers]),
        dataclasses.replace(config, num_layers=min(num_layers, config.num_layers)),
    )
