import logging

import pytest

from jaxllm.cache.block_pool import BlockPool
from jaxllm.engine.request import Request, RequestStatus
from jaxllm.engine.scheduler import Scheduler
from jaxllm.sampling_params import SamplingParams


def make(num_blocks=64, **changes):
    limits = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
        "enable_prefix_caching": True,
    }
    return Scheduler(BlockPool(num_blocks), **(limits | changes))


def request(name, prompt, **params):
    prompt = range(100, 100 + prompt) if isinstance(prompt, int) else prompt
    return Request(name, list(prompt), SamplingParams(**{"max_tokens": 4, **params}))


def rows(step):
    return [(row.request.request_id, row.start, row.num_tokens, bool(row.num_samples)) for row in step.rows]


def finish(scheduler, step, *tokens):
    """Completes a step in which each row samples one token; the requests that got one."""
    return [request for request, _ in scheduler.complete(step, [[token] for token in tokens])]


def peek(scheduler):
    """The next step, which will come again."""
    step = scheduler.schedule()
    scheduler.forget_steps()
    return step


def run(scheduler, token=7):
    """Runs until nothing is left; what every step computed."""
    steps = []
    while (step := scheduler.schedule()) is not None:
        steps.append(rows(step))
        finish(scheduler, step, *[token] * len(step.rows))
        assert len(steps) < 1000
    assert scheduler.stats.free_blocks == scheduler.num_blocks
    return steps


def test_prefill_then_decode():
    scheduler = make()
    one = request("a", 5, max_tokens=3)
    scheduler.add(one)
    step = scheduler.schedule()
    assert rows(step) == [("a", 0, 5, True)]
    assert (step.num_tokens, step.decode_only, len(one.block_table)) == (5, False, 2)
    assert finish(scheduler, step, 9) == [one]
    step = scheduler.schedule()
    assert rows(step) == [("a", 5, 1, True)]
    assert (step.num_tokens, step.decode_only) == (1, True)
    scheduler.forget_steps()  # comes again
    assert run(scheduler) == [[("a", 5, 1, True)], [("a", 6, 1, True)]]
    assert (one.output_token_ids, one.finish_reason, one.status) == ([9, 7, 7], "length", RequestStatus.FINISHED)
    assert one.block_table == []
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished()


def test_chunks_take_what_decode_rows_leave_and_come_after_them():
    scheduler = make(max_num_batched_tokens=8, enable_prefix_caching=False)
    for name, prompt in (("a", 3), ("b", 12), ("c", 2)):
        scheduler.add(request(name, prompt, max_tokens=3))
    assert run(scheduler) == [
        [("a", 0, 3, True), ("b", 0, 5, False)],
        [("a", 3, 1, True), ("b", 5, 7, True)],
        [("a", 4, 1, True), ("b", 12, 1, True), ("c", 0, 2, True)],
        [("b", 13, 1, True), ("c", 2, 1, True)],
        [("c", 3, 1, True)],
    ]


def test_rows_with_one_token_come_first():
    scheduler = make(max_num_batched_tokens=8)
    for name, prompt in (("a", 6), ("b", 1)):
        scheduler.add(request(name, prompt))
    step = scheduler.schedule()
    assert rows(step) == [("b", 0, 1, True), ("a", 0, 6, True)]
    assert not step.decode_only


def test_never_more_rows_than_max_num_seqs():
    scheduler = make(max_num_seqs=2)
    for name in "abcde":
        scheduler.add(request(name, 3))
    steps = run(scheduler)
    assert max(map(len, steps)) == 2
    firsts = [row[0] for step in steps for row in step if row[1] == 0]
    assert firsts == list("abcde")


def test_rows_are_capped_by_the_token_budget():
    scheduler = make(max_num_seqs=8, max_num_batched_tokens=3)
    assert scheduler.max_num_seqs == 3
    for name in "abcde":
        scheduler.add(request(name, 2))
    assert all(sum(row[2] for row in step) <= 3 for step in run(scheduler))


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_same_prompt_of_whole_blocks_twice_computes_its_last_block(blocks):
    scheduler = make()
    first, second = (request(name, 4 * blocks, max_tokens=1) for name in "ab")
    scheduler.add(first)
    run(scheduler)
    scheduler.add(second)
    step = scheduler.schedule()
    assert rows(step) == [("b", 4 * (blocks - 1), 4, True)]
    finish(scheduler, step, 7)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4 * (blocks - 1))


