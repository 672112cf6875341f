"""config.json -> ModelConfig: the two forms of the rope, defaults of each architecture, errors that name the key."""

import dataclasses
import math

import pytest

from photon_jax.errors import CheckpointError
from photon_jax.models.config import RopeConfig
from photon_jax.models.hf_config import config_from_hf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


def rope_of(**fields):
    return config_from_hf({**LLAMA, **fields}).rope


def test_shape_is_read():
    config = config_from_hf(LLAMA)
    assert (config.hidden_size, config.mlp_size, config.num_layers, config.vocab_size) == (64, 96, 2, 160)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_groups) == (4, 2, 16, 2)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 8192)
    assert hash(config) == hash(config_from_hf(dict(LLAMA)))


def test_explicit_head_dim_wins_over_division():
    assert config_from_hf({**QWEN3, "head_dim": 48}).head_dim == 48
    assert config_from_hf({**LLAMA, "head_dim": 32}).head_dim == 32
    assert config_from_hf({**LLAMA, "head_dim": None}).head_dim == 16
    assert config_from_hf(QWEN3).head_dim == 128  # the architecture's own default
    assert config_from_hf(
        {**LLAMA, "hidden_size": 72, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8}
    )
    with pytest.raises(CheckpointError, match="head_dim"):
        config_from_hf({**LLAMA, "hidden_size": 66})


def test_without_kv_heads_every_head_has_its_own():
    for fields in (LLAMA, {**LLAMA, "num_key_value_heads": None}):
        fields = {key: value for key, value in fields.items() if key != "num_key_value_heads" or value is None}
        assert config_from_hf(fields).num_kv_heads == 4


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        (LLAMA, (False, False, False, False)),
        ({**LLAMA, "attention_bias": True}, (True, True, False, False)),
        ({**LLAMA, "mlp_bias": True}, (False, False, True, False)),
        (QWEN2, (True, False, False, False)),
        ({**QWEN2, "attention_bias": False, "mlp_bias": True}, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        ({**QWEN3, "attention_bias": True}, (True, True, False, True)),
        ({**MISTRAL, "attention_bias": True}, (False, False, False, False)),
    ],
)
def test_biases_and_qk_norm_follow_the_architecture(hf, expected):
    config = config_from_hf(hf)
    assert (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias, config.has_qk_norm) == expected


@pytest.mark.parametrize("hf", [LLAMA, QWEN2, QWEN3, MISTRAL])
def test_embeddings_are_tied_only_when_the_file_says_so(hf):
    assert not config_from_hf(hf).tie_word_embeddings
    assert config_from_hf({**hf, "tie_word_embeddings": True}).tie_word_embeddings


def test_model_type_stands_in_for_missing_architectures():
    hf = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert config_from_hf({**hf, "model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"
    with pytest.raises(CheckpointError, match="model_type"):
        config_from_hf(hf)


@pytest.mark.parametrize(("value", "expected"), [(None, ()), (2, (2,)), ([7, 2, 7], (7, 2)), ([], ())])
def test_eos_is_one_id_or_a_list(value, expected):
    assert config_from_hf({**LLAMA, "eos_token_id": value}).eos_token_ids == expected


def test_dtype_is_read_under_both_names():
    assert config_from_hf({**LLAMA, "torch_dtype": "bfloat16"}).checkpoint_dtype == "bfloat16"
    assert config_from_hf({**LLAMA, "dtype": "float16", "torch_dtype": "float32"}).checkpoint_dtype == "float16"
    assert config_from_hf({**LLAMA, "torch_dtype": "torch.bfloat16"}).checkpoint_dtype == "bfloat16"


# the rope in both forms


def test_older_and_newer_form_agree():
    for kind, fields in {"linear": {"factor": 4.0}, "llama3": LLAMA3, "yarn": {"factor": 4.0}}.items():
        older = rope_of(rope_theta=5e5, rope_scaling={"rope_type": kind, **fields})
        oldest = rope_of(rope_theta=5e5, rope_scaling={"type": kind, **fields})
        newer = rope_of(rope_theta=None, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **fields})
        assert older == oldest == newer
        assert (older.kind, older.theta) == (kind, 5e5)


def test_no_scaling_in_any_form_is_the_default_kind():
    for fields in ({}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": {"rope_theta": 10000.0}}):
        assert rope_of(**fields) == RopeConfig(theta=10000.0)
    assert rope_of(rope_theta=None).theta == 10000.0


def test_newer_key_of_the_kind_wins_over_the_older():
    assert rope_of(rope_scaling={"rope_type": "linear", "type": "yarn", "factor": 2.0}).kind == "linear"


def test_theta_inside_wins_over_theta_beside():
    assert rope_of(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 7.0}).theta == 7.0


def test_original_length_comes_from_beside_then_inside_then_the_whole_length():
    scaling = {"rope_type": "llama3", **LLAMA3}
    assert rope_of(rope_scaling=scaling).original_max_position_embeddings == 1024
    beside = rope_of(rope_scaling=scaling, original_max_position_embeddings=2048)
    assert beside.original_max_position_embeddings == 2048
    del scaling["original_max_position_embeddings"]
    assert rope_of(rope_scaling=scaling).original_max_position_embeddings == 8192


def test_dynamic_counts_from_the_whole_length():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 1024}
    assert rope_of(rope_scaling=scaling).original_max_position_embeddings == 8192


