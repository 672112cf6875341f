"""Shapes of well-known models, for benchmarks on random weights: no checkpoint is needed."""

import jax

from photon_jax.errors import ConfigError
from photon_jax.models.config import ModelConfig, QuantizationConfig, RopeConfig
from photon_jax.models.params import Params, random_params

LLAMA3_ROPE = RopeConfig(
    kind="llama3",
    theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
QWEN3: dict[str, object] = {
    "architecture": "Qwen3ForCausalLM",
    "vocab_size": 151936,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(theta=1000000.0),
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "has_qk_norm": True,
}
LLAMA: dict[str, object] = {
    "architecture": "LlamaForCausalLM",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, object]] = {
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "mlp_size": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "rope": LLAMA3_ROPE,
        "max_position_embeddings": 131072,
    },
    "qwen3-0.6b": QWEN3
    | {"hidden_size": 1024, "mlp_size": 3072, "num_layers": 28, "num_heads": 16, "tie_word_embeddings": True},
    "qwen3-8b": QWEN3 | {"hidden_size": 4096, "mlp_size": 12288, "num_layers": 36, "num_heads": 32},
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "mlp_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "rope": RopeConfig(theta=100000.0),
        "max_position_embeddings": 8192,
    },
    "tiny": {  # for trials of the benchmark itself
        "vocab_size": 256,
        "hidden_size": 64,
        "mlp_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope": RopeConfig(),
        "max_position_embeddings": 16384,
    },
}


def shape_config(name: str, dtype: str, quantization: QuantizationConfig | None = None) -> ModelConfig:
    """Returns the model config of a named shape; "auto" is float32 on a CPU, bfloat16 elsewhere.

    Raises:
      ConfigError: there is no such shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape must be one of {', '.join(sorted(SHAPES))}, got {name!r}")
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return ModelConfig(dtype=dtype, quantization=quantization, **(LLAMA | SHAPES[name]))  # type: ignore[arg-type]


def draw_weights(config: ModelConfig) -> Params:
    """Returns random weights of a config, the same at each call."""
    return random_params(config, jax.random.key(0))
