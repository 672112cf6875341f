"""The prefix cache names a block by its whole prefix, and forgets continuations before what they continue."""

import pytest

from photon_jax.cache.prefix_cache import PrefixCache

BLOCK_SIZE = 4


def make_chain(cache: PrefixCache, token_ids: list[int]) -> list[bytes]:
    chain: list[bytes] = []
    cache.extend_chain(chain, token_ids, len(token_ids) // BLOCK_SIZE)
    return chain


def make_cached(token_ids: list[int], block_ids: list[int]) -> tuple[PrefixCache, list[bytes]]:
    cache = PrefixCache(block_size=BLOCK_SIZE)
    chain = make_chain(cache, token_ids)
    for block_id, digest in zip(block_ids, chain, strict=True):
        assert cache.register(block_id, digest)
    return cache, chain


def test_longest_cached_prefix_is_found():
    cache, chain = make_cached(list(range(12)), [5, 3, 9])
    assert cache.find(chain) == [5, 3, 9]
    assert cache.find(chain[:2]) == [5, 3]
    assert cache.find(make_chain(cache, [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11])) == [5]


def test_equal_tokens_after_another_prefix_are_another_block():
    cache, _ = make_cached([1, 2, 3, 4, 7, 7, 7, 7], [5, 3])
    assert cache.find(make_chain(cache, [7, 7, 7, 7])) == []
    assert cache.find(make_chain(cache, [9, 9, 9, 9, 7, 7, 7, 7])) == []


def test_a_chain_grown_in_parts_equals_one_grown_at_once():
    cache = PrefixCache(block_size=BLOCK_SIZE)
    tokens = list(range(16))
    parts: list[bytes] = []
    for num_blocks in (1, 1, 3, 4):
        cache.extend_chain(parts, tokens, num_blocks)
    assert parts == make_chain(cache, tokens)


def test_a_block_that_is_not_full_has_no_digest():
    with pytest.raises(AssertionError, match="only full blocks are cached, got 3 of 4"):
        PrefixCache(block_size=BLOCK_SIZE).extend_chain([], [1, 2, 3], 1)


def test_namespaces_share_nothing():
    cache, chain = make_cached([1, 2, 3, 4], [5])
    cache.set_namespace(b"weights 2")
    assert cache.find(make_chain(cache, [1, 2, 3, 4])) == []
    other = PrefixCache(block_size=BLOCK_SIZE, namespace=b"weights 2")
    assert make_chain(other, [1, 2, 3, 4]) == make_chain(cache, [1, 2, 3, 4]) != chain


def test_the_first_block_registered_under_a_digest_keeps_it():
    cache, chain = make_cached([1, 2, 3, 4], [5])
    assert not cache.register(6, chain[0])
    assert cache.find(chain) == [5] and 6 not in cache
    with pytest.raises(AssertionError, match="block 5 is cached already"):
        cache.register(5, b"another")


def test_the_block_retired_longest_ago_is_evicted_and_revived_ones_are_not():
    cache, chain = make_cached(list(range(12)), [5, 3, 9])
    for block_id in (9, 3, 5):
        cache.retire(block_id)
    cache.revive(9)
    assert cache.idle_block_ids == (3, 5)
    assert cache.evict() == 3
    assert cache.find(chain) == [5] and len(cache) == 2
    cache.check_integrity()


def test_integrity_check_notices_an_idle_block_that_is_not_cached():
    cache, _ = make_cached([1, 2, 3, 4], [5])
    cache._idle[6] = None
    with pytest.raises(AssertionError, match=r"idle blocks \[6\] are not cached"):
        cache.check_integrity()


def test_integrity_check_notices_a_lost_digest():
    cache, _ = make_cached([1, 2, 3, 4], [5])
    cache._block_ids.clear()
    with pytest.raises(AssertionError, match="0 digests, 1 cached blocks"):
        cache.check_integrity()
