"""Random workloads against a brute-force model of the KV array and of every request run alone.

Slots of the model hold what a real slot's KV depends on: a digest of its token and of all tokens before it. A row may
only read digests that it would have written itself, and the token it samples is a function of the last one, so that a
wrong block, a stale slot or a lost token changes the text. Steps run on the model's device when they are scheduled, and
are completed later, when others have been scheduled behind them.
"""

import random
from collections import Counter, deque
from itertools import accumulate
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.cache.block_pool import BlockPool
from jaxllm.cache.prefix import PrefixKey
from jaxllm.engine.request import Request, RequestStatus
from jaxllm.engine.scheduler import Scheduler
from jaxllm.sampling_params import SamplingParams

EOS = 2
PRIME = 2**61 - 1


def extend(digest, token):
    """The digest of a prefix with one more token, a polynomial in a fixed point."""
    return (digest * 1_000_000_007 + token + 1) % PRIME


def digests(tokens):
    """The digest of every non-empty prefix."""
    return list(accumulate(tokens, extend, initial=0))[1:]


def sample(digest, vocabulary):
    return (digest >> 7) % vocabulary


def run_alone(prompt, params, most_tokens, vocabulary):
    """Output and finish reason by definition: one token after another, no cache, no neighbours."""
    tokens = list(prompt)
    digest = digests(tokens)[-1]
    while True:
        tokens.append(sample(digest, vocabulary))
        digest = extend(digest, tokens[-1])
        outputs = len(tokens) - len(prompt)
        if outputs >= params.min_tokens and tokens[-1] == EOS and not params.ignore_eos:
            return tokens[len(prompt) :], "stop"
        if outputs == params.max_tokens or len(tokens) == most_tokens:
            return tokens[len(prompt) :], "length"


