import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from helpers.flax_llama import LinenLlama, NnxLlama
from helpers.same_params import assert_same_params
from helpers.tiny_model import tiny_config

from photon_jax import forward
from photon_jax.checkpoint.flax_io import (
    from_linen_variables,
    from_nnx_state,
    to_linen_variables,
    to_nnx_state,
)
from photon_jax.errors import CheckpointError
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import random_params

CONFIGS = {
    "tied": tiny_config(),
    "every part": tiny_config(
        tie_word_embeddings=False, has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True, has_qk_norm=True
    ),
}
TOKEN_IDS = jnp.asarray(np.random.default_rng(0).integers(0, 258, (2, 9)), jnp.int32)


@pytest.fixture(scope="module", params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def params(config):
    return random_params(config, jax.random.key(2))


def assert_close(ours, expected):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(expected), rtol=0, atol=1e-5)


def test_an_nnx_module_with_the_exported_state_computes_the_same_logits(config, params):
    module = NnxLlama(config, nnx.Rngs(0))
    nnx.update(module, to_nnx_state(params, config))
    assert_close(module(TOKEN_IDS), forward(params, config, TOKEN_IDS))


def test_the_state_of_a_new_nnx_module_is_imported(config):
    module = NnxLlama(config, nnx.Rngs(5))
    params = from_nnx_state(nnx.state(module, nnx.Param), config)
    assert_close(module(TOKEN_IDS), forward(params, config, TOKEN_IDS))


def test_a_linen_module_with_the_exported_variables_computes_the_same_logits(config, params):
    logits = LinenLlama(config).apply(to_linen_variables(params, config), TOKEN_IDS)
    assert_close(logits, forward(params, config, TOKEN_IDS))


def test_the_variables_of_a_new_linen_module_are_imported(config):
    module = LinenLlama(config)
    variables = module.init(jax.random.key(5), TOKEN_IDS)
    params = from_linen_variables(variables, config)
    assert_close(module.apply(variables, TOKEN_IDS), forward(params, config, TOKEN_IDS))


def test_round_trips_are_bitwise_also_inside_a_jitted_function(config, params):
    assert_same_params(from_nnx_state(to_nnx_state(params, config), config), params)
    assert_same_params(from_linen_variables(to_linen_variables(params, config), config), params)
    trip = jax.jit(lambda tree: from_linen_variables(to_linen_variables(tree, config), config))
    assert_same_params(trip(params), params)
    half = dataclasses.replace(config, dtype="bfloat16")
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert_same_params(from_nnx_state(to_nnx_state(rounded, half), half), rounded)
    assert_same_params(from_nnx_state(to_nnx_state(params, config), half), rounded)


def test_names_and_shapes_are_as_documented(config, params):
    linen = traverse_util.flatten_dict(to_linen_variables(params, config)["params"], sep="/")
    shapes = {name: array.shape for name, array in linen.items()}
    assert shapes["model/embed_tokens/embedding"] == (258, 64)
    assert shapes["model/layers_1/self_attn/k_proj/kernel"] == (64, 32)
    assert shapes["model/layers_0/mlp/down_proj/kernel"] == (96, 64)
    assert shapes["model/layers_0/post_attention_layernorm/scale"] == shapes["model/norm/scale"] == (64,)
    if config is CONFIGS["every part"]:
        assert shapes["model/layers_0/self_attn/q_norm/scale"] == (16,)
        assert shapes["model/layers_0/self_attn/q_proj/bias"] == (96,)
        assert shapes["lm_head/kernel"] == (64, 258)
    paths = dict(nnx.to_flat_state(to_nnx_state(params, config)))
    assert isinstance(paths["model", "layers", 1, "mlp", "up_proj", "kernel"], nnx.Param)
    assert len(paths) == len(shapes)


def test_a_state_that_does_not_fit_is_refused_by_name(config, params):
    def changed(change):
        flat = traverse_util.flatten_dict(to_linen_variables(params, config)["params"], sep="/")
        change(flat)
        return {"params": traverse_util.unflatten_dict(flat, sep="/")}

    name = "model/layers_1/mlp/up_proj/kernel"
    with pytest.raises(CheckpointError, match=r"no model\.layers\.1\.mlp\.up_proj\.kernel, expected shape \[64, 96\]"):
        from_linen_variables(changed(lambda flat: flat.pop(name)), config)
    with pytest.raises(CheckpointError, match=r"up_proj\.kernel has shape \[96, 64\], expected \[64, 96\]"):
        from_linen_variables(changed(lambda flat: flat.update({name: flat[name].T})), config)
    with pytest.raises(CheckpointError, match=r"has model\.adapter\.kernel, which LlamaForCausalLM has no place for"):
        from_linen_variables(changed(lambda flat: flat.update({"model/adapter/kernel": flat[name]})), config)
    with pytest.raises(CheckpointError, match=r"must hold 'params', got \['model'\]"):
        from_linen_variables({"model": {}}, config)
    int8 = dataclasses.replace(config, quantization=QuantizationConfig(group_size=32))
    with pytest.raises(CheckpointError, match="dense weights"):
        to_nnx_state(params, int8)
