"""What requests share that run on one replica of the model: its blocks, the prefixes found in them, its seats."""

from collections.abc import Hashable
from typing import NamedTuple

from jaxllm.cache.block_pool import BlockPool
from jaxllm.cache.prefix import ROOT, PrefixCache
from jaxllm.engine.request import Request, RequestStatus


class Place(NamedTuple):
    """Where a request could begin on a replica.

    Attributes:
        replica: which.
        hits: blocks that hold the beginning of its known tokens already.
        content_id: the prefix cache's id of the last of them.
        blocks: those that others use, and those to compute, together.
    """

    replica: "Replica"
    hits: list[int]
    content_id: int
    blocks: int

    @property
    def cost(self) -> tuple[int, int]:
        """What speaks against the place: its blocks; then rows.

        A prefix is worth as many blocks as it has: the requests that share one gather on a replica until that has so
        much more to do than another, which then gets the prefix as well.
        """
        return self.blocks, len(self.replica.running)


class Replica:
    """The scheduler's account of one replica. Block ids are its own; seats are numbered over all replicas.

    Attributes:
        pool: its blocks.
        running: requests that hold some of them, by key and in order of arrival.
    """

    def __init__(self, pool: BlockPool, block_size: int, seats: range, enable_prefix_caching: bool) -> None:
        """Nothing runs. Blocks hold `block_size` tokens; one of `seats` belongs to each request that runs."""
        self.pool = pool
        self.running: dict[Hashable, Request] = {}
        self._block_size = block_size
        self._seats = list(reversed(seats))  # free ones, the lowest last
        self._prefix = PrefixCache(pool, block_size) if enable_prefix_caching else None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-num_tokens // self._block_size)

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that a running request lacks for its first `num_tokens` tokens, 0 or less where it has them."""
        return self.blocks_for(num_tokens) - len(request.block_table)

    def find(self, request: Request) -> Place | None:
        """Where a waiting request can begin; None if its known tokens have no room here.

        The blocks are for all known tokens, not only for the first chunk: two half-computed prompts that wait for each
        other's blocks would preempt one another. At least one token is left to compute, because only a computed token
        gives logits.
        """
        if not self._seats or not self.pool.num_free:  # saves the search: the last token always needs its own block
            return None
        hits: list[int] = []
        content_id = ROOT
        if self._prefix is not None:
            most = request.num_tokens - 1
            if request.wants_prompt_logprobs(request.num_prompt_logprobs):
                most = request.num_prompt_logprobs  # from there on the hidden states are needed
            hits, content_id = self._prefix.match(request.token_ids, most // self._block_size)
        needed = self.blocks_for(request.num_tokens) - len(hits)
        unreferenced_hits = sum(not self.pool.ref_count(block) for block in hits)  # free until they are shared
        if needed + unreferenced_hits > self.pool.num_free:
            return None
        others = self.pool.num_referenced - (len(hits) - unreferenced_hits)
        return Place(self, hits, content_id, others + needed)

    def admit(self, request: Request, place: Place) -> None:
        """Let a waiting request run where `find` said."""
        hits = place.hits
        self.pool.share(hits)
        request.block_table = hits + self.pool.allocate(self.blocks_for(request.num_tokens) - len(hits))
        request.num_computed_tokens = request.num_scheduled_tokens = len(hits) * self._block_size
        request.seat = self._seats.pop()
        request.num_registered_blocks = len(hits)
        request.content_id = place.content_id
        request.status = RequestStatus.RUNNING
        latest = next(reversed(self.running.values()), request)
        self.running[request.key] = request
        if latest.arrival > request.arrival:  # one that was preempted elsewhere
            self.running = {r.key: r for r in sorted(self.running.values(), key=lambda r: r.arrival)}

    def commit(self, request: Request, computed: int) -> None:
        """The KV of the first `computed` tokens has been written: full blocks can be found."""
        request.num_computed_tokens = computed
        if self._prefix is None:
            return
        size = self._block_size
        while (i := request.num_registered_blocks) < computed // size:
            tokens = request.token_ids[i * size : (i + 1) * size]
            request.content_id = self._prefix.register(request.content_id, tokens, request.block_table[i])
            request.num_registered_blocks = i + 1

    def release(self, request: Request) -> None:
        """Take back blocks and seat of a request that does not run any more; nothing of it is computed then."""
        self.pool.free(request.block_table)
        request.block_table = []
        assert request.seat is not None
        self._seats.append(request.seat)
        request.seat = None
        request.num_computed_tokens = request.num_scheduled_tokens = request.num_pending_tokens = 0
        request.num_registered_blocks = 0
        request.content_id = ROOT

    def forget_kv(self) -> None:
        """What the blocks hold is lost, and no prefix is found any more; nothing may be running."""
        self.pool.free(self.pool.allocate(self.pool.num_blocks))  # evicts every block that could be found
