"""Where a decode step's time goes: each part of a layer by itself, over all layers, many times in one scan."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from photon_jax.bench.decode import PackedStep
from photon_jax.cache.kv_cache import KVCache
from photon_jax.engine.start import StartedEngine
from photon_jax.engine.step import StepConfig, unpack
from photon_jax.models.params import LayerParams, Linear, Params
from photon_jax.ops.attention import append_and_attend, attention, attention_input, is_one_kernel, qkv_parts
from photon_jax.ops.linear import Rows, limb_group
from photon_jax.ops.mlp import gate_up
from photon_jax.ops.norm import normed_rows
from photon_jax.ops.rope import rope_tables
from photon_jax.ops.sampling import head_sample
from photon_jax.ops.stream import Stream, add_product
from photon_jax.ops.tiles import RowTiles
from photon_jax.step_io import StepInputs, StepLayout

PASSES = 8  # over all layers, in one scan
GLUE = 1e-6  # of one part's result in the next one's input: they can't run at once, or be left out

Body = Callable[[LayerParams, jax.Array, KVCache, jax.Array], tuple[jax.Array, KVCache]]


class PartTime(NamedTuple):
    """Seconds of one part in one step, and the least bytes that it has to read."""

    name: str
    seconds: float
    num_bytes: int


def time_parts(started: StartedEngine, step: PackedStep, *, repeats: int) -> list[PartTime]:
    """Returns the median times of attention, the four products with what is fused to them, and head with sampling.

    What the cache holds is overwritten. Each call includes the small operation that makes the next one wait for it,
    about a microsecond a layer on a GPU.

    Args:
      step: of rows that decode.
    """
    runner, (layout, packed) = started.runner, step
    found, buffer = [], jax.device_put(packed)
    for name in (*_LAYER_PARTS, "head_sample"):
        program = functools.partial(_run_part, part=name, layout=layout, config=runner.config)
        seconds = []
        for _ in range(repeats + 2):
            begin = time.perf_counter()
            x, runner.cache = program(runner.params, runner.cache, buffer)
            x.block_until_ready()
            seconds.append((time.perf_counter() - begin) / PASSES)
        found.append(PartTime(name, statistics.median(seconds[2:]), _weight_bytes(runner.params, name)))
    return found


def _weight_bytes(params: Params, part: str) -> int:
    weights = {
        "qkv": [(layer.qkv_proj, layer.input_norm) for layer in params.layers],
        "o": [layer.o_proj for layer in params.layers],
        "gate_up": [(layer.gate_up_proj, layer.post_attention_norm) for layer in params.layers],
        "down": [layer.down_proj for layer in params.layers],
        "head_sample": [params.head],
    }
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights.get(part)))


@functools.partial(jax.jit, static_argnames=("part", "layout", "config"), donate_argnames="cache")
def _run_part(
    params: Params, cache: KVCache, packed: jax.Array, *, part: str, layout: StepLayout, config: StepConfig
) -> tuple[jax.Array, KVCache]:
    """Returns an array f32[T D] that all results went into, and the cache."""
    inputs, model = unpack(packed, layout), config.model
    is_tiled = config.kernels.linear == "reference"
    tiles = RowTiles(layout.row_tile, inputs.counts[0]) if is_tiled else None
    shape = (layout.num_tokens, model.hidden_size)
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    body = _LAYER_PARTS[part](inputs, layout, config, tiles) if part in _LAYER_PARTS else None

    def one_pass(carry: tuple[jax.Array, KVCache], unused: None) -> tuple[tuple[jax.Array, KVCache], None]:
        x, cache = carry
        if body is None:
            _, logprobs, *_ = head_sample(
                x[inputs.logits_indices],
                inputs,
                params,
                config=model,
                kernels=config.kernels,
                tiles=tiles,
                is_greedy=layout.is_greedy,
            )
            return (x + GLUE * logprobs[:, :1], cache), None
        for index, layer in enumerate(params.layers):
            x, cache = body(layer, x, cache, jnp.int32(index))
        return (x, cache), None

    (x, cache), _ = lax.scan(one_pass, (x, cache), None, length=PASSES)
    return x, cache


def _first(y: Rows) -> jax.Array:
    """Returns a little of each row of y [T *], f32[T 1]."""
    y = y if isinstance(y, jax.Array) else y.scale
    return GLUE * y.reshape(y.shape[0], -1)[:, :1].astype(jnp.float32)


def _noise(layout: StepLayout, *sizes: int) -> jax.Array:
    """Returns f32[T *sizes] to be added to a little of x: the input of a part that does not take x itself."""
    return jax.random.normal(jax.random.key(1), (layout.num_tokens, *sizes), jnp.float32)


def _added(x: jax.Array, y: Rows, layer: Linear, config: StepConfig, tiles: RowTiles | None) -> jax.Array:
    """Returns x + linear(y); where a kernel leaves parts, with the launch that the next norm saves a step."""
    return add_product(x, y, layer, backend=config.kernels.linear, tiles=tiles).settled()


def _qkv(inputs: StepInputs, layout: StepLayout, config: StepConfig, tiles: RowTiles | None) -> Body:
    cos, sin = rope_tables(inputs.positions, config=config.model, seq_len=config.max_model_len, tiles=tiles)
    options: dict[str, Any] = {"config": config.model, "kernels": config.kernels}

    def body(layer: LayerParams, x: jax.Array, cache: KVCache, index: jax.Array) -> tuple[jax.Array, KVCache]:
        stream, slots = Stream(base=x), inputs.slot_mapping
        if is_one_kernel(config.kernels, layout.query_tile):
            parts, _ = qkv_parts(stream, layer, **options)
            return x + _first(parts[0]), cache
        q, cache, _ = attention_input(stream, cos, sin, layer, cache, slots, layer_index=index, tiles=tiles, **options)
        return x + _first(q), cache

    return body


def _attention(inputs: StepInputs, layout: StepLayout, config: StepConfig, tiles: RowTiles | None) -> Body:
    model, kernels, query_tile = config.model, config.kernels, layout.query_tile
    cos, sin = rope_tables(inputs.positions, config=model, seq_len=config.max_model_len, tiles=tiles)
    noise = _noise(layout, model.qkv_size if is_one_kernel(kernels, query_tile) else model.num_heads * model.head_dim)

    def body(layer: LayerParams, x: jax.Array, cache: KVCache, index: jax.Array) -> tuple[jax.Array, KVCache]:
        rows = noise + _first(x)
        if is_one_kernel(kernels, query_tile):
            options: dict[str, Any] = {"layer_index": index, "config": model}
            attended, cache = append_and_attend(rows[None], cos, sin, layer, cache, inputs, **options)
            return x + _first(attended), cache
        q = rows.astype(model.dtype).reshape(-1, model.num_heads, model.head_dim)
        attended = attention(q, cache, inputs, layer_index=index, query_tile=query_tile, kernels=kernels)
        return x + _first(attended), cache

    return body


def _o(inputs: StepInputs, layout: StepLayout, config: StepConfig, tiles: RowTiles | None) -> Body:
    noise = _noise(layout, config.model.num_heads * config.model.head_dim)

    def body(layer: LayerParams, x: jax.Array, cache: KVCache, index: jax.Array) -> tuple[jax.Array, KVCache]:
        attended = (noise + _first(x)).astype(config.model.dtype)
        return _added(x, attended, layer.o_proj, config, tiles), cache

    return body


def _gate_up(inputs: StepInputs, layout: StepLayout, config: StepConfig, tiles: RowTiles | None) -> Body:
    def body(layer: LayerParams, x: jax.Array, cache: KVCache, index: jax.Array) -> tuple[jax.Array, KVCache]:
        hidden, _ = gate_up(Stream(base=x), layer, config=config.model, kernels=config.kernels, tiles=tiles)
        return x + _first(hidden), cache

    return body


def _down(inputs: StepInputs, layout: StepLayout, config: StepConfig, tiles: RowTiles | None) -> Body:
    noise = _noise(layout, config.model.mlp_size)

    def body(layer: LayerParams, x: jax.Array, cache: KVCache, index: jax.Array) -> tuple[jax.Array, KVCache]:
        hidden, backend = noise + _first(x), config.kernels.linear
        norm = jnp.ones(config.model.mlp_size, config.model.dtype)
        group_size = limb_group(layer.down_proj, layout.num_tokens, norm.dtype, backend)
        rows: Rows = hidden.astype(norm.dtype)
        if group_size is not None:  # a launch that a step does not have: there the gate makes the limbs
            rows = normed_rows(hidden, norm, eps=1.0, backend=backend, group_size=group_size)
        return _added(x, rows, layer.down_proj, config, tiles), cache

    return body


_LAYER_PARTS = {"attention": _attention, "qkv": _qkv, "o": _o, "gate_up": _gate_up, "down": _down}
