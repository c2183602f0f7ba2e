"""Decides which tokens of which requests the next step computes, and owns their blocks (continuous batching)."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
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

    A step that is under way may still write to blocks that were given back meanwhile. Later steps run after it on the
    device, and whoever takes the blocks writes before he reads.
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
        iterations: Callable[[int], int] = lambda rows: 1,
    ) -> None:
        """Schedules steps of at most `max_num_batched_tokens` tokens in at most `max_num_seqs` rows.

        Prompt and output of a request have at most `max_model_len` tokens together. Blocks hold `block_size` tokens.
        `iterations` says how many decode steps of so many rows may run as one, on the device.
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
        self._seats = list(range(self.max_num_seqs - 1, -1, -1))  # free ones, the lowest last
        self._iterations = iterations
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
        request.max_tokens = min(self._max_tokens, request.num_prompt_tokens + request.params.max_tokens)
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
        """The next step; None when nothing is unfinished, or all that is waits for results of earlier steps.

        Steps may be scheduled before the results of earlier ones are known: what they compute and sample is counted
        as scheduled and pending. Complete them in the same order. The block tables that the step needs are those of
        its requests now; read them before the next call.
        """
        # A request whose last token is on its way has nothing to compute: that token is never fed back. One that
        # follows a grammar has to wait for each token: it says which may come next.
        ready = [
            request
            for request in self._running.values()
            if not request.num_pending_tokens
            or (len(request.token_ids) + request.num_pending_tokens < request.max_tokens and request.matcher is None)
        ]
        step = self._loop(ready) or self._mixed(ready)
        if step is not None:
            self._stats.steps += 1
            self._stats.scheduled_tokens += sum(row.num_tokens for row in step.rows)
        return step

    def _loop(self, ready: list[Request]) -> Step | None:
        """Several decode steps at once, where nobody waits for the end of one and there are blocks for all of them."""
        iterations = self._iterations(len(ready)) if ready else 1
        if iterations == 1 or self._can_admit() or any(request.matcher is not None for request in ready):
            return None
        size, needed, counts = self.block_size, 0, []
        for request in ready:
            total = len(request.token_ids) + request.num_pending_tokens
            if total - request.num_scheduled_tokens != 1:
                return None
            count = min(iterations, request.max_tokens - total)
            if count < iterations and self._waiting:
                return None  # its end makes room
            missing = -(-(total - 1 + count) // size) - len(request.block_table)
            needed += missing if missing > 0 else 0
            counts.append(count)
        if needed > self.pool.num_free:
            return None
        rows = []
        for request, count in zip(ready, counts, strict=True):
            start = request.num_scheduled_tokens
            if start + count > len(request.block_table) * size:
                self._extend(request, start + count)
            request.num_scheduled_tokens = start + count
            request.num_pending_tokens += count
            rows.append(ScheduledRow(request, start, count, count, request.num_preemptions))
        return Step(tuple(rows), len(rows), decode_only=True, iterations=iterations)

    def _mixed(self, ready: list[Request]) -> Step | None:
        """One step of chunks and single tokens, of those that run and of those that can be admitted."""
        singles: list[ScheduledRow] = []
        chunks: list[ScheduledRow] = []
        budget = self.max_num_batched_tokens
        size = self.block_size
        preemptions = self._stats.preemptions

        def add(request: Request) -> int:
            start = request.num_scheduled_tokens
            remaining = len(request.token_ids) + request.num_pending_tokens - start
            n = min(remaining, budget)
            samples = int(n == remaining)
            request.num_scheduled_tokens = start + n
            request.num_pending_tokens += samples
            row = ScheduledRow(request, start, n, samples, request.num_preemptions)
            (singles if n == 1 else chunks).append(row)
            return n

        for request in ready:
            if request.status is not RequestStatus.RUNNING:
                break  # preempted for an older row, and so is everything behind it
            if not budget:
                break  # after steps that failed: older prompts are computed again first
            start = request.num_scheduled_tokens
            end = start + min(len(request.token_ids) + request.num_pending_tokens - start, budget)
            if end > len(request.block_table) * size and not self._extend(request, end):
                break
            budget -= add(request)
        if self._stats.preemptions == preemptions:  # who is admitted now would be the next one preempted
            while budget and self._waiting and self._seats:
                request = next(iter(self._waiting.values()))
                if not self._admit(request):
                    break
                budget -= add(request)
        if not singles and not chunks:
            return None
        return Step((*singles, *chunks), self.max_num_batched_tokens - budget, decode_only=not chunks)

    def complete(self, step: Step, tokens: Sequence[Sequence[int]]) -> list[tuple[Request, int]]:
        """Takes the results of `step`; `tokens[i]` are those that `step.rows[i]` sampled, in order.

        Rows whose request ended or lost its blocks since are skipped, and so are tokens after the one that ends a
        request. `sampler.NOTHING` is no token: it ends the request with reason "error". Returns the requests that
        sampled and how many tokens they got, some of them finished by the last. Raises ValueError, with nothing
        changed, when the number of tokens is wrong or the step was completed before.
        """
        rows = step.rows
        if len(tokens) != len(rows):
            raise ValueError(f"tokens for {len(tokens)} rows, but the step has {len(rows)}; give some for every row")
        running = RequestStatus.RUNNING
        live = [
            (row, sampled)
            for row, sampled in zip(rows, tokens, strict=True)
            if row.request.status is running and row.request.num_preemptions == row.epoch
        ]
        for row, sampled in live:
            if row.start != row.request.num_computed_tokens:
                raise ValueError(
                    f"request {row.request.request_id!r}: the step begins at token {row.start}, "
                    f"{row.request.num_computed_tokens} are computed; complete every step once and in order"
                )
            if len(sampled) < row.num_samples:
                raise ValueError(
                    f"request {row.request.request_id!r}: {len(sampled)} tokens, but the row samples {row.num_samples}"
                )
        received = []
        for row, sampled in live:
            request, computed = row.request, row.start + row.num_tokens - row.num_samples
            if not row.num_samples:
                self._commit(request, computed)
                continue
            before = len(request.token_ids)
            for token in sampled[: row.num_samples]:
                if token < 0:
                    self.finish(request, "error")
                    break
                computed += 1
                self._commit(request, computed)
                request.num_pending_tokens -= 1
                if self._append(request, token):
                    break
            received.append((request, len(request.token_ids) - before))
        return received

    @staticmethod
    def is_live(row: ScheduledRow) -> bool:
        """Whether the results of a scheduled row still count: its request runs, and has kept its blocks since."""
        return row.request.status is RequestStatus.RUNNING and row.request.num_preemptions == row.epoch

    def cut(self, request: Request, num_tokens: int, stop_reason: str) -> None:
        """Ends `request` by a stop string after its first `num_tokens` tokens, and drops those behind them.

        It may have ended already by a token that came in the same step.
        """
        self._stats.output_tokens -= len(request.token_ids) - num_tokens
        del request.token_ids[num_tokens:]
        if request.is_finished:
            request.finish_reason, request.stop_reason = "stop", stop_reason
        else:
            self.finish(request, "stop", stop_reason)

    def forget_steps(self) -> None:
        """The steps under way have failed and will not be completed: what they computed is scheduled again."""
        for request in self._running.values():
            request.num_scheduled_tokens = request.num_computed_tokens
            request.num_pending_tokens = 0

    def forget_kv(self) -> None:
        """The KV array has lost its content: whatever runs is computed again, and no prefix is found any more."""
        while self._running:
            _, request = self._running.popitem()
            self._preempt(request)
        self.pool.free(self.pool.allocate(self.pool.num_blocks))  # evicts every block that could be found

    def resize(self, num_blocks: int) -> list[Request]:
        """Go on with another number of KV blocks, after `forget_kv`; the waiting requests that no longer fit into all.

        End those: nobody can admit them, and nobody behind them would be admitted. The others finish, some sooner than
        they asked for where the pool is the limit.
        """
        self.pool.resize(num_blocks)
        self._max_tokens = min(self.max_model_len, num_blocks * self.block_size + 1)
        self._pool_limits = self._max_tokens < self.max_model_len
        for request in self._waiting.values():
            request.max_tokens = min(self._max_tokens, request.num_prompt_tokens + request.params.max_tokens)
        return [request for request in self._waiting.values() if self._blocks_for(request.num_tokens) > num_blocks]

    def _commit(self, request: Request, computed: int) -> None:
        """The KV of the first `computed` tokens has been written: full blocks can be found."""
        request.num_computed_tokens = computed
        if self._prefix is None:
            return
        size = self.block_size
        while (i := request.num_registered_blocks) < computed // size:
            tokens = request.token_ids[i * size : (i + 1) * size]
            request.content_id = self._prefix.register(request.content_id, tokens, request.block_table[i])
            request.num_registered_blocks = i + 1

    def _append(self, request: Request, token: int) -> bool:
        """Adds a sampled token; True, with the request ended, if it was the last."""
        request.token_ids.append(token)
        self._stats.output_tokens += 1
        reason = request.check_stop()
        if reason is None:
            return False
        if reason == "length" and request.num_output_tokens < request.params.max_tokens and self._pool_limits:
            logger.warning(
                "request %r ends after %d tokens: it fills all %d KV-cache blocks of %d tokens",
                request.request_id, request.num_tokens, self.pool.num_blocks, self.block_size,
            )  # fmt: skip
        self.finish(request, reason)
        return True

    def _can_admit(self) -> bool:
        """Whether the front of the queue could be admitted even without prefix hits."""
        if not self._waiting or not self._seats:
            return False
        return self._blocks_for(next(iter(self._waiting.values())).num_tokens) <= self.pool.num_free

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
            most = request.num_tokens - 1
            if request.wants_prompt_logprobs(request.num_prompt_logprobs):
                most = request.num_prompt_logprobs  # from there on the hidden states are needed
            hits, content_id = self._prefix.match(request.token_ids, most // self.block_size)
        needed = self._blocks_for(request.num_tokens) - len(hits)
        unreferenced_hits = sum(not self.pool.ref_count(block) for block in hits)  # free until they are shared
        if needed + unreferenced_hits > self.pool.num_free:
            return False
        self.pool.share(hits)
        request.block_table = hits + self.pool.allocate(needed)
        request.num_computed_tokens = request.num_scheduled_tokens = len(hits) * self.block_size
        request.seat = self._seats.pop()
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
        """Gives blocks and seat back; nothing of the request is computed any more."""
        self.pool.free(request.block_table)
        request.block_table = []
        if request.seat is not None:
            self._seats.append(request.seat)
            request.seat = None
        request.num_computed_tokens = request.num_scheduled_tokens = request.num_pending_tokens = 0
        request.num_registered_blocks = 0
        request.content_id = ROOT
