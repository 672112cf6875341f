"""Reading keys and values of a paged cache inside Triton kernels."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def load_tile(ref, tables_ref, layer, row, head, position, tile_tokens):  # [tile_tokens d], of scales [tile_tokens]
    """Returns the tile of a row's context that begins at a position, which is a multiple of the tile's tokens.

    Args:
      ref: keys or values [L N K S d], or scales [L N K S].
      tables_ref: i32[B P]; past its width its last block is read.
    """
    block_size = jnp.int32(ref.shape[3])
    if ref.shape[3] % tile_tokens == 0:
        block = lax.div(position, block_size)
        return ref[layer, tables_ref[row, block], head, pl.ds(position - block * block_size, tile_tokens)]
    tokens = position + lax.iota(jnp.int32, tile_tokens)
    blocks = plt.load(tables_ref.at[row, jnp.minimum(tokens // ref.shape[3], tables_ref.shape[1] - 1)])
    if ref.ndim == 4:
        return plt.load(ref.at[layer, blocks, head, tokens % ref.shape[3]])
    dims = lax.iota(jnp.int32, ref.shape[4])
    return plt.load(ref.at[layer, blocks[:, None], head, (tokens % ref.shape[3])[:, None], dims[None, :]])


def load_dequantized(ref, scale_ref, dtype: jnp.dtype, *at) -> jax.Array:  # [tile_tokens d]
    """Returns a tile in `dtype`; of an int8 cache each token's values times its scale."""
    tile = load_tile(ref, *at)
    if scale_ref is None:
        return tile
    factors = load_tile(scale_ref, *at).astype(jnp.float32)
    return (tile.astype(jnp.float32) * factors[:, None]).astype(dtype)