def yarn(**fields):
    return rope_of(rope_scaling={"rope_type": "yarn", "factor": 4.0, **fields})


def test_yarn_attention_factor_is_explicit_or_from_both_mscales_or_from_the_factor():
    plain = 0.1 * math.log(4.0) + 1.0
    assert yarn().attention_factor == pytest.approx(plain)
    assert yarn(attention_factor=1.5, mscale=2.0, mscale_all_dim=1.0).attention_factor == 1.5
    assert yarn(mscale=2.0).attention_factor == pytest.approx(plain)
    assert yarn(mscale=2.0, mscale_all_dim=0).attention_factor == pytest.approx(plain)
    ratio = (0.2 * math.log(4.0) + 1.0) / (0.05 * math.log(4.0) + 1.0)
    assert yarn(mscale=2.0, mscale_all_dim=0.5).attention_factor == pytest.approx(ratio)


def test_yarn_ramp_defaults_and_overrides():
    assert dataclasses.astuple(yarn())[6:9] == (32.0, 1.0, True)
    changed = yarn(beta_fast=16, beta_slow=2.0, truncate=False)
    assert (changed.beta_fast, changed.beta_slow, changed.truncate) == (16.0, 2.0, False)


def test_yarn_factor_of_null_is_the_ratio_of_lengths():
    assert yarn(factor=None, original_max_position_embeddings=2048).factor == 4.0


# what is refused


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
@pytest.mark.parametrize("value", ["absent", None, "64", 0, -1, True, [64], math.nan, math.inf])
def test_missing_or_wrong_number_is_an_error_naming_the_key(key, value):
    hf = {**LLAMA, key: value}
    if value == "absent":
        del hf[key]
    with pytest.raises(CheckpointError, match=key):
        config_from_hf(hf)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_local_experts": 8}, "num_local_experts.*mixture-of-experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads.*3 key-value heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "linear"),
        ({"rope_scaling": {"factor": 2.0}}, "factor.*rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": "no"}}, "truncate"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ],
)
def test_what_the_engine_does_not_compute_is_an_error_naming_it(fields, match):
    with pytest.raises(CheckpointError, match=match):
        config_from_hf({**LLAMA, **fields})


def test_active_sliding_window_is_refused_and_an_inactive_one_is_not():
    for hf in (QWEN2, QWEN3):
        assert config_from_hf({**hf, "use_sliding_window": False, "sliding_window": 4096})
        full = {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}
        assert config_from_hf({**hf, **full})
        with pytest.raises(CheckpointError, match=r"sliding_window 4096.*use_sliding_window"):
            config_from_hf({**hf, "use_sliding_window": True})
    with pytest.raises(CheckpointError, match="sliding_window 512"):
        config_from_hf({**MISTRAL, "sliding_window": 512})
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(CheckpointError, match="sliding_window 4096"):
        config_from_hf(absent)
