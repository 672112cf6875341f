"""Block manager: which cache blocks are free, and how many sequences hold each of the others. Host only."""

import collections
from collections.abc import Iterable, Sequence

from photon_jax.cache.layout import NULL_BLOCK_ID, CacheLayout
from photon_jax.cache.prefix_cache import PrefixCache


class BlockManager:
    """Hands out the blocks of the pool and takes them back.

    A block is in one of three places: on the free list, held by one or more sequences, or idle in the prefix cache
    (cached, held by nobody, evicted when the free list runs out). The null block is in none of them. The same calls
    give the same blocks.
    """

    def __init__(self, layout: CacheLayout, *, enable_prefix_caching: bool, namespace: bytes = b"") -> None:
        self._layout = layout
        self._prefix_caching = enable_prefix_caching
        self._prefix_cache = PrefixCache(block_size=layout.block_size, namespace=namespace)
        self._free = list(range(layout.num_blocks - 1, NULL_BLOCK_ID, -1))  # the next one is at the end
        self._ref_count = [0] * layout.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free ones, and idle ones of the prefix cache."""
        return len(self._free) + self._prefix_cache.num_idle

    @property
    def num_idle(self) -> int:
        """Blocks of the prefix cache that nobody holds."""
        return self._prefix_cache.num_idle

    def ref_count(self, block_id: int) -> int:
        """Returns how many sequences hold the block."""
        return self._ref_count[block_id]

    def can_allocate(self, num_blocks: int) -> bool:
        """Returns whether that many blocks are free or can be evicted."""
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks, free ones first, and then the idle ones of the prefix cache; ask `can_allocate` before."""
        assert self.can_allocate(num_blocks), f"{num_blocks} blocks wanted, {self.num_free} can be had"
        taken = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._prefix_cache.evict()
            self._ref_count[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Adds a holder to each of these cached blocks."""
        for block_id in block_ids:
            assert block_id in self._prefix_cache, f"block {block_id} is not cached, it can't be shared"
            if self._ref_count[block_id] == 0:
                self._prefix_cache.revive(block_id)
            self._ref_count[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes a holder from each block; those without one become idle if they are cached, else free.

        The last block goes first: it is the first to be evicted, so what several prompts begin with stays longest.
        """
        for block_id in reversed(block_ids):
            assert self._ref_count[block_id] > 0, f"block {block_id} freed twice"
            self._ref_count[block_id] -= 1
            if self._ref_count[block_id]:
                continue
            if block_id in self._prefix_cache:
                self._prefix_cache.retire(block_id)
            else:
                self._free.append(block_id)

    def set_namespace(self, namespace: bytes) -> None:
        """Makes the prefix cache forget what was computed so far; chains made before must not be used again."""
        self._prefix_cache.set_namespace(namespace)

    def find_cached(self, chain: list[bytes], token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Returns the cached blocks of the longest prefix of `token_ids`, at most `num_blocks`; takes none of them.

        Args:
          chain: digests of the sequence's first blocks, as far as known; the missing ones are appended.
          token_ids: of the sequence.
          num_blocks: full blocks to look up.
        """
        if not self._prefix_caching:
            return []
        self._prefix_cache.extend_chain(chain, token_ids, num_blocks)
        return self._prefix_cache.find(chain[:num_blocks])

    def count_idle(self, block_ids: Sequence[int]) -> int:
        """Returns how many of these blocks are idle: sharing them takes as many from `num_free`."""
        return sum(self._prefix_cache.is_idle(block_id) for block_id in block_ids)

    def register(self, chain: list[bytes], token_ids: Sequence[int], block_ids: Sequence[int], start: int) -> None:
        """Offers computed full blocks to the prefix cache, which keeps the first block of each prefix.

        Args:
          chain: digests of the sequence's first blocks, as far as known; the missing ones are appended.
          token_ids: of the sequence.
          block_ids: the sequence's blocks from the first to the last full one.
          start: blocks before this one have been offered before.
        """
        if not self._prefix_caching:
            return
        self._prefix_cache.extend_chain(chain, token_ids, len(block_ids))
        for idx in range(start, len(block_ids)):
            self._prefix_cache.register(block_ids[idx], chain[idx])

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raises if a block is in two places or in none, or has a wrong number of holders.

        Args:
          holders: the blocks of each sequence; None leaves the reference counts unchecked against them.
        """
        self._prefix_cache.check_integrity()
        free, idle = self._free, self._prefix_cache.idle_block_ids
        held = [block_id for block_id, count in enumerate(self._ref_count) if count > 0]
        places = collections.Counter([*free, *idle, *held])
        doubled = sorted(block_id for block_id, count in places.items() if count > 1)
        assert not doubled, f"blocks {doubled} are in two places; {len(free)} free, {len(idle)} idle, {len(held)} held"
        lost = sorted(set(range(1, self._layout.num_blocks)) - places.keys())
        assert not lost, f"blocks {lost} are neither free nor idle nor held"
        assert NULL_BLOCK_ID not in places, "the null block was handed out"
        assert len(places) == self._layout.num_usable_blocks, (
            f"{len(places)} of {self._layout.num_usable_blocks} blocks"
        )
        cached_free = [block_id for block_id in free if block_id in self._prefix_cache]
        assert not cached_free, f"blocks {cached_free} are cached, yet on the free list"
        negative = [block_id for block_id, count in enumerate(self._ref_count) if count < 0]
        assert not negative, f"blocks {negative} have negative reference counts"
        if holders is None:
            return
        wanted = collections.Counter(block_id for block_ids in holders for block_id in block_ids)
        counts = {block_id: self._ref_count[block_id] for block_id in held}
        wrong = {
            b: (counts.get(b, 0), wanted[b]) for b in counts.keys() | wanted.keys() if counts.get(b, 0) != wanted[b]
        }
        assert not wrong, f"reference counts differ from holders, block -> (count, holders): {wrong}"
