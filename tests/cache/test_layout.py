"""The cache layout counts the null block, and is planned from memory or from the configuration."""

import pytest

from photon_jax.cache.layout import CacheLayout, plan_cache
from photon_jax.config import CacheConfig
from photon_jax.errors import ConfigError


def test_null_block_is_not_usable():
    layout = CacheLayout(num_blocks=5, block_size=4)
    assert layout.num_usable_blocks == 4 and layout.max_tokens == 16
    assert [layout.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def plan(free_bytes: int, max_useful_tokens: int = 10_000, **fields: object) -> CacheLayout:
    config = CacheConfig(block_size=16, **fields)
    return plan_cache(config, bytes_per_block=100, free_bytes=free_bytes, max_useful_tokens=max_useful_tokens)


def test_blocks_fill_the_fraction_of_memory():
    assert plan(1000, memory_fraction=0.5).num_blocks == 5


def test_blocks_that_the_limits_cannot_use_are_not_made():
    assert plan(10**9, max_useful_tokens=33).num_usable_blocks == 3


def test_blocks_given_win_over_memory():
    assert plan(700, num_blocks=7, memory_fraction=0.1).num_blocks == 7


def test_memory_for_the_null_block_alone_is_refused():
    with pytest.raises(ConfigError, match=r"no room for a KV cache: 150 bytes are free.*two blocks need 200"):
        plan(150, memory_fraction=1.0)
