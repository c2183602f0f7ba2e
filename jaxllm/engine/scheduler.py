"""Decides which tokens of which requests the next step computes, and owns their blocks (continuous batching)."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from jaxllm.cache.block_pool import BlockPool
from jaxllm.cache.prefix import ROOT, PrefixCache
from jaxllm.engine.request import Request, RequestStatus
from jaxllm.engine.step import ScheduledRow, SchedulerStats, Step

logger = logging.getLogger(__name__)


class Scheduler:
    """First come, first served, over one block pool.

    Every running request arrived before every waiting one, and both are kept in order of arrival: the queue is
    entered at its end, left at its front, and a preempted request, always the latest one running, goes back to the
    front. The oldest request is therefore in every step and is never preempted, so each request ends after a bounded
    number of steps.

    All but the latest running request have exactly one token to compute: a prompt too long for the budget that is
    left keeps everybody behind it waiting. With no more running rows than budget tokens, each gets at least one.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        enable_prefix_caching: bool,
    ) -> None:
        """Schedules steps of at most `max_num_batched_tokens` tokens in at most `max_num_seqs` rows.

        Prompt and output of a request have at most `max_model_len` tokens together. Blocks hold `block_size` tokens.
        Raises ValueError when a limit is not positive or `max_model_len` leaves no room for prompt and output.
        """
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_num_batched_tokens", max_num_batched_tokens, 1),
            ("max_model_len", max_model_len, 2),
            ("block_size", block_size, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        self.pool = pool
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_model_len = max_model_len
        # The last token of a request is never fed back, so it needs no slot: one token more than the pool's slots.
        self._max_tokens = min(max_model_len, pool.num_blocks * block_size + 1)
        self._pool_limits = self._max_tokens < max_model_len
        self._prefix = PrefixCache(pool, block_size) if enable_prefix_caching else None
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}  # in order of admission, which is the order of arrival
        self._stats = SchedulerStats()

    @property
    def stats(self) -> SchedulerStats:
        """A copy of the counters as they are now."""
        return replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._waiting),
            free_blocks=self.pool.num_free,
        )

    def has_unfinished(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self._running or self._waiting)

    def check(self, request: Request) -> None:
        """Raises ValueError where `add` would, and queues nothing."""
        name, length = f"request {request.request_id!r}", request.num_tokens
        if request.request_id in self._waiting or request.request_id in self._running:
            raise ValueError(f"{name} is still being processed; use another id, or abort the first one")
        if request.status is not RequestStatus.WAITING:
            raise ValueError(f"{name} is {request.status.value}; make a new Request to run the prompt again")
        if length >= self.max_model_len:
            raise ValueError(
                f"{name}: the prompt has {length} tokens, at most {self.max_model_len - 1} leave room for one new "
                f"token within max_model_len {self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        needed, available = self._blocks_for(length), self.pool.num_blocks
        if needed > available:
            raise ValueError(
                f"{name}: the prompt of {length} tokens needs {needed} KV-cache blocks of {self.block_size} tokens, "
                f"the whole cache has {available} ({available * self.block_size} tokens); shorten the prompt, or raise "
                "gpu_memory_utilization or num_kvcache_blocks"
            )

    def add(self, request: Request) -> None:
        """Puts `request` at the end of the queue.

        Raises ValueError, with nothing queued, when its id is in use, it was queued before, or its prompt leaves no
        room for one token within `max_model_len` or does not fit into the whole block pool.
        """
        self.check(request)
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """Ends a waiting or running request with reason "abort"; None when no such request is unfinished."""
        request = self._running.get(request_id) or self._waiting.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends `request` and gives its blocks back; `stop_reason`, if given, is what stopped it.

        Raises ValueError when the scheduler does not hold the request (it has finished, or was never added).
        """
        queue = self._running if request.status is RequestStatus.RUNNING else self._waiting
        if queue.get(request.request_id) is not request:
            raise ValueError(f"request {request.request_id!r} is {request.status.value} and not held by this scheduler")
        del queue[request.request_id]
        self._release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if stop_reason is not None:
            request.stop_reason = stop_reason
        self._stats.finished += 1

    def schedule(self) -> Step | None:
        """The next step, None when nothing is unfinished.

        Changes no computed or known token: a step that failed may be scheduled again. The block tables that the step
        needs are those of its requests now; read them before the next call.
        """
        singles: list[ScheduledRow] = []
        chunks: list[ScheduledRow] = []
        budget = self.max_num_batched_tokens
        size = self.block_size
        preemptions = self._stats.preemptions
        for request in list(self._running.values()):
            if request.status is not RequestStatus.RUNNING:
                break  # preempted for an older row, and so is everything behind it
            start = request.num_computed_tokens
            remaining = len(request.token_ids) - start
            n = remaining if remaining < budget else budget
            if start + n > len(request.block_table) * size and not self._extend(request, start + n):
                break
            budget -= n
            (singles if n == 1 else chunks).append(ScheduledRow(request, start, n, n == remaining))
        if self._stats.preemptions == preemptions:  # who is admitted now would be the next one preempted
            while budget and self._waiting and len(self._running) < self.max_num_seqs:
                request = next(iter(self._waiting.values()))
                if not self._admit(request):
                    break
                start = request.num_computed_tokens
                remaining = request.num_tokens - start
                n = min(remaining, budget)
                budget -= n
                (singles if n == 1 else chunks).append(ScheduledRow(request, start, n, n == remaining))
        if not singles and not chunks:
            return None
        num_tokens = self.max_num_batched_tokens - budget
        self._stats.steps += 1
        self._stats.scheduled_tokens += num_tokens
        return Step(rows=(*singles, *chunks), num_tokens=num_tokens, decode_only=not chunks)

    def complete(self, step: Step, tokens: Sequence[int]) -> list[Request]:
        """Takes the results of `step`; `tokens[i]` was sampled for `step.rows[i]`, and counts if the row samples.

        Rows whose request ended or lost its blocks since are skipped. Returns the requests that got a token, some of
        them finished by it. Raises ValueError, with nothing changed, when the number of tokens is wrong or the step
        was completed before.
        """
        rows = step.rows
        if len(tokens) != len(rows):
            raise ValueError(f"{len(tokens)} tokens for a step of {len(rows)} rows; give one for every row")
        running = RequestStatus.RUNNING
        live = [(row, token) for row, token in zip(rows, tokens, strict=True) if row.request.status is running]
        for row, _ in live:
            if row.start != row.request.num_computed_tokens:
                raise ValueError(
                    f"request {row.request.request_id!r}: the step begins at token {row.start}, "
                    f"{row.request.num_computed_tokens} are computed; complete every step once and in order"
                )
        received = []
        for row, token in live:
            self._commit(row)
            if row.samples:
                self._append(row.request, token)
                received.append(row.request)
        return received

    def forget_kv(self) -> None:
        """The KV array has lost its content: whatever runs is computed again, and no prefix is found any more."""
        while self._running:
            _, request = self._running.popitem()
            self._preempt(request)
        self.pool.free(self.pool.allocate(self.pool.num_blocks))  # evicts every block that could be found

    def _commit(self, row: ScheduledRow) -> None:
        """The KV of the row's tokens has been written: later steps read it, and full blocks can be found."""
        request, start, num_tokens, _ = row
        request.num_computed_tokens = computed = start + num_tokens
        if self._prefix is None:
            return
        size = self.block_size
        while (i := request.num_registered_blocks) < computed // size:
            tokens = request.token_ids[i * size : (i + 1) * size]
            request.content_id = self._prefix.register(request.content_id, tokens, request.block_table[i])
            request.num_registered_blocks = i + 1

    def _append(self, request: Request, token: int) -> None:
        """Adds a sampled token and ends the request if it was the last."""
        request.append(token)
        self._stats.output_tokens += 1
        reason = request.check_stop(self._max_tokens)
        if reason is None:
            return
        if reason == "length" and request.num_output_tokens < request.params.max_tokens and self._pool_limits:
            logger.warning(
                "request %r ends after %d tokens: it fills all %d KV-cache blocks of %d tokens",
                request.request_id, request.num_tokens, self.pool.num_blocks, self.block_size,
            )  # fmt: skip
        self.finish(request, reason)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _extend(self, request: Request, num_tokens: int) -> bool:
        """Gives a running request the blocks for its first `num_tokens` tokens, preempting the latest ones for it.

        False when the request was itself the latest and is preempted. It never is when it runs alone: then all
        blocks are its own or free, and a request that needs more than all has finished.
        """
        needed = self._blocks_for(num_tokens) - len(request.block_table)
        while needed > self.pool.num_free:
            _, victim = self._running.popitem()
            self._preempt(victim)
            if victim is request:
                return False
        request.block_table += self.pool.allocate(needed)
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        self._stats.preemptions += 1

    def _admit(self, request: Request) -> bool:
        """Moves the front of the queue to the running ones if all its known tokens have room, False otherwise.

        The blocks are taken for all known tokens, not only for the first chunk: two half-computed prompts that wait
        for each other's blocks would preempt one another. At least one token is left to compute, because only a
        computed token gives logits.
        """
        if not self.pool.num_free:  # saves the search: the last token always needs a block of its own
            return False
        hits: list[int] = []
        content_id = ROOT
        if self._prefix is not None:
            hits, content_id = self._prefix.match(request.token_ids, (request.num_tokens - 1) // self.block_size)
        needed = self._blocks_for(request.num_tokens) - len(hits)
        unreferenced_hits = sum(not self.pool.ref_count(block) for block in hits)  # free until they are shared
        if needed + unreferenced_hits > self.pool.num_free:
            return False
        self.pool.share(hits)
        request.block_table = hits + self.pool.allocate(needed)
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_registered_blocks = len(hits)
        request.content_id = content_id
        request.status = RequestStatus.RUNNING
        del self._waiting[request.request_id]
        self._running[request.request_id] = request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.admissions += 1
        self._stats.admitted_tokens += request.num_tokens
        self._stats.prefix_hit_tokens += request.num_computed_tokens
        return True

    def _release(self, request: Request) -> None:
        """Gives all blocks back; nothing of the request is computed any more."""
        self.pool.free(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0
        request.num_registered_blocks = 0
        request.content_id = ROOT
