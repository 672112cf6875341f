"""GGUF configuration: a file's metadata fields -> ModelConfig. The only reader of their key names."""

import math
from collections.abc import Collection, Mapping

import numpy as np

from photon_jax.errors import CheckpointError
from photon_jax.models.config import MAX_LAYERS, ModelConfig, RopeConfig
from photon_jax.models.config_fields import ConfigFields
from photon_jax.models.hf_config import check_heads, resolve_head_dim, yarn_attention_scale
from photon_jax.models.registry import find_gguf_architecture

# general.file_type of the plain formats; everything else is a mix of quantized types
_FLOAT_FILE_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
_LLAMA3_LENGTHS = tuple(2**exponent for exponent in range(10, 21))


def config_from_gguf(
    fields: Mapping[str, object],
    *,
    tensor_names: Collection[str],
    rope_factors: np.ndarray | None = None,
) -> ModelConfig:
    """Returns the model configuration that a GGUF file's fields describe, in float32 until a dtype is chosen.

    Args:
      fields: metadata, as `gguf_io.read_fields` returns it.
      tensor_names: of all tensors; biases and an untied head show in no field.
      rope_factors: f32[d/2], the file's rope_freqs.weight, by which inverse frequencies are divided.

    Raises:
      CheckpointError: a field is missing or wrong, or asks for something that this engine doesn't compute.
    """
    general = ConfigFields(fields, "GGUF metadata")
    prefix = general.text("general.architecture")
    architecture = find_gguf_architecture(prefix)
    own = ConfigFields(
        {key.removeprefix(f"{prefix}."): value for key, value in fields.items() if key.startswith(f"{prefix}.")},
        f"GGUF metadata {prefix}.*",
    )
    hidden_size = own.integer("embedding_length")
    num_heads = own.integer("attention.head_count")
    num_kv_heads = own.integer("attention.head_count_kv", num_heads)
    head_dim = resolve_head_dim(own, "attention.key_length", None, hidden_size, num_heads)
    check_heads(own, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    _refuse_unsupported(own, head_dim)
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=_vocab_size(general, own),
        hidden_size=hidden_size,
        mlp_size=own.integer("feed_forward_length"),
        num_layers=own.integer("block_count", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=own.number("attention.layer_norm_rms_epsilon"),
        rope=_rope_config(own, head_dim, rope_factors),
        max_position_embeddings=own.integer("context_length"),
        tie_word_embeddings="output.weight" not in tensor_names,
        has_qkv_bias="blk.0.attn_q.bias" in tensor_names,
        has_o_bias="blk.0.attn_output.bias" in tensor_names,
        has_mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        has_qk_norm=architecture.has_qk_norm,
        checkpoint_dtype=_FLOAT_FILE_TYPES.get(general.integer("general.file_type", -1, minimum=0), "quantized"),
        bos_token_id=_first(general.token_ids("tokenizer.ggml.bos_token_id")),
        eos_token_ids=_stop_token_ids(general),
    )


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _stop_token_ids(general: ConfigFields) -> tuple[int, ...]:
    """Returns the end of text and, where chat models name another token for it, the end of turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(token_id for key in keys for token_id in general.token_ids(key)))


def _vocab_size(general: ConfigFields, own: ConfigFields) -> int:
    tokens = general.get("tokenizer.ggml.tokens")
    if own.get("vocab_size") is None and isinstance(tokens, list) and tokens:
        return len(tokens)
    return own.integer("vocab_size")


def _refuse_unsupported(own: ConfigFields, head_dim: int) -> None:
    if own.get("expert_count"):
        raise CheckpointError(
            f"{own.where}: expert_count is {own.get('expert_count')}; mixture-of-experts models are not supported"
        )
    if own.get("attention.sliding_window"):
        raise CheckpointError(
            f"{own.where}: sliding-window attention ({own.get('attention.sliding_window')}) is not supported"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.integer(key, head_dim) != head_dim:
            raise CheckpointError(f"{own.where}: {key} must equal the head size {head_dim}, got {own.get(key)}")


def _rope_config(own: ConfigFields, head_dim: int, rope_factors: np.ndarray | None) -> RopeConfig:
    theta = own.number("rope.freq_base", 10000.0)
    older_factor = own.number("rope.scale_linear", 1.0)
    kind = own.text("rope.scaling.type", "none" if older_factor == 1.0 else "linear")
    if rope_factors is not None:
        if kind != "none":
            raise CheckpointError(f"tensor rope_freqs.weight and rope.scaling.type {kind!r} contradict each other")
        return _llama3_config(theta, head_dim, rope_factors)
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = own.number("rope.scaling.factor", older_factor)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind == "yarn":
        if own.get("rope.scaling.yarn_log_multiplier"):
            raise CheckpointError(f"{own.where}: rope.scaling.yarn_log_multiplier is not supported")
        own_factor = own.number("rope.scaling.yarn_attn_factor", own.number("rope.scaling.attn_factor", 1.0))
        return RopeConfig(
            kind="yarn",
            theta=theta,
            factor=factor,
            original_max_position_embeddings=own.integer(
                "rope.scaling.original_context_length", own.integer("context_length")
            ),
            beta_fast=own.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=own.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=own_factor * yarn_attention_scale(factor),
        )
    raise CheckpointError(f"{own.where}: rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn")


def _llama3_config(theta: float, head_dim: int, rope_factors: np.ndarray) -> RopeConfig:
    """Finds the llama3 scaling whose factors the file stores: its own fields don't say."""
    if rope_factors.shape != (head_dim // 2,):
        raise CheckpointError(f"tensor rope_freqs.weight: expected shape ({head_dim // 2},), got {rope_factors.shape}")
    factor = float(rope_factors.max())
    for original in _LLAMA3_LENGTHS:
        rope = RopeConfig(kind="llama3", theta=theta, factor=factor, original_max_position_embeddings=original)
        if np.allclose(_llama3_factors(rope, head_dim), rope_factors, rtol=1e-4, atol=0.0):
            return rope
    raise CheckpointError(
        "tensor rope_freqs.weight: the factors are not those of a llama3 rope scaling with low_freq_factor 1 and "
        "high_freq_factor 4; use the Hugging Face checkpoint of this model"
    )


def _llama3_factors(rope: RopeConfig, head_dim: int) -> np.ndarray:  # f64[d/2]
    """Returns what llama3 scaling divides the inverse frequencies by: 1, `factor`, or a blend between."""
    wavelengths = 2 * math.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = np.clip((rope.original_max_position_embeddings / wavelengths - low) / (high - low), 0.0, 1.0)
    blended: np.ndarray = 1.0 / ((1.0 - kept) / rope.factor + kept)
    return blended
