import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.bench.shapes import shape_config
from photon_jax.cache.kv_cache import abstract_kv_cache
from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KernelConfig
from photon_jax.engine.step import BatchState, StepConfig, step
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import DenseLinear, abstract_params, random_params
from photon_jax.ops import expansion
from photon_jax.ops.linear import head_logits, linear
from photon_jax.quantization.int8 import QuantizedLinear, dequantize
from photon_jax.step_io import StepLayout, input_fields, packed_size


def make_params(has_embedding=True, **changes):
    quantization = QuantizationConfig(group_size=32, has_embedding=has_embedding)
    config = dataclasses.replace(shape_config("tiny", "float32", quantization), **changes)
    return config, random_params(config, jax.random.key(3))


def expand(params, monkeypatch, dtype=jnp.float32):
    def plain(q, scale, *, group_size, dtype):  # the kernel needs a GPU
        return dequantize(q, scale, group_size=group_size).astype(dtype)

    monkeypatch.setattr(expansion, "int8_dequantize", plain)
    return expansion.expand(params, dtype)


def test_expanded_layers_multiply_as_the_int8_ones_do(monkeypatch):
    config, params = make_params()
    expanded = expand(params, monkeypatch)
    x = jax.random.normal(jax.random.key(0), (5, config.hidden_size))
    for layer, dense in zip(params.layers, expanded.layers, strict=True):
        for name in ("qkv_proj", "gate_up_proj"):
            assert isinstance(getattr(dense, name), DenseLinear)
            expected, found = (linear(x, getattr(each, name), backend="xla") for each in (layer, dense))
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    found = head_logits(x, expanded.head, backend="xla")
    np.testing.assert_allclose(found, head_logits(x, params.head, backend="xla"), rtol=1e-5, atol=1e-5)


def test_an_embedding_is_never_expanded_and_a_dense_head_stays(monkeypatch):
    _, params = make_params()
    expanded = expand(params, monkeypatch)
    assert expanded.embedding is params.embedding
    assert isinstance(expanded.lm_head, jax.Array)  # it was tied
    _, params = make_params(has_embedding=False)
    expanded = expand(params, monkeypatch)
    assert expanded.embedding is params.embedding and expanded.lm_head is None


def test_the_bytes_are_those_of_the_expanded_weights(monkeypatch):
    for has_embedding in (True, False):
        _, params = make_params(has_embedding)
        for dtype, size in ((jnp.float32, 4), (jnp.bfloat16, 2)):
            expanded = expand(params, monkeypatch, dtype)
            linears = [each for each in jax.tree.leaves(expanded, is_leaf=is_linear) if isinstance(each, DenseLinear)]
            weights = [each.weight for each in linears] + ([expanded.lm_head] if has_embedding else [])
            assert expansion.expanded_bytes(params, dtype) == sum(each.size for each in weights) * size
            assert {each.dtype for each in weights} == {jnp.dtype(dtype)}


def is_linear(node):
    return isinstance(node, DenseLinear | QuantizedLinear)


def test_weights_with_int8_activations_are_not_expanded(monkeypatch):
    _, params = make_params()
    layers = [
        dataclasses.replace(layer, down_proj=dataclasses.replace(layer.down_proj, int8_activations=True))
        for layer in params.layers
    ]
    expanded = expand(dataclasses.replace(params, layers=tuple(layers)), monkeypatch)
    assert all(isinstance(layer.down_proj, QuantizedLinear) for layer in expanded.layers)


def test_steps_of_a_dispatch_share_dequantized_weights_where_memory_and_rows_allow():
    for num_rows, num_steps, expands, is_shared in (
        (256, 8, True, True),
        (256, 8, False, False),
        (256, 1, True, False),
        (128, 8, True, False),
    ):
        inside, outside = count_dequantizing(num_rows, num_steps, expands)
        few_rows = num_rows == 128
        assert bool(outside) == (is_shared or (num_steps == 1 and not few_rows)), (num_rows, num_steps, expands)
        assert bool(inside) == (not is_shared and num_steps > 1 and not few_rows), (num_rows, num_steps, expands)


def count_dequantizing(num_rows, num_steps, expands_weights):
    """Returns how many launches dequantize inside the loop over the steps of a dispatch, and how many outside of it."""
    model = shape_config("tiny", "bfloat16", QuantizationConfig(group_size=32, has_embedding=True))
    kernels = KernelConfig(linear="triton", attention="triton")
    config = StepConfig(model=model, kernels=kernels, max_model_len=64, expands_weights=expands_weights)
    sizes = {"num_tokens": num_rows, "num_rows": num_rows, "table_width": 8, "num_steps": num_steps}
    layout = StepLayout(**sizes, query_tile=1, row_tile=1, is_greedy=True)
    cache = abstract_kv_cache(model, CacheLayout(num_blocks=64, block_size=16), "auto")
    state = BatchState(last_token=jax.ShapeDtypeStruct((num_rows + 1,), jnp.int32))
    packed = jax.ShapeDtypeStruct((packed_size(input_fields(layout)),), jnp.int32)
    trace = jax.jit(lambda *arguments: step(*arguments, layout=layout, config=config))
    jaxpr = trace.trace(abstract_params(model), cache, state, packed).jaxpr
    return count_kernels(jaxpr, "dequantize")


def count_kernels(jaxpr, name, is_inside=False):
    inside = outside = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            is_found = name in str(equation.params.get("name", equation.params))
            inside, outside = inside + (is_found and is_inside), outside + (is_found and not is_inside)
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found = count_kernels(inner, name, is_inside or equation.primitive.name in ("scan", "while"))
                inside, outside = inside + found[0], outside + found[1]
    return inside, outside
