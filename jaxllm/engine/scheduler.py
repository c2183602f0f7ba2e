"""Requests from the queue to their last token: continuous batching, over all replicas of the model."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import count

from jaxllm.cache.block_pool import BlockPool
from jaxllm.engine.replica import Replica
from jaxllm.engine.request import Request, RequestStatus
from jaxllm.engine.step import ScheduledRow, SchedulerStats, Step
from jaxllm.engine.step_maker import StepMaker

logger = logging.getLogger(__name__)


class Scheduler:
    """First come, first served: one queue for all replicas of the model, each with a block pool of its own.

    The queue and what runs on each replica are kept in order of arrival: the queue is entered at its end and left at
    its front, and a preempted request, always the latest one running on its replica, goes back before all that came
    later. The oldest request of a replica is in every step and never preempted, and nobody overtakes the front of the
    queue, so each request ends after a bounded number of steps. With one replica, every running request arrived before
    every waiting one.

    What a step computes, and who is admitted or preempted for it, is `StepMaker`'s to decide.

    A step that is under way may still write to blocks that were given back meanwhile. Later steps run after it on the
    device, and whoever takes the blocks writes before he reads.
    """

    def __init__(
        self,
        *pools: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        enable_prefix_caching: bool,
        iterations: Callable[[int], int] = lambda rows: 1,
    ) -> None:
        """Schedules steps in which each replica has up to `max_num_batched_tokens` tokens in `max_num_seqs` rows.

        There is a replica for each of `pools`, which are of one size. Prompt and output of a request have at most
        `max_model_len` tokens together. Blocks hold `block_size` tokens.
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
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_model_len = max_model_len
        self._limit(pools[0].num_blocks)
        seats = self.max_num_seqs
        self._replicas = [
            Replica(pool, block_size, range(i * seats, (i + 1) * seats), enable_prefix_caching)
            for i, pool in enumerate(pools)
        ]
        self._waiting: OrderedDict[Hashable, Request] = OrderedDict()
        self._arrivals = count()
        self._stats = SchedulerStats()
        self._maker = StepMaker(
            self._replicas, self._waiting, self._stats, max_num_batched_tokens, block_size, iterations
        )

    @property
    def stats(self) -> SchedulerStats:
        """A copy of the counters as they are now."""
        return replace(
            self._stats,
            running=sum(len(replica.running) for replica in self._replicas),
            waiting=len(self._waiting),
            free_blocks=sum(replica.pool.num_free for replica in self._replicas),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools."""
        return self._pool_blocks * len(self._replicas)

    def has_unfinished(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self._waiting) or any(replica.running for replica in self._replicas)

    def check(self, request: Request) -> None:
        """Raises ValueError where `add` would, and queues nothing."""
        name, length = f"request {request.request_id!r}", request.num_tokens
        if self._held(request.key) is not None:
            raise ValueError(f"{name} is still being processed; use another id, or abort the first one")
        if request.status is not RequestStatus.WAITING:
            raise ValueError(f"{name} is {request.status.value}; make a new Request to run the prompt again")
        if length >= self.max_model_len:
            raise ValueError(
                f"the prompt has {length} tokens, at most {self.max_model_len - 1} leave room for one new "
                f"token within max_model_len {self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        needed, available = -(-length // self.block_size), self._pool_blocks
        if needed > available:
            cache = "the whole cache" if len(self._replicas) == 1 else "the whole cache of a replica"
            raise ValueError(
                f"the prompt of {length} tokens needs {needed} KV-cache blocks of {self.block_size} tokens, "
                f"{cache} has {available} ({available * self.block_size} tokens); shorten the prompt or raise "
                "num_kvcache_blocks"
            )

    def add(self, request: Request) -> None:
        """Puts `request` at the end of the queue.

        Raises ValueError, with nothing queued, when its key is in use, it was queued before, or its prompt leaves no
        room for one token within `max_model_len` or does not fit into a whole block pool.
        """
        self.check(request)
        request.max_tokens = min(self._max_tokens, request.num_prompt_tokens + request.params.max_tokens)
        request.arrival = next(self._arrivals)
        self._waiting[request.key] = request

    def abort(self, key: Hashable) -> Request | None:
        """Ends a waiting or running request with reason "abort"; None when no such request is unfinished."""
        request = self._held(key)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends `request` and gives its blocks back; `stop_reason`, if given, is what stopped it.

        Raises ValueError when the scheduler does not hold the request (it has finished, or was never added).
        """
        if self._held(request.key) is not request:
            raise ValueError(f"request {request.request_id!r} is {request.status.value} and not held by this scheduler")
        if request.status is RequestStatus.RUNNING:
            replica = self._replica_of(request)
            del replica.running[request.key]
            replica.release(request)
        else:
            del self._waiting[request.key]
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
        return self._maker.make()

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
                self._replica_of(request).commit(request, computed)
                continue
            before, replica = len(request.token_ids), self._replica_of(request)
            for token in sampled[: row.num_samples]:
                if token < 0:
                    self.finish(request, "error")
                    break
                computed += 1
                replica.commit(request, computed)
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
        for replica in self._replicas:
            for request in replica.running.values():
                request.num_scheduled_tokens = request.num_computed_tokens
                request.num_pending_tokens = 0

    def forget_kv(self) -> None:
        """The KV array has lost its content: whatever runs is computed again, and no prefix is found any more."""
        for replica in self._replicas:
            while replica.running:
                self._maker.preempt(replica)
            replica.forget_kv()

    def resize(self, num_blocks: int) -> list[Request]:
        """Go on with pools of another size, after `forget_kv`; the waiting requests that do not fit into a whole one.

        End those: nobody can admit them, and nobody behind them would be admitted. The others finish, some sooner than
        they asked for where the pool is the limit.
        """
        for replica in self._replicas:
            replica.pool.resize(num_blocks)
        self._limit(num_blocks)
        for request in self._waiting.values():
            request.max_tokens = min(self._max_tokens, request.num_prompt_tokens + request.params.max_tokens)
        return [request for request in self._waiting.values() if -(-request.num_tokens // self.block_size) > num_blocks]

    def _limit(self, pool_blocks: int) -> None:
        """The longest that a request can become, each pool having so many blocks."""
        # The last token of a request is never fed back, so it needs no slot: one token more than a pool's slots.
        self._pool_blocks = pool_blocks
        self._max_tokens = min(self.max_model_len, pool_blocks * self.block_size + 1)
        self._pool_limits = self._max_tokens < self.max_model_len

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
                request.request_id, request.num_tokens, self._pool_blocks, self.block_size,
            )  # fmt: skip
        self.finish(request, reason)
        return True

    def _held(self, key: Hashable) -> Request | None:
        """The unfinished request of that key."""
        for requests in (self._waiting, *(replica.running for replica in self._replicas)):
            if key in requests:
                return requests[key]
        return None

    def _replica_of(self, request: Request) -> Replica:
        """Where a running request runs."""
        assert request.seat is not None
        return self._replicas[request.seat // self.max_num_seqs]
