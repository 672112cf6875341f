"""Int8 weights of steps with many rows: dequantized once for all of them, and no others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from photon_jax.bench.shapes import shape_config
from photon_jax.cache.kv_cache import abstract_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig, SchedulerConfig
from photon_jax.engine import runner as runner_module
from photon_jax.engine.buckets import padded_buckets
from photon_jax.engine.runner import ModelRunner
from photon_jax.engine.start import _expands_weights
from photon_jax.engine.step import BatchState, StepConfig, step
from photon_jax.engine.weights import StepWeights
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import DenseLinear, abstract_params, random_params
from photon_jax.ops import expansion
from photon_jax.quantization.int8 import QuantizedLinear, dequantize
from photon_jax.step_io import StepLayout, input_fields, output_fields, packed_size

KERNELS = KernelConfig(linear="triton", attention="triton")
MODEL = shape_config("tiny", "bfloat16", QuantizationConfig(group_size=32, has_embedding=True))
CACHE = CacheLayout(num_blocks=64, block_size=16)


def make_layout(num_tokens, num_rows, **fields):
    sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "table_width": 8, "row_tile": 1, "is_greedy": True}
    return StepLayout(query_tile=1 if num_tokens == num_rows else 16, **sizes, **fields)


def abstract_weights(expands):
    params = abstract_params(MODEL)
    expanded = jax.eval_shape(lambda params: expansion.expand(params, jnp.dtype("bfloat16")), params)
    return StepWeights(params, expanded if expands else None)


@pytest.mark.parametrize(
    ("layout", "has_dense_layers", "has_dense_head"),
    [
        (make_layout(129, 129), True, True),
        (make_layout(128, 128), False, False),
        (make_layout(256, 64), True, False),
        (make_layout(128, 256), False, True),
        (make_layout(256, 256, has_scores=True), True, False),  # the scores' logits come for a few rows at a time
    ],
)
def test_the_rows_of_a_product_decide_which_form_a_step_reads(layout, has_dense_layers, has_dense_head):
    weights = abstract_weights(expands=True)
    params = weights.of(layout)
    assert isinstance(params.layers[-1].down_proj, DenseLinear) == has_dense_layers
    assert isinstance(params.head, QuantizedLinear) != has_dense_head
    assert params.embedding is weights.params.embedding
    assert abstract_weights(expands=False).of(layout).layers == weights.params.layers


@pytest.mark.parametrize(
    ("layout", "expands", "is_dequantizing"),
    [
        (make_layout(256, 256), True, False),
        (make_layout(256, 256, num_steps=8), True, False),
        (make_layout(256, 256), False, True),
        (make_layout(384, 16), True, False),
        (make_layout(128, 128, num_steps=8), False, False),
    ],
)
def test_steps_dequantize_no_weights_where_there_is_memory_for_all(layout, expands, is_dequantizing):
    config = StepConfig(model=MODEL, kernels=KERNELS, max_model_len=64)
    state = BatchState(last_token=jax.ShapeDtypeStruct((layout.num_rows + 1,), jnp.int32))
    packed = jax.ShapeDtypeStruct((packed_size(input_fields(layout)),), jnp.int32)
    trace = jax.jit(lambda *arguments: step(*arguments, layout=layout, config=config)).trace(
        abstract_weights(expands).of(layout), abstract_kv_cache(MODEL, CACHE, "auto"), state, packed
    )
    assert ("int8_dequantize" in str(trace.jaxpr)) == is_dequantizing


def test_they_are_dequantized_where_a_quarter_of_the_free_memory_holds_them(monkeypatch):
    config = StepConfig(model=MODEL, kernels=KERNELS, max_model_len=64)
    params = random_params(MODEL, jax.random.key(0))
    needed = expansion.expanded_bytes(params, jnp.dtype("bfloat16"))
    for free, expands in ((4 * needed, True), (4 * needed - 4, False)):
        monkeypatch.setattr("photon_jax.engine.start.free_bytes", lambda device, free=free: free)
        assert _expands_weights(params, config) == expands
        for other in ("xla", "reference"):
            assert not _expands_weights(params, dataclasses.replace(config, kernels=KernelConfig(linear=other)))
    dense = random_params(dataclasses.replace(MODEL, quantization=None), jax.random.key(0))
    assert not _expands_weights(dense, config)


def test_a_runner_gives_long_steps_the_weights_of_now(monkeypatch):
    def plain(q, scale, *, group_size, dtype):  # the kernel needs a GPU
        return dequantize(q, scale, group_size=group_size).astype(dtype)

    given = []

    def run(params, cache, state, packed, states, masks, *, layout, config):
        given.append(params)
        return jnp.zeros((packed_size(output_fields(layout)),), jnp.int32), cache, state, ()

    monkeypatch.setattr(expansion, "int8_dequantize", plain)
    monkeypatch.setattr(runner_module, "jit_step", run)
    config = StepConfig(model=MODEL, kernels=KERNELS, max_model_len=64)
    first, second = (random_params(MODEL, jax.random.key(seed)) for seed in (1, 2))
    buckets = padded_buckets(SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=512), CACHE, max_model_len=64)
    runner = ModelRunner(first, config, CACHE, buckets, max_num_seqs=256, expands_weights=True)
    for params in (first, second):
        runner.set_params(params)
        for layout in (make_layout(256, 256), make_layout(8, 8)):
            runner.dispatch(layout, np.zeros(packed_size(input_fields(layout)), np.int32))
        long, short = (each.layers[0].o_proj for each in given[-2:])
        q = params.layers[0].o_proj
        expected = plain(q.q, q.scale, group_size=q.group_size, dtype=jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(long.weight, np.float32), np.asarray(expected, np.float32))
        np.testing.assert_array_equal(short.q, q.q)
    assert runner.expanded_bytes == expansion.expanded_bytes(first, jnp.dtype("bfloat16"))
