"""photon_jax: a small, readable, fast LLM inference engine in pure JAX.

The public names are resolved when they are first used, so importing the package, or a host-side module of it, does
not import JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from photon_jax.client.async_llm import AsyncLLM
    from photon_jax.client.submission import Prompt
    from photon_jax.config import CacheConfig, EngineConfig, KernelConfig, SchedulerConfig
    from photon_jax.controls import LogitsProcessor
    from photon_jax.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineDeadError,
        PhotonError,
        RequestError,
    )
    from photon_jax.functional import generate
    from photon_jax.llm import LLM
    from photon_jax.models.decoder import forward
    from photon_jax.outputs import CompletionOutput, RequestOutput, ScoreOutput
    from photon_jax.request import SamplingParams
    from photon_jax.structured_outputs import StructuredOutputs

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "KernelConfig",
    "LogitsProcessor",
    "PhotonError",
    "Prompt",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "ScoreOutput",
    "StructuredOutputs",
    "forward",
    "generate",
]

_HOMES = {
    "photon_jax.client.async_llm": ("AsyncLLM",),
    "photon_jax.config": ("CacheConfig", "EngineConfig", "KernelConfig", "SchedulerConfig"),
    "photon_jax.controls": ("LogitsProcessor",),
    "photon_jax.errors": (
        "CapacityError",
        "CheckpointError",
        "ConfigError",
        "EngineDeadError",
        "PhotonError",
        "RequestError",
    ),
    "photon_jax.functional": ("generate",),
    "photon_jax.llm": ("LLM",),
    "photon_jax.models.decoder": ("forward",),
    "photon_jax.outputs": ("CompletionOutput", "RequestOutput", "ScoreOutput"),
    "photon_jax.request": ("SamplingParams",),
    "photon_jax.structured_outputs": ("StructuredOutputs",),
    "photon_jax.client.submission": ("Prompt",),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
