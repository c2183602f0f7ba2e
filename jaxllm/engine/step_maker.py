"""Decides what the next step computes: tokens of which requests, who is admitted for it, who is preempted."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from jaxllm.engine.replica import Replica
from jaxllm.engine.request import Request, RequestStatus
from jaxllm.engine.step import ScheduledRow, SchedulerStats, Step


@dataclass
class _Part:
    """What a replica computes in the step that is being made."""

    replica: Replica
    budget: int
    """Tokens that it may still compute."""
    singles: list[ScheduledRow] = field(default_factory=list)
    chunks: list[ScheduledRow] = field(default_factory=list)
    admits: bool = True

    def add(self, request: Request) -> None:
        """Compute as many of the request's tokens as the budget allows; their slots are allocated."""
        start = request.num_scheduled_tokens
        remaining = len(request.token_ids) + request.num_pending_tokens - start
        n = min(remaining, self.budget)
        samples = int(n == remaining)
        request.num_scheduled_tokens = start + n
        request.num_pending_tokens += samples
        row = ScheduledRow(request, start, n, samples, request.num_preemptions)
        (self.singles if n == 1 else self.chunks).append(row)
        self.budget -= n


class StepMaker:
    """Running requests first, then chunks of prompts, by the order that `Scheduler` keeps.

    Queue, replicas and counters are the scheduler's. Only here does a request go from the queue to a replica, or back.

    At admission it goes where the least work is in its way, what is cached of it taken off (`Place.cost`), and stays
    there, unless it is preempted: then it begins anew, wherever there is room first.

    All but the latest running request of a replica have exactly one token to compute: a prompt too long for the budget
    that is left keeps those behind it waiting. With no more running rows than budget tokens, each gets at least one.
    Only one that was preempted elsewhere can come between older and younger rows with more to compute.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        waiting: OrderedDict[Hashable, Request],
        stats: SchedulerStats,
        max_num_batched_tokens: int,
        block_size: int,
        iterations: Callable[[int], int],
    ) -> None:
        """Args: replicas, queue and counters, which it changes; the others as those of `Scheduler`."""
        self._replicas, self._waiting, self._stats = replicas, waiting, stats
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_size = block_size
        self._iterations = iterations

    def make(self) -> Step | None:
        """The next step; None when nothing is unfinished, or all that is waits for results of earlier steps."""
        # A request whose last token is on its way has nothing to compute: that token is never fed back. One that
        # follows a grammar has to wait for each token: it says which may come next.
        ready = [
            [
                request
                for request in replica.running.values()
                if not request.num_pending_tokens
                or (
                    len(request.token_ids) + request.num_pending_tokens < request.max_tokens and request.matcher is None
                )
            ]
            for replica in self._replicas
        ]
        step = self._loop(ready) or self._mixed(ready)
        if step is not None:
            self._stats.steps += 1
            self._stats.scheduled_tokens += sum(row.num_tokens for row in step.rows)
        return step

    def _loop(self, ready: list[list[Request]]) -> Step | None:
        """Several decode steps at once, where nobody waits for the end of one and there are blocks for all of them."""
        most = max(map(len, ready))
        iterations = self._iterations(most) if most else 1
        if iterations == 1 or self._can_admit():
            return None
        # One that follows a grammar and is not ready waits for its last token, and for the end of this step with it.
        if any(request.matcher is not None for replica in self._replicas for request in replica.running.values()):
            return None
        counts = []
        for replica, requests in zip(self._replicas, ready, strict=True):
            needed = 0
            for request in requests:
                total = len(request.token_ids) + request.num_pending_tokens
                if total - request.num_scheduled_tokens != 1:
                    return None
                tokens = min(iterations, request.max_tokens - total)
                if tokens < iterations and self._waiting:
                    return None  # its end makes room
                missing = replica.missing(request, total - 1 + tokens)
                needed += missing if missing > 0 else 0
                counts.append(tokens)
            if needed > replica.pool.num_free:
                return None
        rows, left = [], iter(counts)
        for replica, requests in zip(self._replicas, ready, strict=True):
            for request in requests:
                start, tokens = request.num_scheduled_tokens, next(left)
                if start + tokens > len(request.block_table) * self.block_size:
                    self._extend(replica, request, start + tokens)
                request.num_scheduled_tokens = start + tokens
                request.num_pending_tokens += tokens
                rows.append(ScheduledRow(request, start, tokens, tokens, request.num_preemptions))
        shares = self._shares([len(requests) for requests in ready])
        return Step(tuple(rows), len(rows), decode_only=True, iterations=iterations, shares=shares)

    def _mixed(self, ready: list[list[Request]]) -> Step | None:
        """One step of chunks and single tokens, of those that run and of those that can be admitted."""
        parts = [_Part(replica, self.max_num_batched_tokens) for replica in self._replicas]
        for part, requests in zip(parts, ready, strict=True):
            running = len(part.replica.running)
            for request in requests:
                if request.status is not RequestStatus.RUNNING:
                    break  # preempted for an older row, and so is everything behind it
                if not part.budget:
                    break  # after steps that failed, or a preemption elsewhere: older prompts are computed first
                start = request.num_scheduled_tokens
                end = start + min(len(request.token_ids) + request.num_pending_tokens - start, part.budget)
                if end > len(request.block_table) * self.block_size and not self._extend(part.replica, request, end):
                    break
                part.add(request)
            part.admits = len(part.replica.running) == running  # else who is admitted would be preempted next
        while self._waiting:
            request = next(iter(self._waiting.values()))
            admitting = self._admit(request, [part for part in parts if part.admits and part.budget])
            if admitting is None:
                break
            admitting.add(request)
        rows = [row for part in parts for row in (*part.singles, *part.chunks)]
        if not rows:
            return None
        return Step(
            tuple(rows),
            sum(self.max_num_batched_tokens - part.budget for part in parts),
            decode_only=not any(part.chunks for part in parts),
            shares=self._shares([len(part.singles) + len(part.chunks) for part in parts]),
        )

    def _shares(self, rows: list[int]) -> tuple[int, ...]:
        return tuple(rows) if len(self._replicas) > 1 else ()

    def _can_admit(self) -> bool:
        """Whether a replica has room for the front of the queue."""
        if not self._waiting:
            return False
        request = next(iter(self._waiting.values()))
        return any(replica.find(request) is not None for replica in self._replicas)

    def _extend(self, replica: Replica, request: Request, num_tokens: int) -> bool:
        """Gives a running request the blocks for its first `num_tokens` tokens, preempting the latest ones for it.

        False when the request was itself the latest and is preempted. It never is when it runs alone: then all
        blocks are its own or free, and a request that needs more than all has finished.
        """
        needed = replica.missing(request, num_tokens)
        while needed > replica.pool.num_free:
            if self.preempt(replica) is request:
                return False
        request.block_table += replica.pool.allocate(needed)
        return True

    def preempt(self, replica: Replica) -> Request:
        """Puts the latest of a replica's requests back into the queue, and returns it."""
        _, request = replica.running.popitem()
        replica.release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        older = list(takewhile(lambda other: other.arrival < request.arrival, self._waiting.values()))
        self._waiting[request.key] = request
        for first in (request, *reversed(older)):
            self._waiting.move_to_end(first.key, last=False)
        self._stats.preemptions += 1
        return request

    def _admit(self, request: Request, parts: list[_Part]) -> _Part | None:
        """Moves the front of the queue to the best of the replicas that have room for all its known tokens.

        Returns the replica's part of the step; None if there is no room.
        """
        places = [(part, place) for part in parts if (place := part.replica.find(request)) is not None]
        if not places:
            return None
        part, place = min(places, key=lambda found: found[1].cost)
        part.replica.admit(request, place)
        del self._waiting[request.key]
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.admissions += 1
        self._stats.admitted_tokens += request.num_tokens
        self._stats.prefix_hit_tokens += request.num_computed_tokens
        return part
