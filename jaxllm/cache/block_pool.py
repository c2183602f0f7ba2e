"""Reference counts and free lists of the KV cache's blocks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPoolExhausted(RuntimeError):
    """More blocks were asked for than are free; nothing was allocated."""


class BlockPool:
    """The blocks 0 .. num_blocks - 1 of one KV cache, each either free or referenced by one or more block tables.

    A block that nobody references but whose content is worth finding again (`retain`) is free as well: it waits in
    the order in which it was released and is handed out, least recently used first, once no empty block is left.
    Every operation costs O(1) per block, and an operation that raises changes nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        """Starts with every block free.

        Raises ValueError unless `num_blocks` is positive.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a KV cache needs at least 1 block")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, then the block freed last
        self._reusable: OrderedDict[int, None] = OrderedDict()  # free with content, least recently used first
        self._retained = bytearray(num_blocks)  # 1 where `retain` applies, referenced or not
        self._on_evict: Callable[[int], None] | None = None

    def resize(self, num_blocks: int) -> None:
        """Start over with another number of blocks, every one free and empty.

        Raises ValueError, with nothing changed, unless `num_blocks` is positive and no block has content worth keeping.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a KV cache needs at least 1 block")
        if len(self._empty) < self.num_blocks:
            used = self.num_blocks - len(self._empty)
            raise ValueError(f"{used} of {self.num_blocks} blocks are in use or retained; free and evict them first")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._retained = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, those with content worth finding among them."""
        return len(self._empty) + len(self._reusable)

    @property
    def num_referenced(self) -> int:
        """Blocks that at least one block table holds."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """How many block tables hold `block`."""
        return self._ref_counts[block]

    def is_retained(self, block: int) -> bool:
        """Whether the content of `block` may be found again, so that nobody may write to it."""
        return bool(self._retained[block])

    def set_evict_listener(self, listener: Callable[[int], None]) -> None:
        """Has `listener(block)` called whenever a retained block is handed out for new content.

        There is one listener; a second one raises RuntimeError, because the first would miss evictions.
        """
        if self._on_evict is not None:
            raise RuntimeError("this block pool already has an evict listener; give every prefix cache its own pool")
        self._on_evict = listener

    def allocate(self, n: int) -> list[int]:
        """Takes `n` free blocks, each with one reference from now on and free of content worth keeping.

        Raises BlockPoolExhausted, with nothing taken, when fewer than `n` are free.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks; ask for 0 or more")
        if n > self.num_free:
            raise BlockPoolExhausted(
                f"{n} blocks were asked for, {self.num_free} of {self.num_blocks} are free; "
                "free or preempt a sequence first"
            )
        blocks = []
        for _ in range(n):
            block = self._empty.pop() if self._empty else self._evict()
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each of `blocks`, whose content the caller is about to read.

        Raises ValueError at an empty free block: it has no content to share.
        """
        blocks = list(blocks)
        for block in blocks:
            if not self._ref_counts[block] and not self._retained[block]:
                raise ValueError(f"block {block} is free and holds nothing; only blocks with content can be shared")
        for block in blocks:
            if not self._ref_counts[block]:
                del self._reusable[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Takes one reference from each of a sequence's `blocks`, given in the order of its block table.

        They are released tail first, so that of a chain of retained blocks the end is evicted before the beginning:
        a beginning can serve many prompts, and an end without its beginning serves none.

        Raises ValueError, with nothing freed, when a block is not referenced or is named twice.
        """
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"a block is named twice in {list(blocks)}; one sequence holds a block only once")
        for block in blocks:
            if not self._ref_counts[block]:
                raise ValueError(f"block {block} is already free; every reference is given back once")
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if self._retained[block]:
                self._reusable[block] = None
            else:
                self._empty.append(block)

    def retain(self, block: int) -> None:
        """Marks the content of the referenced `block` as worth finding after its last reference is gone.

        Raises ValueError when the block is free: its content may be overwritten at any time.
        """
        if not self._ref_counts[block]:
            raise ValueError(f"block {block} is free; only a referenced block can be retained")
        self._retained[block] = 1

    def _evict(self) -> int:
        block, _ = self._reusable.popitem(last=False)
        self._retained[block] = 0
        if self._on_evict is not None:
            self._on_evict(block)
        return block
