"""Model configuration: the shape of a decoder of the Llama and Qwen family."""

import dataclasses
import sys
from typing import Literal, get_args

from photon_jax.errors import ConfigError

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000  # more than any model has: a damaged count must not be built
DTYPES = ("float32", "bfloat16", "float16")

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding and its long-context scaling.

    Attributes:
      kind: how the inverse frequencies are scaled.
      theta: base of the frequencies.
      factor: context extension factor; 1 for kind "default".
      original_max_position_embeddings: context length before the extension (llama3, yarn, dynamic).
      low_freq_factor, high_freq_factor: llama3 only.
      beta_fast, beta_slow, truncate: yarn only, the ramp between interpolated and kept frequencies.
      attention_factor: yarn only, scale of cos and sin, already resolved from mscale and factor.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.truncate, bool):
            raise ConfigError(f"rope truncate must be True or False, got {self.truncate!r:.100}")
        if not isinstance(self.kind, str) or self.kind not in get_args(RopeKind):
            raise ConfigError(f"rope kind must be one of {', '.join(get_args(RopeKind))}, got {self.kind!r:.100}")
        for field in dataclasses.fields(self):
            if field.type is float:
                _check_number(f"rope {field.name}", getattr(self, field.name))
        _check_size("rope original_max_position_embeddings", self.original_max_position_embeddings, minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationConfig:
    """How the weights of a model are kept as int8.

    Attributes:
      group_size: inputs per scale.
      has_embedding: whether embedding and head are int8 too, or only the linear layers.
    """

    group_size: int
    has_embedding: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group_size must be at least 1, got {self.group_size}; use 32, 64 or 128")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of one model; hashable, a static argument of the step.

    Attributes:
      architecture: the checkpoint's name for it, such as "LlamaForCausalLM".
      dtype: of weights and activations, a NumPy dtype name; decided at load.
      checkpoint_dtype: what the file holds or declares.
      quantization: of the weights, decided at load; None when all have `dtype`.
      bos_token_id, eos_token_ids: from the checkpoint's config (generation_config and tokenizer add to the latter).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    dtype: str = "float32"
    checkpoint_dtype: str = "float32"
    quantization: QuantizationConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                _check_size(field.name, value)
            elif field.type in (bool, str) and not isinstance(value, field.type):
                raise ConfigError(f"{field.name} must be a {field.type.__name__}, got {value!r:.100}")
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(f"num_layers must be at most {MAX_LAYERS}, got {self.num_layers}")
        _check_number("rms_norm_eps", self.rms_norm_eps)
        for name, kinds in (
            ("rope", RopeConfig),
            ("quantization", QuantizationConfig | None),
            ("eos_token_ids", tuple),
            ("bos_token_id", int | None),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise ConfigError(f"{name} is of the wrong type, got {getattr(self, name)!r:.100}")
        for token_id in (*self.eos_token_ids, self.bos_token_id or 0):
            _check_size("bos_token_id and eos_token_ids", token_id, minimum=0)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary pairs, got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r:.100}")

    @property
    def num_groups(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Rows of the fused QKV projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def with_quantization(self, quantization: QuantizationConfig | None) -> "ModelConfig":
        """Returns the config of the same model with its weights kept so."""
        return dataclasses.replace(self, quantization=quantization)


def _check_size(name: str, value: object, minimum: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_SIZE:
        raise ConfigError(f"{name} must be an integer in [{minimum}, {MAX_SIZE}], got {value!r:.100}")


def _check_number(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise ConfigError(f"{name} must be a positive number, got {value!r:.100}")
