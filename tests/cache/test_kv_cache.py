"""The KV cache: what a block takes, and how many more tokens fit as int8."""

import jax
import pytest
from helpers.tiny_model import tiny_config

from photon_jax.cache.kv_cache import bytes_per_block, init_kv_cache
from photon_jax.cache.layout import CacheLayout, plan_cache
from photon_jax.config import CacheConfig


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_block_takes_what_its_arrays_have(kv_dtype):
    config = tiny_config(dtype="bfloat16")
    cache = init_kv_cache(config, CacheLayout(num_blocks=7, block_size=16), kv_dtype)
    assert cache.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert cache.nbytes == 7 * bytes_per_block(config, 16, kv_dtype)
    assert cache.bytes_per_token == bytes_per_block(config, 1, kv_dtype)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "more"), [("bfloat16", 64, 1.88), ("bfloat16", 128, 1.93), ("float32", 64, 3.76)]
)
def test_nearly_twice_as_many_tokens_fit_as_int8(dtype, head_dim, more):
    config = tiny_config(dtype=dtype, head_dim=head_dim)

    def tokens(kv_dtype):
        cache = CacheConfig(kv_dtype=kv_dtype)
        size = bytes_per_block(config, cache.block_size, kv_dtype)
        return plan_cache(cache, bytes_per_block=size, free_bytes=1 << 30, max_useful_tokens=1 << 30).max_tokens

    assert more < tokens("int8") / tokens("auto") < (4 if dtype == "float32" else 2)
