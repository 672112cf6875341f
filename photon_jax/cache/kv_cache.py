"""The paged KV cache on the device: a PyTree that every step takes and gives back."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from photon_jax.cache.layout import CacheLayout
from photon_jax.config import KVDType
from photon_jax.models.config import ModelConfig
from photon_jax.quantization.kv import SCALE_DTYPE, dequantize_kv, quantize_kv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """Keys and values of all layers; block 0 is the null block, which padding reads and writes.

    In an int8 cache an element stands for its int8 times the scale of its token and head.

    Attributes:
      k: keys, after rope and norm; one head's block is contiguous.
      v: values.
      k_scale, v_scale: of an int8 cache, else None.
    """

    k: jax.Array  # [L N K S d]
    v: jax.Array  # [L N K S d]
    k_scale: jax.Array | None = None  # f32[L N K S]
    v_scale: jax.Array | None = None  # f32[L N K S]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers."""
        return self.nbytes // (self.k.shape[1] * self.block_size)


def abstract_kv_cache(config: ModelConfig, layout: CacheLayout, kv_dtype: KVDType) -> KVCache:
    """Returns the cache's tree of `jax.ShapeDtypeStruct`: int8 with scales, or "auto", in `config.dtype`."""
    shape = (config.num_layers, layout.num_blocks, config.num_kv_heads, layout.block_size, config.head_dim)
    is_int8 = kv_dtype == "int8"
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(jnp.int8 if is_int8 else config.dtype))
    scale = jax.ShapeDtypeStruct(shape[:-1], SCALE_DTYPE) if is_int8 else None
    return KVCache(k=leaf, v=leaf, k_scale=scale, v_scale=scale)  # type: ignore[arg-type]


def init_kv_cache(config: ModelConfig, layout: CacheLayout, kv_dtype: KVDType = "auto") -> KVCache:
    """Returns an empty cache on the default device."""
    empty: KVCache = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_kv_cache(config, layout, kv_dtype)
    )
    return empty


def bytes_per_block(config: ModelConfig, block_size: int, kv_dtype: KVDType) -> int:
    """Returns the bytes that one block takes in all layers: keys, values and their scales."""
    block = abstract_kv_cache(config, CacheLayout(num_blocks=1, block_size=block_size), kv_dtype)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(block))


def write_kv(
    cache: KVCache,
    layer: jax.Array,  # i32[]
    k: jax.Array,  # [T K d]
    v: jax.Array,  # [T K d]
    slot_mapping: jax.Array,  # i32[T]
) -> KVCache:
    """Returns the cache with token t of this layer stored in slot slot_mapping[t] = block_id * block_size + offset."""
    blocks, offsets = slot_mapping // cache.block_size, slot_mapping % cache.block_size

    def write(array: jax.Array, new: jax.Array) -> jax.Array:
        return array.at[layer, blocks, :, offsets].set(new)

    if cache.k_scale is None or cache.v_scale is None:
        return KVCache(k=write(cache.k, k), v=write(cache.v, v))
    (k, k_scale), (v, v_scale) = quantize_kv(k), quantize_kv(v)
    return KVCache(
        k=write(cache.k, k),
        v=write(cache.v, v),
        k_scale=write(cache.k_scale, k_scale),
        v_scale=write(cache.v_scale, v_scale),
    )


def read_kv(
    cache: KVCache, fetch: Callable[[jax.Array], jax.Array], dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:  # [* d] each
    """Returns the keys and values that `fetch` takes from arrays [L N K S *], those of an int8 cache in `dtype`."""

    def read(values: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return fetch(values)
        return dequantize_kv(fetch(values), fetch(jnp.expand_dims(scale, 4)).squeeze(-1), dtype)

    return read(cache.k, cache.k_scale), read(cache.v, cache.v_scale)
