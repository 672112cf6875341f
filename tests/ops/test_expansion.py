import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.bench.shapes import shape_config
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import DenseLinear, random_params
from photon_jax.ops import expansion
from photon_jax.ops.linear import head_logits, linear
from photon_jax.quantization.int8 import QuantizedLinear, dequantize


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
