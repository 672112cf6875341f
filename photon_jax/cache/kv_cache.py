"""The paged KV cache on the device: a PyTree of two arrays that every step takes and gives back."""

import dataclasses

import jax
import jax.numpy as jnp

from photon_jax.cache.layout import CacheLayout
from photon_jax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """Keys and values of all layers; block 0 is the null block, which padding reads and writes.

    Attributes:
      k: keys, after rope and norm; one head's block is contiguous.
      v: values.
    """

    k: jax.Array  # [L N K S d]
    v: jax.Array  # [L N K S d]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.k.shape[3]


def abstract_kv_cache(config: ModelConfig, layout: CacheLayout) -> KVCache:
    """Returns the cache's tree of `jax.ShapeDtypeStruct`, in `config.dtype`."""
    shape = (config.num_layers, layout.num_blocks, config.num_kv_heads, layout.block_size, config.head_dim)
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype))
    return KVCache(k=leaf, v=leaf)  # type: ignore[arg-type]


def init_kv_cache(config: ModelConfig, layout: CacheLayout) -> KVCache:
    """Returns an empty cache on the default device."""
    leaf = abstract_kv_cache(config, layout).k
    return KVCache(k=jnp.zeros(leaf.shape, leaf.dtype), v=jnp.zeros(leaf.shape, leaf.dtype))


def bytes_per_block(config: ModelConfig, block_size: int) -> int:
    """Returns the bytes that one block takes in all layers, keys and values together."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    return per_token * block_size


def write_kv(
    cache: KVCache,
    layer: jax.Array,  # i32[]
    k: jax.Array,  # [T K d]
    v: jax.Array,  # [T K d]
    slot_mapping: jax.Array,  # i32[T]
) -> KVCache:
    """Returns the cache with token t of this layer stored in slot slot_mapping[t] = block_id * block_size + offset."""
    blocks, offsets = slot_mapping // cache.block_size, slot_mapping % cache.block_size
    return KVCache(
        k=cache.k.at[layer, blocks, :, offsets].set(k),
        v=cache.v.at[layer, blocks, :, offsets].set(v),
    )
