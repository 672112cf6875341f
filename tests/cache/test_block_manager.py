"""The block manager hands each block out once, counts its holders, and says when its books are wrong."""

import random

import pytest

from photon_jax.cache.block_manager import BlockManager
from photon_jax.cache.layout import CacheLayout

BLOCK_SIZE = 4


def make_manager(num_blocks: int = 9, *, prefix: bool = True) -> BlockManager:
    layout = CacheLayout(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return BlockManager(layout, enable_prefix_caching=prefix)


def test_every_block_but_the_null_block_is_handed_out_once():
    manager = make_manager(9)
    assert manager.num_free == 8
    assert sorted(manager.allocate(8)) == list(range(1, 9))
    assert not manager.can_allocate(1)
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 can be had"):
        manager.allocate(1)


def test_the_same_calls_give_the_same_blocks():
    def record() -> list[list[int]]:
        manager, rng, held, seen = make_manager(17), random.Random(3), [], []
        for _ in range(200):
            if held and rng.random() < 0.5:
                manager.release(held.pop(rng.randrange(len(held))))
            elif manager.can_allocate(3):
                held.append(manager.allocate(3))
                seen.append(held[-1])
        return seen

    assert record() == record()


def test_a_block_freed_twice_is_noticed():
    manager = make_manager()
    blocks = manager.allocate(2)
    manager.release(blocks)
    with pytest.raises(AssertionError, match=f"block {blocks[1]} freed twice"):
        manager.release(blocks)


def cached_blocks(manager: BlockManager, tokens: list[int]) -> list[int]:
    blocks = manager.allocate(len(tokens) // BLOCK_SIZE)
    manager.register([], tokens, blocks, 0)
    return blocks


def test_full_block_is_shared_and_stays_until_its_last_holder_leaves():
    manager = make_manager()
    tokens = list(range(8))
    blocks = cached_blocks(manager, tokens)
    assert manager.find_cached([], tokens, 2) == blocks
    manager.share(blocks)
    manager.release(blocks)
    assert [manager.ref_count(b) for b in blocks] == [1, 1] and manager.num_idle == 0
    manager.release(blocks)
    assert manager.num_idle == 2 and manager.num_free == 8
    manager.check_integrity([])


def test_sharing_idle_blocks_takes_them_from_what_is_free():
    manager = make_manager()
    tokens = list(range(8))
    blocks = cached_blocks(manager, tokens)
    manager.release(blocks)
    assert manager.count_idle(blocks) == 2
    manager.share(blocks)
    assert manager.count_idle(blocks) == 0 and manager.num_free == 6
    manager.check_integrity([blocks])


def test_only_cached_blocks_can_be_shared():
    manager = make_manager()
    blocks = manager.allocate(1)
    with pytest.raises(AssertionError, match="is not cached, it can't be shared"):
        manager.share(blocks)


def test_free_blocks_go_before_cached_ones_and_the_end_of_a_prefix_before_its_beginning():
    manager = make_manager(6)
    tokens = list(range(12))
    blocks = cached_blocks(manager, tokens)
    manager.release(blocks)
    first = manager.allocate(2)
    assert not set(first) & set(blocks)
    assert manager.find_cached([], tokens, 3) == blocks
    assert manager.allocate(1) == [blocks[2]]
    assert manager.find_cached([], tokens, 3) == blocks[:2]
    assert manager.allocate(2) == [blocks[1], blocks[0]]
    assert manager.find_cached([], tokens, 3) == []


def test_a_block_computed_twice_is_cached_once_and_the_other_one_is_freed():
    manager = make_manager()
    tokens = list(range(4))
    first, second = cached_blocks(manager, tokens), cached_blocks(manager, tokens)
    manager.release(first)
    manager.release(second)
    assert manager.num_idle == 1 and manager.num_free == 8
    assert manager.find_cached([], tokens, 1) == first
    manager.check_integrity([])


def test_without_prefix_caching_nothing_is_found_and_nothing_is_kept():
    manager = make_manager(prefix=False)
    tokens = list(range(8))
    manager.release(cached_blocks(manager, tokens))
    assert manager.find_cached([], tokens, 2) == [] and manager.num_idle == 0
    manager.check_integrity([])


def double(manager: BlockManager) -> None:
    manager._free.append(manager.allocate(1)[0])


def lose(manager: BlockManager) -> None:
    manager._free.pop()


def hand_out_null(manager: BlockManager) -> None:
    manager._free.append(0)


def miscount(manager: BlockManager) -> None:
    manager._ref_count[manager._free[-1]] = -1


def free_cached(manager: BlockManager) -> None:
    (block_id,) = cached_blocks(manager, [1, 2, 3, 4])
    manager._ref_count[block_id] = 0
    manager._free.append(block_id)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (double, "are in two places"),
        (lose, "are neither free nor idle nor held"),
        (hand_out_null, "the null block was handed out"),
        (miscount, "have negative reference counts"),
        (free_cached, "are cached, yet on the free list"),
    ],
)
def test_integrity_check_notices(fault, message):
    manager = make_manager()
    manager.check_integrity([])
    fault(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check_integrity()


def test_integrity_check_compares_counts_with_holders():
    manager = make_manager()
    blocks = manager.allocate(1)
    manager.check_integrity([blocks])
    with pytest.raises(AssertionError, match=r"reference counts differ from holders.*\(1, 2\)"):
        manager.check_integrity([blocks, blocks])
    with pytest.raises(AssertionError, match=r"reference counts differ from holders.*\(1, 0\)"):
        manager.check_integrity([])
