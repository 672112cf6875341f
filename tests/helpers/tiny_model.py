"""A model that compiles in seconds: two layers, width 64, two KV heads, the vocabulary of ByteTokenizer."""

import functools

import jax

from photon_jax.models.config import ModelConfig, RopeConfig
from photon_jax.models.params import Params, random_params


def tiny_config(**changes) -> ModelConfig:
    fields = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 258,
        "hidden_size": 64,
        "mlp_size": 96,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_ids": (257,),
    }
    return ModelConfig(**(fields | changes))


@functools.cache
def tiny_params(config: ModelConfig | None = None) -> Params:
    return random_params(config or tiny_config(), jax.random.key(7))
