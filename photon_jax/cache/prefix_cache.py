"""Prefix cache: which full blocks hold the keys and values of which token prefixes, and their eviction. Host only."""

import collections
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

_DIGEST_BYTES = 32


class PrefixCache:
    """Maps the chain digest of a full block to the block that holds it.

    A digest covers the namespace, the digest of the block before it, and the block's own token ids: so it names the
    whole prefix, and two namespaces (two versions of the weights, say) never share a block. The first block that is
    registered under a digest keeps it.

    Cached blocks that nobody holds wait here, in the order in which they were retired, until they are wanted again or
    evicted. A sequence retires its blocks from the last to the first, so a prefix outlives its continuations.
    """

    def __init__(self, *, block_size: int, namespace: bytes = b"") -> None:
        self._block_size = block_size
        self._block_ids: dict[bytes, int] = {}  # digest -> block
        self._digests: dict[int, bytes] = {}  # block -> digest
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # held by nobody, next victim first
        self._root = _digest(namespace)

    def __len__(self) -> int:
        return len(self._block_ids)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digests

    @property
    def num_idle(self) -> int:
        """Cached blocks that nobody holds."""
        return len(self._idle)

    @property
    def idle_block_ids(self) -> tuple[int, ...]:
        """The cached blocks that nobody holds, next victim first."""
        return tuple(self._idle)

    def set_namespace(self, namespace: bytes) -> None:
        """Starts every chain anew: what is cached under another namespace is not found, and gets evicted in time."""
        self._root = _digest(namespace)

    def extend_chain(self, chain: list[bytes], token_ids: Sequence[int], num_blocks: int) -> None:
        """Appends the digests that `chain` lacks, so that it covers the first `num_blocks` blocks of `token_ids`."""
        for start in range(len(chain) * self._block_size, num_blocks * self._block_size, self._block_size):
            ids = np.asarray(token_ids[start : start + self._block_size], np.int64)
            assert len(ids) == self._block_size, (
                f"only full blocks are cached, got {len(ids)} of {self._block_size} tokens"
            )
            chain.append(_digest((chain[-1] if chain else self._root) + ids.tobytes()))

    def find(self, chain: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix of `chain`."""
        return list(self._find(chain))

    def _find(self, chain: Sequence[bytes]) -> Iterator[int]:
        for digest in chain:
            block_id = self._block_ids.get(digest)
            if block_id is None:
                return
            yield block_id

    def register(self, block_id: int, digest: bytes) -> bool:
        """Caches a held block under `digest`; returns whether it did, which it does not if another block has it."""
        assert block_id not in self._digests, f"block {block_id} is cached already"
        if digest in self._block_ids:
            return False
        self._block_ids[digest] = block_id
        self._digests[block_id] = digest
        return True

    def is_idle(self, block_id: int) -> bool:
        """Returns whether the block is cached and held by nobody."""
        return block_id in self._idle

    def retire(self, block_id: int) -> None:
        """Notes that nobody holds this cached block any more."""
        assert block_id in self._digests and block_id not in self._idle, f"block {block_id} can't be retired"
        self._idle[block_id] = None

    def revive(self, block_id: int) -> None:
        """Notes that somebody holds this idle block again."""
        del self._idle[block_id]

    def evict(self) -> int:
        """Forgets the block that was retired longest ago, and returns it."""
        block_id, _ = self._idle.popitem(last=False)
        del self._block_ids[self._digests.pop(block_id)]
        return block_id

    def check_integrity(self) -> None:
        """Raises if the two maps disagree, or an idle block is not cached."""
        inverse = {block_id: digest for digest, block_id in self._block_ids.items()}
        assert inverse == self._digests, (
            f"{len(self._block_ids)} digests, {len(self._digests)} cached blocks, not inverse"
        )
        strangers = sorted(self._idle.keys() - self._digests.keys())
        assert not strangers, f"idle blocks {strangers} are not cached"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
