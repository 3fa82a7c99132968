"""Book-keeping of the HBM block pool: who holds which block, and which blocks can be reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPoolError(Exception):
    """Root of this module's errors.

    OutOfBlocks   wait, preempt a sequence, or refuse: nothing was taken
    BlockNotHeld  a bug of the caller: a block was given back or registered without a holder
    """


class OutOfBlocks(BlockPoolError):
    """More blocks were asked for than are free or evictable; none was taken."""

    def __init__(self, num_wanted: int, num_available: int) -> None:
        super().__init__(num_wanted, num_available)
        self.num_wanted = num_wanted
        self.num_available = num_available

    def __str__(self) -> str:
        return f"{self.num_wanted} blocks wanted, {self.num_available} available"


class BlockNotHeld(BlockPoolError):
    """A block with no holder was released or registered."""

    def __init__(self, block_id: int) -> None:
        super().__init__(block_id)
        self.block_id = block_id

    def __str__(self) -> str:
        return f"block {self.block_id} is held by nobody"


class BlockPool:
    """`num_total` blocks, each free, used (held at least once) or cached (held by nobody, keyed).

    free + used + cached == total at all times. Cached blocks are found by `match` until `allocate`
    evicts them, least recently released first; `release` gives a table back from its tail, so that
    a leaf is always older than the blocks it continues. Pure book-keeping: no bytes, no threads.
    """

    def __init__(self, num_total: int) -> None:
        self._num_total = num_total
        self._free = list(range(num_total - 1, -1, -1))
        self._num_holders = [0] * num_total
        self._keys: list[bytes | None] = [None] * num_total
        self._block_ids: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_total(self) -> int:
        """Blocks of the pool."""
        return self._num_total

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but `match` still finds."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder."""
        return self._num_total - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """What `allocate` can give: free and cached blocks."""
        return len(self._free) + len(self._cached)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Block ids of the longest head run of `keys` in this pool; holds nothing."""
        block_ids: list[int] = []
        for key in keys:
            block_id = self._block_ids.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block; a cached one becomes used."""
        for block_id in block_ids:
            if self._num_holders[block_id] == 0:
                if block_id not in self._cached:
                    raise BlockNotHeld(block_id)
                del self._cached[block_id]
            self._num_holders[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks with one holder each and no key, evicting the oldest cached ones at need.

        Raises:
            OutOfBlocks: fewer are available; nothing was taken.
        """
        if num_blocks > self.num_available:
            raise OutOfBlocks(num_blocks, self.num_available)
        block_ids: list[int] = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._evict_oldest()
            self._num_holders[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one holder of each block, from the tail of the table to its head.

        Raises:
            BlockNotHeld: a block had no holder.
        """
        for block_id in reversed(block_ids):
            if self._num_holders[block_id] == 0:
                raise BlockNotHeld(block_id)
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                if self._keys[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def register(self, block_id: int, key: bytes) -> bool:
        """Let `match` find this full, computed block; False if the key or the block is taken.

        Raises:
            BlockNotHeld: the block has no holder, so its bytes are nobody's promise.
        """
        if self._num_holders[block_id] == 0:
            raise BlockNotHeld(block_id)
        if key in self._block_ids or self._keys[block_id] is not None:
            return False
        self._keys[block_id] = key
        self._block_ids[key] = block_id
        return True

    def forget_cached(self) -> None:
        """Forget all keys: cached blocks become free, used ones become free when released."""
        self._block_ids.clear()
        self._keys = [None] * self._num_total
        self._free.extend(self._cached)
        self._cached.clear()

    def _evict_oldest(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        key = self._keys[block_id]
        if key is not None:
            del self._block_ids[key]
            self._keys[block_id] = None
        return block_id
