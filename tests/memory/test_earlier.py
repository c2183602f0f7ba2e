"""Which number of blocks a start takes that finds those of earlier starts: against a model that tries every number."""

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.test_sizing import PROGRAM, demand, gpu

from jaxllm.memory import verify
from jaxllm.memory.budget import DeviceBudget
from jaxllm.memory.cache_size import BudgetError, size_cache
from jaxllm.memory.earlier import EarlierSizes, as_before
from jaxllm.memory.report import MemoryReport
from jaxllm.memory.sizing import report_of
from jaxllm.memory.units import GIB, MIB

EARLIER = "programs of an earlier start"


def budget(room: int, block_bytes: int) -> DeviceBudget:
    """A card whose cache can have `room` bytes."""
    return DeviceBudget.of(
        name="card", total=room, utilization=1.0, non_framework=0, weights=0, activations=0, block_bytes=block_bytes
    )


def expected(
    rooms: list[int], block_bytes: int, useful: int, least: int, complete: frozenset[int], begun: frozenset[int]
) -> tuple[int, bool]:
    """The number of blocks, and whether it is there for its programs alone; every number is tried."""

    def fits(blocks: int, left_free: Fraction = Fraction(0)) -> bool:
        return blocks <= useful and all(blocks * block_bytes + left_free <= room for room in rooms)

    numbers = range(1, useful + 1)
    largest = max(blocks for blocks in numbers if fits(blocks))
    cache = Fraction(largest * block_bytes)
    given_up = min(max(Fraction(512 * MIB), cache / 100), cache / 8)
    usable = [
        blocks
        for blocks in numbers
        if fits(blocks) and blocks >= least and blocks in complete | begun and cache - blocks * block_bytes <= given_up
    ]
    slack = min(Fraction(128 * MIB), Fraction(largest * block_bytes // 64))
    alone = max((blocks for blocks in numbers if blocks == least or fits(blocks, slack)), default=least)
    found = max(usable, key=lambda blocks: (blocks in complete, blocks), default=alone)
    return found, found not in (alone, largest)


OFFSETS = st.lists(st.integers(-60, 3), max_size=4)


@settings(max_examples=300)
@given(
    rooms=st.lists(st.tuples(st.integers(200, 900), st.floats(0, 0.99)), min_size=1, max_size=3),
    block_bytes=st.sampled_from([1 << 14, 1 << 20, 9 << 20, 77 << 19, 300 << 20]),
    useful=st.integers(1, 900),
    least=st.floats(0, 1),
    complete=OFFSETS,
    begun=OFFSETS,
)
def test_the_rule(
    rooms: list[tuple[int, float]], block_bytes: int, useful: int, least: float, complete: list[int], begun: list[int]
) -> None:
    """With caches of megabytes, where shares of them count, and of gigabytes, where bytes do."""
    room_bytes = [blocks * block_bytes + int(part * block_bytes) for blocks, part in rooms]
    budgets = [budget(room, block_bytes) for room in room_bytes]
    size = size_cache(budgets, useful_blocks=useful)
    longest = max(1, int(size.num_blocks * least))
    known = [frozenset(max(1, size.num_blocks + offset) for offset in offsets) for offsets in (complete, begun)]
    found = as_before(size, budgets, least=longest, earlier=EarlierSizes(*known))
    want, for_programs = expected(room_bytes, block_bytes, useful, longest, *known)
    assert (found.num_blocks, found.bound_by == EARLIER) == (want, for_programs)
    assert longest <= found.num_blocks <= size.num_blocks and found.device == size.device
    assert as_before(size, budgets, least=longest, earlier=None) is size


@given(
    room=st.integers(64 << 20, 120 << 30),
    block_bytes=st.integers(1 << 14, 32 << 20),
    useful=st.none() | st.integers(1, 20000),
    later=st.lists(st.floats(-1, 1), min_size=1, max_size=8),
    interrupted=st.booleans(),
)
def test_all_starts_agree_with_the_first(
    room: int, block_bytes: int, useful: int | None, later: list[float], interrupted: bool
) -> None:
    """Whatever is free, from the slack less than in the first start to as much more as a start gives up."""
    if room < 2 * block_bytes:
        return
    known: dict[str, frozenset[int]] = {}

    def start(room: int) -> int:
        budgets = [budget(room, block_bytes)]
        size = size_cache(budgets, useful_blocks=useful)
        return as_before(size, budgets, least=1, earlier=EarlierSizes(**known)).num_blocks

    first = start(room)
    known["begun" if interrupted else "complete"] = frozenset({first})
    cache = first * block_bytes
    slack = min(128 * MIB, cache // 64)
    left = min(128 * MIB, room // 64)  # by the first start, whose cache was to be as large as its room
    more = min(max(512 * MIB, cache // 100), cache // 8) - left - block_bytes
    for part in later:
        assert start(room + int(part * (slack if part < 0 else max(0, more)))) == first
        known = {"complete": frozenset({first})}


def sized(largest_free: int, earlier: EarlierSizes | None, **options: object) -> MemoryReport:
    wanted = dataclasses.replace(demand(block_bytes=9 * MIB, **options), earlier=earlier)
    return report_of("gpu", [gpu(weights=15 * GIB, largest_free=largest_free)], wanted, (PROGRAM,), spare=16)


def complete(*blocks: int) -> EarlierSizes:
    return EarlierSizes(complete=frozenset(blocks))


def test_a_pool_that_is_broken_differently() -> None:
    """The fault on an H200 with Qwen3-8B's shape: 12,330 blocks in one region at first, 12,351 with programs kept."""
    reserve = sized(100 * GIB, None).budget.activations
    at_first, later = (sized(blocks * 9 * MIB + reserve + 1000, None) for blocks in (12330, 12351))
    assert (at_first.num_kvcache_blocks, later.num_kvcache_blocks) == (12330, 12351)  # without earlier numbers
    first = sized(12330 * 9 * MIB + reserve + 1000, EarlierSizes())
    assert 12330 - 15 <= first.num_kvcache_blocks < 12330  # 128 MiB are left free
    assert first.bound_by == "largest contiguous region" and first.fitting_blocks == 12330
    second = sized(12351 * 9 * MIB + reserve + 1000, complete(first.num_kvcache_blocks))
    assert second.num_kvcache_blocks == first.num_kvcache_blocks
    assert (second.bound_by, second.fitting_blocks, second.notes) == (EARLIER, 12351, ())
    assert "12,351 blocks fit; programs for 12,31" in second.text() and f"bound by {EARLIER})" in second.lines()[0]
    assert second.to_dict()["fitting_blocks"] == 12351
    for report in (first, second):  # to the byte
        b = report.budget
        assert b.non_framework + b.weights + b.activations + b.headroom == b.limit
        assert report.kv_array_bytes <= b.binding.bytes


def test_a_number_that_does_not_fit_is_not_taken() -> None:
    reserve = sized(100 * GIB, None).budget.activations
    report = sized(12300 * 9 * MIB + reserve, complete(12301, 20000))
    assert report.num_kvcache_blocks < 12300 and report.bound_by == "largest contiguous region"


@pytest.mark.parametrize("options", [{"num_kvcache_blocks": 1000}, {"kv_cache_memory_bytes": 9000 * MIB}])
def test_a_size_that_the_user_set_stands(options: dict[str, int]) -> None:
    report = sized(100 * GIB, complete(999), **options)
    assert (report.num_kvcache_blocks, report.bound_by) == (1000, *options)


def test_all_requests_together_need_less() -> None:
    """Where far more fits there is nothing to leave free; where little more fits, it is the memory that binds."""
    wanted = dataclasses.replace(demand(block_bytes=9 * MIB, max_num_seqs=100), earlier=EarlierSizes())
    useful = 100 * 4096 // 64
    reserve = sized(100 * GIB, None).budget.activations

    def start(fitting: int, *earlier: int) -> MemoryReport:
        view = gpu(largest_free=fitting * 9 * MIB + reserve)
        known = dataclasses.replace(wanted, earlier=complete(*earlier))
        return report_of("gpu", [view], known, (PROGRAM,), spare=16)

    assert (start(9000).num_kvcache_blocks, start(9000).bound_by) == (useful, "all requests together")
    tight = start(useful + 3)
    assert useful - 15 <= tight.num_kvcache_blocks < useful and tight.bound_by == "largest contiguous region"
    again = start(useful - 3, tight.num_kvcache_blocks), start(9000, tight.num_kvcache_blocks)
    assert {report.num_kvcache_blocks for report in again} == {tight.num_kvcache_blocks}


def test_one_long_request_is_worth_more_than_programs() -> None:
    """The slack goes, and so do programs for too few blocks, before a request of max_model_len tokens is refused."""
    reserve = sized(100 * GIB, None).budget.activations
    fitting, most = 1000 * 9 * MIB + reserve, {"max_model_len": 1000 * 64}
    assert sized(fitting, EarlierSizes(), **most).num_kvcache_blocks == 1000
    assert sized(fitting, complete(999), **most).num_kvcache_blocks == 1000
    with pytest.raises(BudgetError, match="that fits is 63936; or"):
        sized(fitting - 1, complete(999), **most)


def test_programs_that_need_more_than_was_reserved_shrink_it_to_the_same_number() -> None:
    """Both starts compile for the first number, or find programs for it; both then go on with the second."""
    reserve = sized(100 * GIB, None).budget.activations
    serving = {"mixed[16384]": PROGRAM.static + GIB}
    sizes: list[tuple[int, int]] = []
    known = EarlierSizes()
    for fitting in (12330, 12351, 12325):
        wanted = dataclasses.replace(demand(block_bytes=9 * MIB), earlier=known)
        report = sized(fitting * 9 * MIB + reserve, known)
        checked = verify.verified(report, wanted, serving)
        again = verify.verified(checked, wanted, serving)
        assert again.num_kvcache_blocks == checked.num_kvcache_blocks <= checked.fitting_blocks
        sizes.append((report.num_kvcache_blocks, checked.num_kvcache_blocks))
        known = EarlierSizes(complete=frozenset({checked.num_kvcache_blocks}), begun=frozenset({sizes[0][0]}))
    (first, shrunk), *_ = sizes
    assert shrunk < first
    # The second start goes the same way, since `shrunk` is too far below what fits; the third takes it at once.
    assert sizes == [(first, shrunk), (first, shrunk), (shrunk, shrunk)]


def test_a_few_bytes_more_cost_nothing() -> None:
    reserve = sized(100 * GIB, None).budget.activations
    report = sized(12330 * 9 * MIB + reserve, EarlierSizes())
    wanted = dataclasses.replace(demand(block_bytes=9 * MIB), earlier=EarlierSizes())
    checked = verify.verified(report, wanted, {"mixed[16384]": PROGRAM.static + 150 * MIB})
    assert (checked.num_kvcache_blocks, checked.notes) == (report.num_kvcache_blocks, ())
