"""Hugging Face configuration: config.json -> ModelConfig. The only reader of its key names."""

import math
from collections.abc import Mapping
from typing import get_args

from photon_jax.errors import CheckpointError
from photon_jax.models.config import MAX_LAYERS, ModelConfig, RopeConfig, RopeKind
from photon_jax.models.config_fields import ConfigFields
from photon_jax.models.registry import Architecture, find_architecture

_WHERE = "config.json"
_SILU_NAMES = ("silu", "swish")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def config_from_hf(hf: Mapping[str, object]) -> ModelConfig:
    """Returns the model configuration that a parsed config.json describes, in float32 until a dtype is chosen.

    Raises:
      CheckpointError: a key is missing or wrong, or asks for something that this engine doesn't compute.
    """
    fields = ConfigFields(hf, _WHERE)
    architecture = find_architecture(_architecture_name(fields))
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    _refuse_unsupported(fields, architecture, num_layers)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    max_position_embeddings = fields.integer("max_position_embeddings")
    head_dim = resolve_head_dim(fields, "head_dim", architecture.default_head_dim, hidden_size, num_heads)
    check_heads(fields, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    attention_bias = architecture.attention_bias == "config" and fields.boolean("attention_bias", False)
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        mlp_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=_rope_config(fields, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        has_qkv_bias=attention_bias or architecture.attention_bias == "qkv",
        has_o_bias=attention_bias,
        has_mlp_bias=architecture.reads_mlp_bias and fields.boolean("mlp_bias", False),
        has_qk_norm=architecture.has_qk_norm,
        checkpoint_dtype=_declared_dtype(fields),
        bos_token_id=fields.integer("bos_token_id", minimum=0) if fields.get("bos_token_id") is not None else None,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def resolve_head_dim(fields: ConfigFields, key: str, default: int | None, hidden_size: int, num_heads: int) -> int:  # d
    """Returns the head size: the file's own wins, then the architecture's, then hidden size over heads."""
    if fields.get(key) is not None:
        return fields.integer(key)
    if default is not None:
        return default
    if hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.where} has no {key!r}, and the hidden size {hidden_size} is not a multiple of {num_heads} heads"
        )
    return hidden_size // num_heads


