"""What a decode step launches on a GPU, read from its program lowered for one."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from helpers.cuda_lowering import lower_for_cuda

from photon_jax.bench.shapes import shape_config
from photon_jax.cache.kv_cache import abstract_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig
from photon_jax.engine.step import BatchState, StepConfig, step
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import abstract_params
from photon_jax.step_io import StepLayout, input_fields, packed_size

KERNELS = KernelConfig(linear="triton", attention="triton")
LAYER_KERNELS = 9  # norm, QKV, rope and cache write, attention and its splits, O, norm, gate and up, down


def lowered_step(num_rows, quantization, kv_dtype):
    layout = StepLayout(
        num_tokens=num_rows, num_rows=num_rows, table_width=32, query_tile=1, row_tile=1, is_greedy=True
    )
    model = shape_config("llama-3.2-1b", "bfloat16", quantization)
    config = StepConfig(model=model, kernels=KERNELS, max_model_len=2048, kv_dtype=kv_dtype)
    cache = abstract_kv_cache(model, CacheLayout(num_blocks=64, block_size=64), kv_dtype)
    state = BatchState(last_token=jax.ShapeDtypeStruct((65,), jnp.int32))
    packed = jax.ShapeDtypeStruct((packed_size(input_fields(layout)),), jnp.int32)

    def run(params, cache, state, packed):
        return step(params, cache, state, packed, layout=layout, config=config)

    return lower_for_cuda(run, abstract_params(model), cache, state, packed)


def count_operations(text, name):
    """Returns how often a lowered function, with those that it calls, has each operation on floats or int8."""
    bodies = {re.search(r"@([\w.]+)\(", body)[1]: body for body in text.split("\n  func.func ")[1:]}

    def walk(name):
        for line in bodies[name].splitlines()[1:]:
            if called := re.search(r" = (?:func\.)?call @([\w.]+)\(", line):
                yield from walk(called[1])
            elif operation := re.search(r' = "?stablehlo\.(\w+)', line):
                result = line.rsplit("->", 1)[-1].rsplit(" : ", 1)[-1]
                if re.search("(f32|bf16|i8)>", result):
                    yield operation[1]

    return collections.Counter(walk(name))


def layers_of(text):
    """Returns the lowered layers: the first one, whose stream has no parts, and the others where they differ."""
    return sorted(set(re.findall(r"func\.func private @(_paged_layer\w*)\(", text)))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_a_layer_with_int8_weights_is_nine_kernels_and_no_sum_of_parts_beside_them(num_rows, kv_dtype):
    text = lowered_step(num_rows, QuantizationConfig(group_size=128, has_embedding=True), kv_dtype)
    if text is None:
        return
    layers = layers_of(text)
    assert len(layers) == 2
    for layer in layers:
        found = count_operations(text, layer)
        assert found.pop("custom_call") == LAYER_KERNELS
        if num_rows <= 16:
            assert set(found) == {"reshape"}, found  # of the heads, no launch
        else:  # a large tile leaves the gate to XLA: the only sum is that of its sigmoid
            assert found["add"] == 1 and "reduce" not in found and found["exponential"] == 1, found


def test_a_layer_with_dense_weights_adds_its_products_in_their_epilogues():
    text = lowered_step(8, None, "auto")
    if text is None:
        return
    (layer,) = layers_of(text)
    found = count_operations(text, layer)
    assert found["dot_general"] == 4 and found["custom_call"] == LAYER_KERNELS - 4
    assert found["add"] == 3 and "reduce" not in found, found  # O's, down's, and that of the sigmoid
