"""Device memory: what is free, what a model needs at least, and how many blocks the cache gets of the rest."""

import os
from pathlib import Path

import jax

from photon_jax.cache.kv_cache import bytes_per_block
from photon_jax.cache.layout import CacheLayout, plan_cache
from photon_jax.config import CacheConfig, EngineConfig
from photon_jax.engine.controls import control_bytes
from photon_jax.errors import ConfigError
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import abstract_params, num_bytes

CPU_CACHE_TOKENS = 16_384  # on a CPU the cache is the host's memory: it is not filled because it is free


def free_bytes(device: jax.Device) -> int:
    """Returns the memory that a device can still give; on a CPU the host's available memory.

    What others in this process hold, a trainer say, is not free.
    """
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(model: ModelConfig, config: EngineConfig) -> None:
    """Checks before a weight is read that weights and the smallest cache fit the memory that is free.

    Raises:
      ConfigError: they don't; the message has the numbers.
    """
    free = free_bytes(jax.devices()[0])
    weights = num_bytes(abstract_params(model))
    block_bytes = bytes_per_block(model, config.cache.block_size, config.cache.kv_dtype)
    cache = (config.cache.num_blocks or 2) * block_bytes
    if weights + cache > free:
        raise ConfigError(
            f"the model doesn't fit: its weights take {weights} bytes in {model.dtype}, a block of the cache "
            f"{block_bytes} and the {config.cache.num_blocks or 2} blocks that it needs {cache}, but {free} bytes are "
            'free; free memory, give quantization="int8" or a smaller dtype, or take a smaller model'
        )


def plan_pool(
    model: ModelConfig, config: EngineConfig, *, max_model_len: int, free: int, workspace: int
) -> CacheLayout:
    """Returns the cache's layout: what memory_fraction of the free memory leaves beside workspace and controls.

    Args:
      free: bytes, with the weights in place.
      workspace: temporary memory of the largest step.

    Raises:
      ConfigError: not even one usable block fits.
    """
    controls = control_bytes(vocab_size=model.vocab_size, num_slots=config.scheduler.max_num_seqs + 1)
    return plan_cache(
        config.cache,
        bytes_per_block=bytes_per_block(model, config.cache.block_size, config.cache.kv_dtype),
        free_bytes=free,
        reserved_bytes=workspace + controls,
        max_useful_tokens=_max_useful_tokens(config, max_model_len),
    )


def _max_useful_tokens(config: EngineConfig, max_model_len: int) -> int:
    most = config.scheduler.max_num_seqs * max_model_len
    if jax.default_backend() != "cpu":
        return most
    return min(most, max(CPU_CACHE_TOKENS, config.max_model_len or 0))


def affordable_blocks(model: ModelConfig, cache: CacheConfig) -> int:
    """Returns how many blocks a cache can have, the null block not counted, without taking the machine's memory."""
    device = jax.devices()[0]
    block_bytes = bytes_per_block(model, cache.block_size, cache.kv_dtype)
    fitting = int(free_bytes(device) * cache.memory_fraction) // block_bytes - 1
    return fitting if device.platform != "cpu" else min(fitting, CPU_CACHE_TOKENS // cache.block_size)
