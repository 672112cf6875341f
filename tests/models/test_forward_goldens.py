"""Logits of small random checkpoints against transformers: both config forms, every rope kind, every feature."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.golden_models import MODELS, POSITIONS, SHORT_NUM_TOKENS, token_ids, write_hf_folder

from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.models.decoder import forward

TOLERANCE = 1e-4  # max |difference| of a logit; float32 on both sides, logits of size 1
# A feature left out must show far above what rounding can do, or the comparison above would prove nothing.
MIN_EFFECT = 100 * TOLERANCE
NUM_TOKENS_FOR_EFFECT = 256  # kind "dynamic" shows beyond its trained length alone and takes all

BY_NAME = {model.name: model for model in MODELS}
_jitted = jax.jit(forward, static_argnames="config")


def load(tmp_path, model):
    write_hf_folder(tmp_path, model, num_shards=2 if model.config["tie_word_embeddings"] else 1)
    return load_checkpoint(tmp_path, dtype="float32")


def difference(params, config, model, num_tokens, golden="logits"):
    """Returns the largest difference to the golden logits at the golden positions below num_tokens."""
    positions = [position for position in POSITIONS if position < num_tokens]
    logits = _jitted(params, config=config, token_ids=jnp.asarray(token_ids(model)[:, :num_tokens]))
    with np.load(model.golden_path) as arrays:
        expected = arrays[golden][: len(positions)]
    assert expected.shape == (len(positions), config.vocab_size)
    return float(np.abs(np.asarray(logits)[0, positions] - expected).max())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_logits_equal_transformers_up_to_position_4095(tmp_path, model):
    loaded = load(tmp_path, model)
    assert difference(loaded.params, loaded.config, model, 4096) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama_dynamic", "llama_dynamic_new"])
def test_dynamic_rope_below_the_trained_length_is_plain(tmp_path, name):
    model = BY_NAME[name]
    loaded = load(tmp_path, model)
    assert difference(loaded.params, loaded.config, model, SHORT_NUM_TOKENS, "short_logits") <= TOLERANCE


def effect_of_rope(tmp_path, model, **changes):
    """Returns how far the logits move when numbers of the rope are other than the checkpoint's."""
    loaded = load(tmp_path, model)
    rope = dataclasses.replace(loaded.config.rope, **changes)
    assert rope != loaded.config.rope
    num_tokens = 4096 if loaded.config.rope.kind == "dynamic" else NUM_TOKENS_FOR_EFFECT
    return difference(loaded.params, dataclasses.replace(loaded.config, rope=rope), model, num_tokens)


@pytest.mark.parametrize(
    "name", ["llama_linear", "llama_dynamic", "llama_dynamic_new", "llama_llama3", "llama_llama3_new", "llama_yarn"]
)
def test_leaving_out_rope_scaling_shows(tmp_path, name):
    assert effect_of_rope(tmp_path, BY_NAME[name], kind="default") > MIN_EFFECT


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama_linear", "factor", 3.0),
        ("llama_dynamic", "original_max_position_embeddings", 2048),
        ("llama_llama3", "low_freq_factor", 3.0),
        ("llama_llama3", "high_freq_factor", 16.0),
        ("llama_llama3", "original_max_position_embeddings", 512),
        ("llama_yarn", "attention_factor", 1.0),
        ("llama_yarn", "original_max_position_embeddings", 4096),
        ("qwen3_yarn_new", "beta_fast", 32.0),
        ("qwen3_yarn_new", "truncate", True),
        ("llama_untied", "theta", 10000.0),
    ],
)
def test_each_number_of_the_rope_shows(tmp_path, name, field, value):
    assert effect_of_rope(tmp_path, BY_NAME[name], **{field: value}) > MIN_EFFECT


@pytest.mark.parametrize("name", ["qwen3", "qwen3_yarn_new"])
def test_leaving_out_qk_norm_shows(tmp_path, name):
    model = BY_NAME[name]
    loaded = load(tmp_path, model)
    layers = tuple(dataclasses.replace(layer, q_norm=None, k_norm=None) for layer in loaded.params.layers)
    params = dataclasses.replace(loaded.params, layers=layers)
    config = dataclasses.replace(loaded.config, has_qk_norm=False)
    assert difference(params, config, model, NUM_TOKENS_FOR_EFFECT) > MIN_EFFECT


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("qwen2", "qkv_proj"),
        ("llama_bias", "qkv_proj"),
        ("llama_bias", "o_proj"),
        ("llama_bias", "gate_up_proj"),
        ("llama_bias", "down_proj"),
    ],
)
def test_leaving_out_a_bias_shows(tmp_path, name, linear):
    model = BY_NAME[name]
    loaded = load(tmp_path, model)

    def without_bias(layer):
        weights = getattr(layer, linear)
        return dataclasses.replace(layer, **{linear: dataclasses.replace(weights, bias=jnp.zeros_like(weights.bias))})

    params = dataclasses.replace(loaded.params, layers=tuple(without_bias(layer) for layer in loaded.params.layers))
    assert difference(params, loaded.config, model, NUM_TOKENS_FOR_EFFECT) > MIN_EFFECT


@pytest.mark.parametrize("name", ["qwen3", "qwen3_yarn_new", "mistral"])
def test_head_dim_of_its_own_loads_with_an_output_projection_that_is_not_square(tmp_path, name):
    loaded = load(tmp_path, BY_NAME[name])
    config = loaded.config
    assert config.head_dim == 32 != config.hidden_size // config.num_heads
    assert loaded.params.layers[0].o_proj.weight.shape == (config.num_heads * 32, config.hidden_size)


def test_epsilon_of_the_norms_shows(tmp_path):
    model = BY_NAME["llama_untied"]
    loaded = load(tmp_path, model)
    other = dataclasses.replace(loaded.config, rms_norm_eps=1e-1)
    assert difference(loaded.params, other, model, NUM_TOKENS_FOR_EFFECT) > MIN_EFFECT