@pytest.mark.parametrize(("shared", "hit"), [(3, 0), (4, 4), (7, 4), (8, 8), (11, 8)])
def test_hits_are_the_whole_blocks_that_are_equal(shared, hit):
    scheduler = make()
    scheduler.add(request("a", range(12)))
    finish(scheduler, scheduler.schedule(), 7)
    second = request("b", [*range(shared), *range(50, 60)])
    scheduler.add(second)
    step = scheduler.schedule()
    assert rows(step) == [("a", 12, 1, True), ("b", hit, shared + 10 - hit, True)]
    assert second.num_cached_tokens == hit
    table = step.rows[0].request.block_table
    assert second.block_table[: hit // 4] == table[: hit // 4]
    assert not set(second.block_table[hit // 4 :]) & set(table)
    assert scheduler.stats.prefix_hit_tokens == hit


def test_generated_tokens_can_be_hit_and_the_last_one_has_no_kv():
    scheduler = make()
    scheduler.add(request("a", range(4), max_tokens=5))
    run(scheduler)  # 4 + 5 tokens are known, KV exists for 8
    scheduler.add(request("b", [0, 1, 2, 3, 7, 7, 7, 7, 7]))
    assert rows(peek(scheduler)) == [("b", 8, 1, True)]


def test_a_hit_on_a_free_block_counts_as_taken_from_the_free_ones():
    scheduler = make(num_blocks=5)
    scheduler.add(request("a", range(8), max_tokens=1))
    run(scheduler)
    scheduler.add(request("b", range(300, 309)))
    finish(scheduler, scheduler.schedule(), 7)
    scheduler.add(request("c", range(9)))  # 2 hits that are free, and 1 new block: 3 of the 2 free ones
    assert rows(peek(scheduler)) == [("b", 9, 1, True)]
    run(scheduler)


def test_no_hits_without_prefix_caching():
    scheduler = make(enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(request(name, 12))
        run(scheduler)
    assert scheduler.stats.prefix_hit_tokens == 0


def test_a_block_can_be_hit_once_all_of_it_is_computed():
    scheduler = make(max_num_batched_tokens=7)
    scheduler.add(request("a", range(12)))
    finish(scheduler, scheduler.schedule(), -1)  # 7 tokens: one full block, and three of the next
    scheduler.abort("a")
    scheduler.add(request("b", range(12)))
    assert rows(peek(scheduler)) == [("b", 4, 7, False)]
    run(scheduler)


def test_the_latest_is_preempted_keeps_its_tokens_and_returns_first():
    scheduler = make(num_blocks=4, enable_prefix_caching=False)
    a, b, c = request("a", 8), request("b", 7), request("c", 1)
    for each in (a, b, c):
        scheduler.add(each)
    finish(scheduler, scheduler.schedule(), 1, 2)
    assert (len(a.block_table), len(b.block_table), c.status) == (2, 2, RequestStatus.WAITING)
    step = scheduler.schedule()  # a needs a third block; c would fit into what b leaves, but nobody is admitted now
    assert rows(step) == [("a", 8, 1, True)]
    assert (b.status, b.num_preemptions, b.num_computed_tokens, b.block_table) == (RequestStatus.WAITING, 1, 0, [])
    assert b.output_token_ids == [2]
    finish(scheduler, step, 1)
    assert rows(peek(scheduler)) == [("a", 9, 1, True)]  # b needs two blocks, c waits behind it
    run(scheduler)
    assert b.output_token_ids == [2, 7, 7, 7]
    assert c.finish_reason == "length"
    assert scheduler.stats.preemptions == 1


def test_preempted_one_token_past_a_block():
    scheduler = make(num_blocks=2, block_size=256, max_model_len=600, max_num_batched_tokens=600)
    a, b = request("a", 255, max_tokens=5), request("b", range(1000, 1256), max_tokens=5)
    scheduler.add(a)
    scheduler.add(b)
    finish(scheduler, scheduler.schedule(), 1, 2)
    assert b.num_tokens == 257
    step = scheduler.schedule()  # b needs a second block and is the latest itself
    assert rows(step) == [("a", 255, 1, True)]
    assert (b.num_preemptions, b.num_tokens) == (1, 257)
    finish(scheduler, step, 1)
    run(scheduler)
    assert a.output_token_ids == [1, 1, 7, 7, 7]
    assert b.output_token_ids == [2, 7, 7, 7, 7]


def test_a_preempted_request_hits_its_own_blocks():
    scheduler = make(num_blocks=5)
    a, b = request("a", 8), request("b", range(200, 211), max_tokens=3)
    scheduler.add(a)
    scheduler.add(b)
    finish(scheduler, scheduler.schedule(), 1, 2)
    finish(scheduler, scheduler.schedule(), 1)  # b leaves 3 blocks, a takes the one without full content
    assert b.num_preemptions == 1
    scheduler.abort("a")
    assert rows(peek(scheduler)) == [("b", 8, 4, True)]
    assert b.num_cached_tokens == 0  # what the first admission found
    run(scheduler)


@pytest.mark.parametrize(("length", "outputs"), [(62, 2), (63, 1)])
def test_up_to_max_model_len(length, outputs):
    scheduler = make(max_model_len=64)
    one = request("a", length, max_tokens=10)
    scheduler.add(one)
    run(scheduler)
    assert (one.num_output_tokens, one.finish_reason) == (outputs, "length")


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_a_prompt_without_room_for_a_token_is_refused(length):
    scheduler = make(max_model_len=64, num_blocks=1000)
    with pytest.raises(ValueError, match=rf"^the prompt has {length} tokens, at most 63 .* max_model_len 64"):
        scheduler.add(request("a", length))
    assert not scheduler.has_unfinished()
    assert run(scheduler) == []


def test_a_prompt_that_no_pool_can_hold_is_refused():
    scheduler = make(num_blocks=2)
    with pytest.raises(
        ValueError,
        match=r"^the prompt of 9 tokens needs 3 KV-cache blocks of 4 tokens, .* 2 \(8 tokens\); .*num_kvcache_blocks",
    ):
        scheduler.add(request("a", 9))
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize(("length", "outputs"), [(8, 1), (7, 2), (5, 4)])
def test_a_request_that_outgrows_the_pool_ends_with_length(length, outputs, caplog):
    scheduler = make(num_blocks=2)
    one = request("a", length, max_tokens=20)
    scheduler.add(one)
    with caplog.at_level(logging.WARNING):
        run(scheduler)
    assert (one.num_output_tokens, one.finish_reason) == (outputs, "length")
    assert "fills all 2 KV-cache blocks of 4 tokens" in caplog.text


def test_max_tokens_is_no_reason_to_warn(caplog):
    scheduler = make(num_blocks=2)
    scheduler.add(request("a", 8, max_tokens=1))
    run(scheduler)
    assert caplog.text == ""


def test_bad_additions_leave_nothing_behind():
    scheduler = make()
    first = request("a", 5)
    scheduler.add(first)
    with pytest.raises(ValueError, match="'a' is still being processed"):
        scheduler.add(request("a", 6))
    peek(scheduler)
    with pytest.raises(ValueError, match="'a' is still being processed"):
        scheduler.add(request("a", 6))
    run(scheduler)
    with pytest.raises(ValueError, match="'a' is finished; make a new Request"):
        scheduler.add(first)
    scheduler.add(request("a", 6))  # the id is free again
    assert run(scheduler)[0] == [("a", 4, 2, True)]


def test_abort_waiting_and_running_then_reuse_the_id():
    scheduler = make(max_num_seqs=1)
    a, b = request("a", 5), request("b", 5)
    scheduler.add(a)
    scheduler.add(b)
    step = scheduler.schedule()
    assert scheduler.abort("b") is b
    assert scheduler.abort("a") is a
    assert scheduler.abort("a") is None
    assert (a.finish_reason, b.finish_reason) == ("abort", "abort")
    assert scheduler.stats.free_blocks == scheduler.num_blocks
    again = request("a", 5)
    scheduler.add(again)
    assert finish(scheduler, step, 7) == []  # the step of the first "a" does not touch the second
    assert (a.output_token_ids, again.num_computed_tokens, scheduler.stats.running) == ([], 0, 0)
    run(scheduler)
    assert again.finish_reason == "length"


def test_finish_with_a_stop_string():
    scheduler = make()
    one = request("a", 5)
    scheduler.add(one)
    finish(scheduler, scheduler.schedule(), 7)
    scheduler.finish(one, "stop", "\n\n")
    assert (one.finish_reason, one.stop_reason) == ("stop", "\n\n")
    assert scheduler.stats.free_blocks == scheduler.num_blocks
    with pytest.raises(ValueError, match="'a' is finished and not held"):
        scheduler.finish(one, "stop")
    with pytest.raises(ValueError, match="'b' is waiting and not held"):
        scheduler.finish(request("b", 5), "stop")


def test_no_token_at_all_ends_its_request_in_an_error():
    """What came before it in the same step stays; the others go on."""
    scheduler = make(iterations=lambda rows: 4)
    one, other = request("a", 5, max_tokens=9), request("b", 5, max_tokens=9)
    scheduler.add(one)
    scheduler.add(other)
    finish(scheduler, scheduler.schedule(), 7, 7)
    step = scheduler.schedule()
    assert scheduler.complete(step, [[8, -1, 9, 9], [8, 8, 8, 8]]) == [(one, 1), (other, 4)]
    assert (one.output_token_ids, one.finish_reason, one.block_table) == ([7, 8], "error", [])
    assert (other.output_token_ids, other.is_finished) == ([7, 8, 8, 8, 8], False)
    scheduler.abort("b")
    assert scheduler.stats.free_blocks == scheduler.num_blocks


def test_nobody_runs_a_loop_while_a_grammar_waits_for_its_token():
    scheduler = make(iterations=lambda rows: 4)
    one, other = request("a", 5, max_tokens=20), request("b", 5, max_tokens=3)
    other.matcher = object()
    scheduler.add(one)
    scheduler.add(other)
    step, seen = scheduler.schedule(), []
    for _ in range(5):
        behind = scheduler.schedule()
        seen.append((len(step.rows), step.iterations))
        finish(scheduler, step, *[7] * len(step.rows))
        step = behind
    assert seen == [(2, 1), (1, 1)] * 2 + [(2, 1)] and other.is_finished
    assert scheduler.schedule().iterations == 4


def test_nobody_runs_a_loop_while_the_front_of_the_queue_has_room_thanks_to_its_prefix():
    scheduler = make(num_blocks=12, iterations=lambda rows: 4, max_num_seqs=2)
    scheduler.add(request("a", 24, max_tokens=30))  # 6 blocks, then 5 are free
    finish(scheduler, scheduler.schedule(), 7)
    assert peek(scheduler).iterations == 4
    scheduler.add(request("b", 25, max_tokens=30))  # 7 blocks, 6 of which are there
    step = scheduler.schedule()
    assert rows(step) == [("a", 24, 1, True), ("b", 24, 1, True)] and step.iterations == 1
    finish(scheduler, step, 7, 7)
    assert scheduler.schedule().iterations == 4


def test_a_step_is_completed_once_with_a_token_for_every_row():
    scheduler = make()
    one = request("a", 5)
    scheduler.add(one)
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="tokens for 2 rows, but the step has 1"):
        finish(scheduler, step, 7, 7)
    finish(scheduler, step, 7)
    with pytest.raises(ValueError, match="begins at token 0, 5 are computed"):
        finish(scheduler, step, 7)
    assert one.output_token_ids == [7]


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least"):
        make(**{name: 0})


def test_stats():
    scheduler = make()
    scheduler.add(request("a", 8))
    scheduler.add(request("b", 5))
    assert (scheduler.stats.waiting, scheduler.stats.running) == (2, 0)
    finish(scheduler, scheduler.schedule(), 7, 7)
    stats = scheduler.stats
    assert (stats.waiting, stats.running, stats.free_blocks) == (0, 2, 60)
    assert (stats.steps, stats.scheduled_tokens, stats.prompt_tokens, stats.output_tokens) == (1, 13, 13, 2)
    run(scheduler)
    assert scheduler.stats.finished == 2
    assert stats.steps == 1  # a copy


def of_replicas(count, num_blocks=64, **changes):
    one = make(**changes)
    limits = {name: getattr(one, name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
    caching = changes.get("enable_prefix_caching", True)
    pools = [BlockPool(num_blocks) for _ in range(count)]
    return Scheduler(*pools, block_size=one.block_size, enable_prefix_caching=caching, **limits)


def replicas_of(scheduler, requests):
    return [one.seat // scheduler.max_num_seqs for one in requests]


def test_requests_go_where_less_is_done():
    """Blocks count first, then rows, then the order of replicas."""
    scheduler = of_replicas(3)
    requests = [request(str(i), [i] * n) for i, n in enumerate((9, 5, 5, 1, 1, 1))]  # 3, 2, 2, 1, 1, 1 blocks
    for one in requests:
        scheduler.add(one)
    step = scheduler.schedule()
    assert replicas_of(scheduler, requests) == [0, 1, 2, 1, 2, 0]
    assert step.shares == (2, 2, 2) and step.num_tokens == 22 and step.most_tokens == 10
    assert [row.request.seat for row in step.rows] == [1, 0, 9, 8, 17, 16]  # single tokens first


def test_a_prefix_draws_requests_until_another_replica_has_so_much_less_to_do():
    """8 blocks are cached on the first replica, and one more is used there by each request."""
    scheduler = of_replicas(2, max_num_seqs=64, max_num_batched_tokens=4096)
    prompt = list(range(32))

    def add(name, count):
        requests = [request(f"{name}{i}", [*prompt, 100 + i], max_tokens=2) for i in range(count)]
        for one in requests:
            scheduler.add(one)
        finish(scheduler, step := scheduler.schedule(), *[7] * len(step.rows))
        return replicas_of(scheduler, requests), [one.num_cached_tokens for one in requests]

    scheduler.add(request("first", prompt, max_tokens=30))
    finish(scheduler, scheduler.schedule(), 1)
    assert add("a", 9) == ([0] * 7 + [1, 0], [32] * 7 + [0, 32])
    assert add("b", 3) == ([1, 1, 1], [32] * 3)  # what ended on the first is not in use any more
    run(scheduler)


def test_a_preempted_request_goes_on_where_there_is_room():
    """On a replica where a younger one runs: it comes before that, which is preempted first."""
    scheduler = of_replicas(2, num_blocks=4, enable_prefix_caching=False)
    a, b = request("a", 8, max_tokens=8), request("b", 11, max_tokens=1)
    c, d = request("c", 4, max_tokens=8), request("d", 3, max_tokens=12)
    for one in (a, b, c, d):
        scheduler.add(one)
    step = scheduler.schedule()
    assert replicas_of(scheduler, (a, b, c, d)) == [0, 1, 0, 1]
    finish(scheduler, step, 7, 7, 7, 7)
    step = scheduler.schedule()
    assert rows(step) == [("a", 8, 1, True), ("d", 3, 1, True), ("c", 0, 5, True)]
    assert replicas_of(scheduler, (a, c, d)) == [0, 1, 1] and c.num_preemptions == 1
    finish(scheduler, step, 7, 7, 7)
    step = scheduler.schedule()
    assert rows(step) == [("a", 9, 1, True), ("c", 5, 1, True), ("d", 4, 1, True)]
    finish(scheduler, step, 7, 7, 7)
    run(scheduler)
    assert [len(one.output_token_ids) for one in (a, b, c, d)] == [8, 1, 8, 12]
    assert (a.num_preemptions, c.num_preemptions) == (0, 1) and d.num_preemptions > 0


def test_what_does_not_fit_on_a_replica_is_refused():
    scheduler = of_replicas(2, num_blocks=3)
    with pytest.raises(ValueError, match=r"needs 4 KV-cache blocks.*whole cache of a replica has 3 \(12 tokens\)"):
        scheduler.add(request("a", 13))
    assert scheduler.num_blocks == 6
