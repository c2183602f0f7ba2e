"""What lies between the schedule of several replicas and their programs: packing, seats, results."""

from typing import Any

import numpy as np
import pytest
from collectives import collectives

from jaxllm.engine.device_state import StateUpdates, abstract_state, allocate_state
from jaxllm.engine.reported import Reported
from jaxllm.engine.request import Request
from jaxllm.engine.seats import Seats
from jaxllm.engine.step import ScheduledRow, Step
from jaxllm.engine.step_program import StepResults
from jaxllm.engine.step_shape import PackedLayout, StepShape, StepShapes
from jaxllm.parallel.mesh import DATA, make_mesh
from jaxllm.parallel.placement import Placement
from jaxllm.sampling.logprobs import TokenLogprobs
from jaxllm.sampling.sampler import SamplingMode
from jaxllm.sampling_params import SamplingParams

SEATS, WIDTH = 4, 3


def running(name: str, seat: int, tokens: int, **params: Any) -> Request:
    request = Request(name, list(range(10 * seat, 10 * seat + tokens)), SamplingParams(**params))
    request.seat, request.block_table = seat, [seat + 1, seat + 2]
    return request


def rows_of(*requests: Request) -> tuple[ScheduledRow, ...]:
    return tuple(ScheduledRow(request, 0, request.num_tokens, 1, 0) for request in requests)


def test_each_replica_gets_its_own_buffer() -> None:
    """Side by side they are what each would get alone, but for the sampler, which is the larger one's."""
    layout = PackedLayout(StepShape(16, SEATS, False, WIDTH))
    requests = [running("a", 3, 1), running("b", 0, 4), running("c", 8, 6, temperature=0.5), running("d", 11, 2)]
    rows = rows_of(*requests)
    step = Step(rows, 13, False, shares=(2, 0, 2))
    assert (step.most_rows, step.most_tokens) == (2, 8) and step.parts == [rows[:2], (), rows[2:]]
    seats = Seats(SEATS, WIDTH, replicas=3)
    buffers = layout.pack(step, seats, seats.update(rows)).reshape(3, layout.size)
    for replica, some in enumerate((requests[:2], [], requests[2:])):
        for request in some:
            request.seat = request.seat % SEATS  # type: ignore[operator]
        alone = Seats(SEATS, WIDTH)
        expected, view = layout.empty()
        if some:
            own = rows_of(*some)
            expected = layout.pack(Step(own, sum(row.num_tokens for row in own), False), alone, alone.update(own))
            view = {"mode": expected[layout.fields["mode"][0]]}
        view["mode"][0] = SamplingMode.TEMPERATURE
        np.testing.assert_array_equal(buffers[replica], expected)


def test_the_program_holds_the_fullest_replica() -> None:
    shapes = StepShapes(256, 64, 64, 16)
    request = Request("", [0], SamplingParams())
    decode = Step((ScheduledRow(request, 0, 1, 1, 0),) * 12, 12, True, shares=(9, 3))
    assert shapes.fitting(decode).rows == shapes.fitting(Step(decode.rows[:9], 9, True)).rows == 32
    mixed = Step((ScheduledRow(request, 0, 60, 0, 0),) * 2, 120, False, shares=(1, 1))
    assert shapes.fitting(mixed).tokens == 64


@pytest.mark.parametrize("tp", [1, 2])
def test_the_state_of_each_replica_lies_on_its_devices(tp: int) -> None:
    """Updates of many seats, more for one replica than a call writes; nothing is sent."""
    seats, replicas, vocab = 10, 2, 64
    placement = Placement.of(make_mesh(tp, replicas), data_axis=DATA)
    shapes = abstract_state(replicas * seats, 8, vocab)
    updates, state = StateUpdates(shapes, placement), allocate_state(shapes, placement)
    assert not collectives(updates._admit) and not collectives(updates._mask)
    rng = np.random.default_rng(0)
    chosen = [12, *range(9), 19, 17]
    words = rng.integers(0, 2**32, (len(chosen), vocab // 32), dtype=np.uint32)
    state = updates.set_masks(updates.rehearse(state), chosen, words)
    expected = np.zeros((replicas * seats, vocab // 32), np.uint32)
    expected[chosen] = words
    np.testing.assert_array_equal(np.asarray(state.mask), expected)
    requests = [running(str(seat), seat, 5, allowed_token_ids=[seat]) for seat in (15, 2)]
    state = updates.admit(state, requests)
    for request in requests:
        expected[request.seat] = [1 << request.seat, 0]  # type: ignore[operator]
        history = np.asarray(state.history)[request.seat]
        assert history.tolist() == [*request.token_ids, 0, 0, 0]
    np.testing.assert_array_equal(np.asarray(state.mask), expected)
    for array in state:
        assert array.sharding.is_equivalent_to(placement.sharding(DATA), array.ndim)
        for shard in array.addressable_shards:
            place = np.flatnonzero(placement.mesh.devices.ravel() == shard.device)[0] // tp
            assert shard.data.shape[0] == seats and (shard.index[0].start or 0) == place * seats


def test_results_are_told_apart() -> None:
    """Rows and prompt tokens of the second replica begin where the program's own end."""
    rows = [ScheduledRow(running(name, seat, n, prompt_logprobs=1, logprobs=0), 0, n, 1, 0)
            for name, seat, n in (("a", 0, 2), ("b", 1, 3), ("c", 4, 4))]  # fmt: skip
    step = Step(tuple(rows), 9, False, shares=(2, 1))
    width, tokens = 3, 6

    def numbered(*shape: int) -> TokenLogprobs:
        count = np.arange(np.prod(shape)).reshape(shape)
        return TokenLogprobs(count.astype(np.float32), count + 1, count[..., None].astype(np.float32), count[..., None])

    results = StepResults(np.zeros((1, 2 * width)), numbered(1, 2 * width), numbered(2 * tokens))  # type: ignore[arg-type]
    assert step.places(width).tolist() == [0, 1, 3]
    reported = Reported(step, results)
    sampled = [reported.of_output(row.request, [7], None)[0][7].logprob for row in rows]
    assert sampled == [0, 1, 3]
    prompts = [[next(iter(at.values())).logprob for at in reported.of_prompt(row, None)] for row in rows]
    assert prompts == [[0], [2, 3], [6, 7, 8]]
