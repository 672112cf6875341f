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
from photon_jax.ops.linear import LIMB_ROWS
from photon_jax.step_io import StepLayout, input_fields, packed_size

KERNELS = KernelConfig(linear="triton", attention="triton")
LAYER_KERNELS = 8  # norm, QKV, attention with rope and cache write, its splits, O, norm, gate and up, down


def lowered_step(num_rows, quantization, kv_dtype, *, kernels=KERNELS, query_tile=1, device="NVIDIA H200"):
    layout = StepLayout(
        num_tokens=num_rows, num_rows=num_rows, table_width=32, query_tile=query_tile, row_tile=1, is_greedy=True
    )
    model = shape_config("llama-3.2-1b", "bfloat16", quantization)
    config = StepConfig(model=model, kernels=kernels, max_model_len=2048, kv_dtype=kv_dtype)
    cache = abstract_kv_cache(model, CacheLayout(num_blocks=64, block_size=64), kv_dtype)
    state = BatchState(last_token=jax.ShapeDtypeStruct((65,), jnp.int32))
    packed = jax.ShapeDtypeStruct((packed_size(input_fields(layout)),), jnp.int32)

    def run(params, cache, state, packed):
        return step(params, cache, state, packed, layout=layout, config=config)

    return lower_for_cuda(run, abstract_params(model), cache, state, packed, device=device)


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


@pytest.mark.lowers
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_a_layer_with_int8_weights_is_eight_or_nine_kernels_and_no_sum_of_parts_beside_them(num_rows, kv_dtype):
    text = lowered_step(num_rows, QuantizationConfig(group_size=128, has_embedding=True), kv_dtype)
    layers = layers_of(text)
    assert len(layers) == 2
    for layer in layers:
        found = count_operations(text, layer)
        is_gate_apart = num_rows in LIMB_ROWS
        assert found.pop("custom_call") == LAYER_KERNELS + is_gate_apart
        assert set(found) == {"reshape"}, found  # of the heads, no launch


@pytest.mark.lowers
def test_a_layer_with_dense_weights_adds_its_products_in_their_epilogues():
    text = lowered_step(8, None, "auto")
    (layer,) = layers_of(text)
    found = count_operations(text, layer)
    assert found["dot_general"] == 4 and found["custom_call"] == LAYER_KERNELS - 4
    assert found["add"] == 3 and "reduce" not in found, found  # O's, down's, and that of the sigmoid


@pytest.mark.lowers
@pytest.mark.parametrize(
    ("num_rows", "query_tile", "group_size", "kv_dtype", "device"),
    [
        (1, 1, 128, "auto", "NVIDIA H200"),
        (1, 1, None, "int8", "NVIDIA A100"),
        (300, 16, 32, "int8", "NVIDIA A100"),
        (300, 16, None, "auto", "NVIDIA H200"),
    ],
)
def test_an_invariant_layer_is_the_same_eight_kernels_whatever_its_rows_are(
    num_rows, query_tile, group_size, kv_dtype, device
):
    """Norm, QKV, rope and cache write, attention, O, norm, gate and up, down; nothing is left to XLA that adds up."""
    int8 = QuantizationConfig(group_size=group_size, has_embedding=True) if group_size else None
    kernels = KernelConfig(invariant=True).resolve("gpu", head_dim=64)
    text = lowered_step(num_rows, int8, kv_dtype, kernels=kernels, query_tile=query_tile, device=device)
    assert "stablehlo.dot" not in text and "stablehlo.reduce" not in text
    for layer in layers_of(text):
        found = count_operations(text, layer)
        assert found.pop("custom_call") == LAYER_KERNELS
        assert set(found) <= {"reshape", "broadcast_in_dim", "constant"}, (
            found
        )  # of the heads; zeros for tokens of no item
