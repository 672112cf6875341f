"""What an LLM starts from: a checkpoint that is found and read, or parameters that the caller holds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from photon_jax.checkpoint.load import LoadedCheckpoint, load_checkpoint
from photon_jax.checkpoint.weight_map import Source, WeightMap
from photon_jax.config import EngineConfig
from photon_jax.errors import CheckpointError, ConfigError
from photon_jax.models.check_params import check_params
from photon_jax.models.config import ModelConfig, QuantizationConfig
from photon_jax.models.params import Params, abstract_params, num_bytes
from photon_jax.progress import OnProgress, loading_bar
from photon_jax.quantization.weights import with_int8_activations


def read_model(
    model: str | Path,
    config: EngineConfig,
    progress: bool | OnProgress,
    on_config: Callable[[ModelConfig], None] | None = None,
) -> LoadedCheckpoint:
    """Returns the checkpoint that a name stands for, its weights as the engine config asks for them.

    Args:
      on_config: called before the first weight is read; it may refuse what it gets.

    Raises:
      CheckpointError: the checkpoint can't be used.
      ConfigError: the name is of another type, or the weights can't be quantized so, or int8_activations are asked for
        without int8 weights.
    """
    if not isinstance(model, str | Path):
        raise ConfigError(
            f'model must be "demo", a folder, a GGUF file or a Hugging Face id, as a string or a Path, got {model!r}'
        )
    with loading_bar(progress) as on_tensor:
        loaded = load_checkpoint(
            model,
            dtype=config.dtype,
            quantization=weights_quantization(config),
            on_tensor=on_tensor,
            on_config=on_config,
            use_generation_config=config.use_generation_config,
        )
    return dataclasses.replace(loaded, params=_with_activations(loaded.params, loaded.config, config))


def weights_quantization(config: EngineConfig) -> QuantizationConfig | None:
    """Returns how an engine config asks for the weights to be kept."""
    if config.quantization is None:
        return None
    return QuantizationConfig(group_size=config.group_size, has_embedding=config.quantize_embedding)


def take_params(params: Params, model: ModelConfig, config: EngineConfig) -> LoadedCheckpoint:
    """Returns parameters in hand as a checkpoint, with no file behind it; copies nothing.

    Raises:
      CheckpointError: they don't fit the model's config.
      ConfigError: the engine config asks for other weights than these.
    """
    if not isinstance(model, ModelConfig):
        raise ConfigError(f"config must be the ModelConfig of the params, got {model!r:.100}")
    if config.dtype not in ("auto", model.dtype):
        raise ConfigError(f"params are served as they are, in {model.dtype}, got dtype={config.dtype!r}; leave it out")
    if weights_quantization(config) not in (None, model.quantization):
        raise ConfigError("params are served as they are; quantize them before, and leave quantization out")
    check_params(params, abstract_params(model))
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    sources = {name: (Source(name, "whole", leaf.shape, is_transposed=False),) for name, leaf in leaves.items()}
    return LoadedCheckpoint(
        config=model,
        generation_config={},
        eos_token_ids=model.eos_token_ids,
        tokenizer_source=None,
        path=Path("params"),
        weight_map=WeightMap(model, sources, is_interleaved=False),
        tensors=_HeldTensors(leaves),
        params=_with_activations(params, model, config),
        num_bytes=num_bytes(params),
    )


def _with_activations(params: Params, model: ModelConfig, config: EngineConfig) -> Params:
    """Returns the parameters with their linear layers set to round their inputs, if the engine config asks for it."""
    if not config.int8_activations:
        return params
    if model.quantization is None:
        raise ConfigError('int8_activations needs int8 weights; give quantization="int8" too')
    return with_int8_activations(params)


class _HeldTensors:
    """The leaves of parameters that no file holds, by key path."""

    def __init__(self, leaves: dict[str, jax.Array]) -> None:
        self._leaves = leaves

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: leaf.shape for name, leaf in self._leaves.items()}

    def num_bytes(self, name: str) -> int:
        """Returns what a file holds of the leaf: nothing."""
        return 0

    def dtype_name(self, name: str) -> str:
        return str(self._leaves[name].dtype)

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self._leaves[name])

    def read_q8_0(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        raise CheckpointError(f"{name} isn't Q8_0")