def check_heads(fields: ConfigFields, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises CheckpointError unless query heads group evenly over KV heads and a head splits into rotary pairs."""
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{fields.where}: {num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads"
        )
    if head_dim % 2:
        raise CheckpointError(f"{fields.where}: head_dim must be even for rotary pairs, got {head_dim}")


def _architecture_name(fields: ConfigFields) -> str:
    names = fields.get("architectures")
    if names is None or names == []:
        return fields.text("model_type")
    if not isinstance(names, list | tuple) or not isinstance(names[0], str):
        raise fields.wrong("architectures", "a list of class names")
    return names[0]


def _declared_dtype(fields: ConfigFields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return fields.text(key, "float32").removeprefix("torch.")


def _refuse_unsupported(fields: ConfigFields, architecture: Architecture, num_layers: int) -> None:
    activation = fields.text("hidden_act", _SILU_NAMES[0])
    if activation not in _SILU_NAMES:
        raise CheckpointError(f"{_WHERE}: hidden_act {activation!r} is not supported; supported is 'silu'")
    for key in _EXPERT_KEYS:
        if fields.get(key):
            raise CheckpointError(
                f"{_WHERE}: {key} is {fields.get(key)!r}; mixture-of-experts models are not supported"
            )
    if fields.get("quantization_config"):
        raise CheckpointError(
            f"{_WHERE}: quantization_config is set; quantized Hugging Face checkpoints are not supported, "
            "use the float checkpoint or a GGUF file"
        )
    _refuse_sliding_window(fields, architecture, num_layers)


def _refuse_sliding_window(fields: ConfigFields, architecture: Architecture, num_layers: int) -> None:
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list | tuple) or len(layer_types) != num_layers:
            raise fields.wrong("layer_types", f"a list with one entry for each of {num_layers} layers")
        others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if others:
            raise CheckpointError(f"{_WHERE}: layer_types has {', '.join(others)}; only full_attention is supported")
        return
    if architecture.sliding_window == "switched":
        is_active = fields.boolean("use_sliding_window", False)
        remedy = "set use_sliding_window to false"
    else:
        # this family's default, where the key is absent, is a window of 4096: only an explicit null is full attention
        is_active = architecture.sliding_window == "alone" and fields.values.get("sliding_window", 4096) is not None
        remedy = "set sliding_window to null"
    if is_active:
        window = fields.values.get("sliding_window", 4096)
        raise CheckpointError(
            f"{_WHERE}: sliding-window attention (sliding_window {window!r}) is not supported; "
            f"{remedy} if the model works with full attention"
        )


def _rope_config(fields: ConfigFields, max_position_embeddings: int) -> RopeConfig:
    """Reads the older form (rope_theta beside rope_scaling) and the newer one (rope_parameters with both inside)."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.section(key)
    kind = _rope_kind(rope)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    for owner in (rope, fields):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(f"{owner.where}: partial_rotary_factor other than 1 is not supported")
    # a value beside the rope section wins over one inside it; neither: the whole length counts as the original one
    inside = rope.integer("original_max_position_embeddings", max_position_embeddings)
    original = fields.integer("original_max_position_embeddings", inside)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=rope.number("factor", minimum=1.0))
    if kind == "dynamic":  # grows past max_position_embeddings, whatever the original length was
        factor = rope.number("factor", minimum=1.0)
        return RopeConfig(
            kind=kind, theta=theta, factor=factor, original_max_position_embeddings=max_position_embeddings
        )
    if kind == "llama3":
        return _llama3_config(rope, theta, original)
    if kind == "yarn":
        return _yarn_config(rope, theta, original, max_position_embeddings)
    return RopeConfig(theta=theta)


def _rope_kind(rope: ConfigFields) -> RopeKind:
    for key, value in rope.values.items():
        if isinstance(value, Mapping):
            raise CheckpointError(f"{rope.where}: {key!r} holds parameters of its own; rope per layer is not supported")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in get_args(RopeKind):
        known = ", ".join(get_args(RopeKind))
        raise CheckpointError(f"{rope.where}: rope type {kind!r} is not supported; supported are {known}")
    if kind == "default" and "factor" in rope.values and not {"rope_type", "type"} & set(rope.values):
        raise CheckpointError(f"{rope.where} has a 'factor' but neither 'rope_type' nor 'type' to say how to use it")
    return kind  # type: ignore[return-value]


def _llama3_config(rope: ConfigFields, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise CheckpointError(f"{rope.where}: high_freq_factor ({high}) must be more than low_freq_factor ({low})")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor", minimum=1.0),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_config(rope: ConfigFields, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    if "factor" in rope.values and rope.values["factor"] is None:
        factor = max_position_embeddings / original
    else:
        factor = rope.number("factor", minimum=1.0)
    # 0 counts as unset for the four below
    mscale, mscale_all_dim = (_number_or_zero(rope, key) for key in ("mscale", "mscale_all_dim"))
    if rope.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    elif mscale and mscale_all_dim:
        attention_factor = yarn_attention_scale(factor, mscale) / yarn_attention_scale(factor, mscale_all_dim)
    else:
        attention_factor = yarn_attention_scale(factor)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_number_or_zero(rope, "beta_fast") or 32.0,
        beta_slow=_number_or_zero(rope, "beta_slow") or 1.0,
        truncate=rope.boolean("truncate", True),
        attention_factor=attention_factor,
    )


def _number_or_zero(rope: ConfigFields, key: str) -> float:
    return rope.number(key) if rope.get(key) else 0.0


def yarn_attention_scale(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's scale of cos and sin for a context extended by `factor`: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
