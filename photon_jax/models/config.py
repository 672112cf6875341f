"""Model configuration: the shape of a decoder of the Llama and Qwen family."""

import dataclasses
from typing import Literal

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of one model; hashable, a static argument of the step.

    Attributes:
      architecture: the checkpoint's name for it, such as "LlamaForCausalLM".
      dtype: of weights and activations, a NumPy dtype name; decided at load.
      checkpoint_dtype: what the file holds or declares.
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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_groups(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Rows of the fused QKV projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