class Simulation:
    """Runs a scheduler and holds it to the architecture's invariants 3, 6, 7 and 9 at every step."""

    def __init__(self, num_blocks, vocabulary=3, lookahead=0, iterations=1, replicas=1, **limits):
        self.limits = limits
        self.size = limits["block_size"]
        self.budget = limits["max_num_batched_tokens"]
        self.vocabulary = vocabulary
        self.pools = [BlockPool(num_blocks) for _ in range(replicas)]
        self.seats = min(limits["max_num_seqs"], self.budget)
        self.lookahead = lookahead
        self.iterations = iterations
        self.scheduler = Scheduler(*self.pools, iterations=lambda rows: iterations, **limits)
        self.most_tokens = min(limits["max_model_len"], num_blocks * self.size + 1)
        self.slots = {}  # (replica, slot) -> digest
        self.live = {}  # id -> unfinished request, in order of arrival
        self.expected = {}  # id -> output and finish reason when run alone
        self.has_failed = False
        self.under_way = deque()  # steps and the tokens that they sampled
        self.texts = {}  # id -> its tokens, as the device knows them
        self.digests = {}  # id -> their digests
        self.scheduled = {}  # id -> (preemptions at the time, tokens that steps compute)
        self.received = Counter()  # id -> tokens sampled
        self.waited = Counter()  # id -> steps since it has been the oldest

    def add(self, name, prompt, **params):
        request = Request(name, prompt, SamplingParams(**params), frozenset({EOS}), index=len(self.expected))
        self.scheduler.add(request)
        self.live[name] = request
        self.texts[name] = list(prompt)
        self.digests[name] = digests(prompt)
        self.expected[name] = run_alone(prompt, request.params, self.most_tokens, self.vocabulary)
        return request

    def abort(self, name):
        request = self.live.pop(name)
        assert self.scheduler.abort(name) is request
        assert request.finish_reason == "abort"
        assert request.block_table == []
        assert self.scheduler.abort(name) is None

    def step(self):
        """Schedule and run one step, and complete the oldest if that makes too many under way, or there is none."""
        before = {request.request_id: self.replica(request) for request in self.running()}
        step = self.scheduler.schedule()
        assert (not self.live) == (not self.scheduler.has_unfinished())
        if step is not None:
            self.check_caps(step)
            moved = {name for name, replica in before.items() if self.replica(self.live[name]) != replica}
            self.check_order(step, {before[name] for name in moved})
            for row in step.rows:
                self.check_row(row, step)
            self.under_way.append((step, self.execute(step)))
        else:
            assert self.under_way or not self.live
        if self.under_way and (step is None or len(self.under_way) > self.lookahead):
            self.complete()

    def complete(self):
        step, tokens = self.under_way.popleft()
        live = [
            row
            for row in step.rows
            if row.request.status is RequestStatus.RUNNING and row.request.num_preemptions == row.epoch
        ]
        received = self.scheduler.complete(step, tokens)
        assert [request for request, _ in received] == [row.request for row in live if row.num_samples]
        for request, count in received:
            assert count >= 1
            self.received[request.request_id] += count
            assert self.received[request.request_id] == request.num_output_tokens  # every token arrives once
            if request.is_finished:
                del self.live[request.request_id]
                assert (request.output_token_ids, request.finish_reason) == self.expected[request.request_id]

    def lose_steps(self, and_the_cache):
        """Steps under way fail."""
        self.has_failed = True
        self.under_way.clear()
        self.waited.clear()
        self.scheduler.forget_steps()
        for request in (r for r in self.live.values() if r.status is RequestStatus.RUNNING):
            self.scheduled[request.request_id] = (request.num_preemptions, request.num_computed_tokens)
        if and_the_cache:
            self.scheduler.forget_kv()
            self.slots.clear()

    def running(self):
        return [request for request in self.live.values() if request.status is RequestStatus.RUNNING]

    def replica(self, request):
        return None if request.seat is None else request.seat // self.seats

    def slot(self, request, position):
        block = request.block_table[position // self.size]
        return self.replica(request), block * self.size + position % self.size

    def check_caps(self, step):
        assert sum(map(len, step.parts)) == len(step.rows) and len(step.parts) == len(self.pools)
        assert len({id(row.request) for row in step.rows}) == len(step.rows)
        assert len({row.request.seat for row in step.rows}) == len(step.rows)
        for replica, rows in enumerate(step.parts):
            assert all(self.replica(row.request) == replica for row in rows)
            assert len(rows) <= min(self.limits["max_num_seqs"], step.most_rows)
            assert step.iterations > 1 or sum(row.num_tokens for row in rows) <= min(self.budget, step.most_tokens)
            multiple = [row.num_tokens > 1 for row in rows]
            assert step.iterations > 1 or multiple == sorted(multiple)
        if step.iterations > 1:
            assert step.iterations == self.iterations and step.decode_only and step.num_tokens == len(step.rows)
            assert all(1 <= row.num_tokens == row.num_samples <= self.iterations for row in step.rows)
            return
        assert step.num_tokens == sum(row.num_tokens for row in step.rows)
        assert step.decode_only == all(row.num_tokens == 1 for row in step.rows)

    def check_order(self, step, preempting):
        """Whoever holds blocks is served, unless his last token is on its way, and as many as the caps allow.

        On replicas that are `preempting` nobody is admitted.
        """
        live, running = list(self.live.values()), self.running()
        served = {row.request.request_id for row in step.rows}
        tokens = [sum(row.num_tokens for row in rows) for rows in step.parts]
        if len(self.pools) == 1:
            assert running == live[: len(running)]  # older before younger
        for request in running:
            ends = request.num_tokens + request.num_pending_tokens == request.max_tokens
            # for prompts that are computed again
            waits = tokens[self.replica(request)] == self.budget and (self.has_failed or len(self.pools) > 1)
            assert request.request_id in served or (ends and request.num_pending_tokens) or waits
        assert served <= {request.request_id for request in running}
        for replica in range(len(self.pools)):  # the oldest of each is in every step
            own = [request for request in running if self.replica(request) == replica]
            assert not own or own[0].request_id in served or own[0].num_pending_tokens
        oldest = live[0].request_id
        self.waited[oldest] += 1
        assert self.waited[oldest] <= self.longest(oldest) + self.lookahead or len(self.pools) > 1
        waiting = [request for request in live if request.status is RequestStatus.WAITING]
        assert list(self.scheduler._waiting.values()) == waiting
        for replica, pool in enumerate(self.pools):
            taken = sum(self.replica(request) == replica for request in running)
            room = waiting and taken < self.seats and replica not in preempting and step.iterations == 1
            if room and tokens[replica] < self.budget:
                assert -(-waiting[0].num_tokens // self.size) > pool.num_free

    def longest(self, name):
        """Steps that a request needs on its own."""
        return self.most_tokens // self.budget + 1 + self.expected_length(name)

    def expected_length(self, name):
        return len(self.expected[name][0])

    def check_row(self, row, step):
        request, start, n = row.request, row.start, row.num_tokens
        preemptions, scheduled = self.scheduled.get(request.request_id, (None, 0))
        if preemptions == request.num_preemptions:
            assert start == scheduled  # chunks cover all tokens, each once
        else:
            assert start % self.size == 0  # whole blocks were hit
            assert start == 0 or self.limits["enable_prefix_caching"]
        known = request.num_tokens + request.num_pending_tokens - row.num_samples  # on the device, before this step
        assert n >= 1
        assert start + n <= known + row.num_samples - 1 if row.num_samples else start + n < known
        assert known + row.num_samples <= request.max_tokens
        assert request.num_tokens <= known <= len(self.texts[request.request_id])  # no token is ever lost
        self.scheduled[request.request_id] = (request.num_preemptions, start + n)
        own = self.digests[request.request_id]
        assert [self.slots.get(self.slot(request, p)) for p in range(start)] == own[:start]

    def execute(self, step):
        """Writes all rows' KV, after all rows were checked; nobody else may read or write a slot that is written."""
        written = set()
        tokens = []
        for row in step.rows:
            own, text = self.digests[row.request.request_id], self.texts[row.request.request_id]
            sampled = []
            for position in range(row.start, row.start + row.num_tokens):
                slot = self.slot(row.request, position)
                assert slot not in written
                replica, physical = slot
                assert self.pools[replica].ref_count(physical // self.size) == 1
                assert not self.pools[replica].is_retained(physical // self.size)
                written.add(slot)
                self.slots[slot] = own[position]
                if position >= row.start + row.num_tokens - row.num_samples:
                    sampled.append(sample(own[position], self.vocabulary))
                    del text[position + 1 :], own[position + 1 :]  # what was sampled there before is the same
                    text.append(sampled[-1])
                    own.append(extend(own[-1], sampled[-1]))
            tokens.append(sampled)
        return tokens

    def check_blocks(self):
        for replica, pool in enumerate(self.pools):
            tables = [r.block_table for r in self.live.values() if self.replica(r) == replica]
            references = Counter(block for table in tables for block in table)
            assert [pool.ref_count(b) for b in range(pool.num_blocks)] == [
                references[b] for b in range(pool.num_blocks)
            ]
            assert pool.num_free + len(references) == pool.num_blocks
            assert pool.num_referenced == len(references)
            assert all(len(set(table)) == len(table) for table in tables)
        assert not any(r.block_table for r in self.live.values() if r.seat is None)
        stats, free = self.scheduler.stats, sum(pool.num_free for pool in self.pools)
        assert (stats.free_blocks, stats.running + stats.waiting) == (free, len(self.live))

    def drain(self):
        steps = 0
        bound = 1 + sum(map(self.longest, self.live))
        bound += self.lookahead * (1 + len(self.live))
        while self.live:
            self.step()
            if steps % (1 + self.pools[0].num_blocks // 100) == 0:  # it looks at every block: seldom, where many
                self.check_blocks()
            steps += 1
            assert steps <= bound
        assert self.scheduler.schedule() is None
        while self.under_way:  # of requests that ended meanwhile
            self.complete()
        self.check_blocks()
        assert all(pool.num_free == pool.num_blocks for pool in self.pools)


class SchedulerMachine(RuleBasedStateMachine):
    hash_patch = None

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        max_model_len=st.integers(2, 40),
        caching=st.sampled_from([True, True, False]),
        constant_hash=st.booleans(),
        lookahead=st.integers(0, 2),
        iterations=st.integers(1, 3),
        replicas=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        num_blocks,
        block_size,
        max_num_seqs,
        budget,
        max_model_len,
        caching,
        constant_hash,
        lookahead,
        iterations,
        replicas,
    ):
        if constant_hash:
            self.hash_patch = patch.object(PrefixKey, "__hash__", lambda key: 0)
            self.hash_patch.start()
        self.simulation = Simulation(
            num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_prefix_caching=caching,
            lookahead=lookahead,
            iterations=iterations,
            replicas=replicas,
        )
        self.names = iter(range(10**6))

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt, max_tokens, min_tokens, ignore_eos):
        most = self.simulation.most_tokens - 1
        self.simulation.add(
            f"r{next(self.names)}",
            prompt[:most],
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=ignore_eos,
        )

    @rule(data=st.data())
    @precondition(lambda self: self.simulation.expected)
    def add_what_an_earlier_one_knows(self, data):
        name = data.draw(st.sampled_from(sorted(self.simulation.expected)))
        request = self.simulation.live.get(name)
        tokens = request.token_ids if request else self.simulation.expected[name][0]
        self.simulation.add(f"r{next(self.names)}", tokens[: self.simulation.most_tokens - 1], max_tokens=6)

    @rule(surplus=st.integers(0, 9))
    def add_too_long(self, surplus):
        with pytest.raises(ValueError, match=r"raise max_model_len|num_kvcache_blocks"):
            self.simulation.scheduler.add(
                Request("long", [0] * (self.simulation.most_tokens + surplus), SamplingParams())
            )

    @rule(data=st.data())
    @precondition(lambda self: self.simulation.live)
    def add_an_id_in_use(self, data):
        name = data.draw(st.sampled_from(list(self.simulation.live)))
        with pytest.raises(ValueError, match="still being processed"):
            self.simulation.scheduler.add(Request(name, [0], SamplingParams()))

    @rule(data=st.data())
    @precondition(lambda self: self.simulation.live)
    def abort(self, data):
        self.simulation.abort(data.draw(st.sampled_from(list(self.simulation.live))))

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.simulation.step()
            self.simulation.check_blocks()

    @rule(and_the_cache=st.booleans())
    @precondition(lambda self: self.simulation.under_way)
    def steps_fail(self, and_the_cache):
        self.simulation.lose_steps(and_the_cache)

    @invariant()
    def blocks_are_accounted_for(self):
        if hasattr(self, "simulation"):
            self.simulation.check_blocks()

    def teardown(self):
        try:
            if hasattr(self, "simulation"):
                self.simulation.drain()
        finally:
            if self.hash_patch:
                self.hash_patch.stop()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize(
    ("num_blocks", "changes", "preempts"),
    [
        (2000, {}, False),
        (50, {}, True),
        (2000, {"max_num_batched_tokens": 32}, False),
        (2000, {"enable_prefix_caching": False}, False),
        (50, {"enable_prefix_caching": False}, True),
        (50, {"max_num_batched_tokens": 32, "max_num_seqs": 3}, True),
        (2000, {"lookahead": 1, "iterations": 4}, False),
        (50, {"lookahead": 1, "iterations": 4}, True),
        (50, {"lookahead": 1, "iterations": 4, "replicas": 2}, True),
    ],
)
def test_random_requests_with_shared_prefixes(num_blocks, changes, preempts):
    draw = random.Random(0)
    limits = {
        "block_size": 16,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 800,
        "enable_prefix_caching": True,
    }
    simulation = Simulation(num_blocks, vocabulary=1000, **(limits | changes))
    heads = [[draw.randrange(1000) for _ in range(300)] for _ in range(4)]
    for i in range(60):
        length = draw.randint(1, 600)
        tail = [draw.randrange(1000) for _ in range(600)]
        prompt = (draw.choice(heads)[: draw.randint(0, 300)] + tail)[:length]
        simulation.add(f"r{i}", prompt, max_tokens=draw.randint(1, 60), ignore_eos=True)
    simulation.drain()
    stats = simulation.scheduler.stats
    assert (stats.preemptions > 0) == preempts
    assert (stats.prefix_hit_tokens > 0) == simulation.limits["enable_prefix_caching"]
    assert stats.scheduled_tokens + stats.prefix_hit_tokens >= stats.prompt_tokens
