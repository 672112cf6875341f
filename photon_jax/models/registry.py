"""Model registry: the architectures that can be loaded, and where their checkpoints differ."""

import dataclasses
from typing import Literal

from photon_jax.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What a checkpoint's architecture name says beyond its configuration.

    Attributes:
      name: the class name in the configuration of a Hugging Face checkpoint.
      model_type: its short name, also that of GGUF files unless their converter folds it into another.
      attention_bias: which attention projections have a bias; "config": all four if `attention_bias` is true.
      reads_mlp_bias: whether `mlp_bias` counts.
      has_qk_norm: whether queries and keys are normalized per head before the rotary embedding.
      default_head_dim: head size when the configuration gives none; None divides the hidden size by the heads.
      sliding_window: whether `sliding_window` counts: never, by itself, or with `use_sliding_window`.
    """

    name: str
    model_type: str
    attention_bias: Literal["config", "qkv", "none"] = "config"
    reads_mlp_bias: bool = False
    has_qk_norm: bool = False
    default_head_dim: int | None = None
    sliding_window: Literal["never", "alone", "switched"] = "never"


ARCHITECTURES = (
    Architecture(name="LlamaForCausalLM", model_type="llama", reads_mlp_bias=True),
    Architecture(name="MistralForCausalLM", model_type="mistral", attention_bias="none", sliding_window="alone"),
    Architecture(name="Qwen2ForCausalLM", model_type="qwen2", attention_bias="qkv", sliding_window="switched"),
    Architecture(
        name="Qwen3ForCausalLM", model_type="qwen3", has_qk_norm=True, default_head_dim=128, sliding_window="switched"
    ),
)
_GGUF_NAMES = ("llama", "qwen2", "qwen3")  # Mistral checkpoints become "llama" files


def find_architecture(name: str) -> Architecture:
    """Returns the architecture with this class name or model type.

    Raises:
      CheckpointError: it is not one of those that can be loaded.
    """
    for architecture in ARCHITECTURES:
        if name in (architecture.name, architecture.model_type):
            return architecture
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise CheckpointError(f"architecture {name!r} is not supported; supported are {known}")


def find_gguf_architecture(name: str) -> Architecture:
    """Returns the architecture of a GGUF file from its `general.architecture`.

    Raises:
      CheckpointError: it is not one of those that can be loaded.
    """
    if name not in _GGUF_NAMES:
        raise CheckpointError(f"GGUF architecture {name!r} is not supported; supported are {', '.join(_GGUF_NAMES)}")
    return find_architecture(name)
