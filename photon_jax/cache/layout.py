"""Cache layout: how many blocks of what size the paged KV cache has. Host only."""

import dataclasses

from photon_jax.config import CacheConfig
from photon_jax.errors import ConfigError

NULL_BLOCK_ID = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayout:
    """Geometry of the block pool; block 0 is the null block, which padding reads and writes."""

    num_blocks: int  # the null block included
    block_size: int  # tokens

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return self.num_blocks - 1

    @property
    def max_tokens(self) -> int:
        """Tokens that fit the pool."""
        return self.num_usable_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def plan_cache(
    config: CacheConfig, *, bytes_per_block: int, free_bytes: int, max_useful_tokens: int, reserved_bytes: int = 0
) -> CacheLayout:
    """Returns the layout of the pool: `config.num_blocks`, or as many blocks as memory allows and the limits can use.

    Args:
      config: block size, number of blocks and memory fraction.
      bytes_per_block: keys and values of one block in all layers.
      free_bytes: memory left on the device once the weights are there; memory_fraction of it is the engine's.
      reserved_bytes: of the engine's memory, what the steps need beside the cache.
      max_useful_tokens: tokens beyond which the scheduler's limits leave blocks idle.

    Raises:
      ConfigError: not even one usable block fits, or num_blocks is given and doesn't.
    """
    if config.num_blocks is not None:
        if config.num_blocks * bytes_per_block > free_bytes - reserved_bytes:
            raise ConfigError(
                f"num_blocks {config.num_blocks} need {config.num_blocks * bytes_per_block} bytes, "
                f"{free_bytes - reserved_bytes} are free beside what the steps need; lower num_blocks, or leave it out "
                "to take what fits"
            )
        return CacheLayout(num_blocks=config.num_blocks, block_size=config.block_size)
    budget = int(free_bytes * config.memory_fraction) - reserved_bytes
    num_blocks = min(budget // bytes_per_block, -(-max_useful_tokens // config.block_size) + 1)
    if num_blocks < 2:
        raise ConfigError(
            f"no room for a KV cache: {free_bytes} bytes are free, memory_fraction {config.memory_fraction} of them "
            f"less {reserved_bytes} that the steps need leaves {budget}, two blocks need {2 * bytes_per_block}; free "
            "memory, raise memory_fraction or lower block_size or max_num_batched_tokens"
        )
    return CacheLayout(num_blocks=num_blocks, block_size=config.block_size)
