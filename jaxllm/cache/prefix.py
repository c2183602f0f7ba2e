"""Finds blocks whose KV a new sequence would only compute again (automatic prefix caching)."""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from jaxllm.cache.block_pool import BlockPool

ROOT = 0
"""Content id of the empty prefix, the parent of every first block."""


class PrefixKey(NamedTuple):
    """What a full block holds: the content it continues, and its own tokens.

    The key keeps the tokens themselves. Its hash only finds candidates; a block is shared after parent and tokens
    have been compared, so two prompts whose hashes collide can never read each other's KV.
    """

    parent: int
    tokens: tuple[int, ...]


class PrefixCache:
    """Maps the content of full blocks to the block that holds it.

    KV of a token depends on every token before it, hence content is a chain: a block's own tokens and the content id
    of the block before. Ids are never used twice, so what continued an evicted content can no longer be reached, not
    even when the same tokens come back under a new id.

    Two sequences that compute equal content side by side keep a block each. The first stays the one that is found;
    the second continues on the first one's content id, so that its later blocks can still be found.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Caches blocks of `block_size` tokens that belong to `pool`, whose only evict listener it becomes."""
        self.block_size = block_size
        self._pool = pool
        self._entries: dict[PrefixKey, tuple[int, int]] = {}  # -> (block, content id)
        self._keys: dict[int, PrefixKey] = {}  # block -> its key, to forget it by
        self._new_ids = count(ROOT + 1)
        pool.set_evict_listener(self._forget)

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._entries)

    def match(self, token_ids: Sequence[int], max_blocks: int) -> tuple[list[int], int]:
        """The longest chain of at most `max_blocks` cached blocks that holds the beginning of `token_ids`.

        Returns the blocks, and the content id of the last one (ROOT when there is none). Takes no reference:
        call `BlockPool.share` before anything else is allocated.
        """
        blocks: list[int] = []
        content_id = ROOT
        size = self.block_size
        for begin in range(0, min(max_blocks, len(token_ids) // size) * size, size):
            entry = self._entries.get(PrefixKey(content_id, tuple(token_ids[begin : begin + size])))
            if entry is None:
                break
            block, content_id = entry
            blocks.append(block)
        return blocks, content_id

    def register(self, parent: int, tokens: Sequence[int], block: int) -> int:
        """Makes the full, computed, referenced `block` findable and returns the id of its content.

        `parent` is the content id of the block before it in its sequence, ROOT for the first. Where the content is
        cached already, the block that holds it stays and its id is returned.

        Raises ValueError when `tokens` are not exactly one block or `block` is registered with other content.
        """
        key = PrefixKey(parent, tuple(tokens))
        if len(key.tokens) != self.block_size:
            raise ValueError(f"block {block} has {len(key.tokens)} tokens; only full blocks of {self.block_size} count")
        known = self._entries.get(key)
        if known is not None:
            return known[1]
        if block in self._keys:
            raise ValueError(f"block {block} is registered with other content; a registered block is never rewritten")
        self._pool.retain(block)
        content_id = next(self._new_ids)
        self._entries[key] = (block, content_id)
        self._keys[block] = key
        return content_id

    def _forget(self, block: int) -> None:
        del self._entries[self._keys.pop(block)]
