"""Differences and verdicts on arrays made up here."""

import math

import numpy as np
import pytest

from jaxllm.comparison.metrics import (
    Continuation,
    Difference,
    LogitsDifference,
    PartDifference,
    Trace,
    part_names,
)
from jaxllm.comparison.verdict import DEFAULTS, Tolerances, find_excesses


def trace(continuation: list[int], gaps: list[float]) -> Trace:
    return Trace(np.array([1], np.int32), [], continuation, gaps)


def test_relative_difference_is_by_token() -> None:
    reference = np.array([[3000.0, 4000.0], [3.0, 4.0]], np.float32)
    ours = reference + np.array([[5.0, 0.0], [0.0, 0.5]], np.float32)
    difference = Difference.of(ours, reference)
    assert difference.max_abs == 5.0
    assert difference.relative == pytest.approx(0.1)  # the small token's 0.5 / 5, not the large one's 5 / 5000


def test_zero_against_zero_is_no_difference() -> None:
    zeros = np.zeros((2, 3), np.float32)
    assert Difference.of(zeros, zeros) == Difference(0.0, 0.0)


def test_not_a_number_survives_merging_and_exceeds() -> None:
    ones = np.ones((2, 2), np.float32)
    broken = ones.copy()
    broken[1, 0] = np.nan
    merged = Difference.of(ones, ones) | Difference.of(broken, ones) | Difference.of(ones, ones)
    assert math.isnan(merged.max_abs) and math.isnan(merged.relative)
    parts = [PartDifference(name, merged, merged) for name in part_names(1)]
    found = find_excesses(parts, LogitsDifference(1, 0.0, 1.0, 0.0, 0.0, 1), [], Tolerances.of("float32"))
    assert [excess.where for excess in found if excess.figure == "local"] == part_names(1)


def test_logits_figures_equal_the_formulas() -> None:
    draw = np.random.default_rng(0)
    reference = draw.normal(size=(150, 11)).astype(np.float32)
    ours = (reference + draw.normal(scale=0.3, size=reference.shape)).astype(np.float32)
    valid = 9
    p, q = (np.exp(x[:, :valid].astype(np.float64)) for x in (reference, ours))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    kl = (p * np.log(p / q)).sum(-1)

    whole = LogitsDifference.of(ours, reference, valid)
    assert whole.kl_mean == pytest.approx(kl.mean()) and whole.kl_max == pytest.approx(kl.max())
    assert whole.top1 == (p.argmax(-1) == q.argmax(-1)).mean()
    assert whole.relative == pytest.approx(np.abs(ours - reference).max() / np.abs(reference).max())

    halves = LogitsDifference.of(ours[:40], reference[:40], valid) | LogitsDifference.of(
        ours[40:], reference[40:], valid
    )
    assert halves.positions == 150 and halves.kl_mean == pytest.approx(whole.kl_mean)
    assert (halves.max_abs, halves.kl_max, halves.top1) == (whole.max_abs, whole.kl_max, whole.top1)


def test_continuations() -> None:
    reference = trace([5, 6, 7], [1.0, 2e-4, 3.0])
    assert Continuation.of([5, 6, 7], reference) == Continuation(3, 3)
    assert Continuation.of([5, 9, 7], reference) == Continuation(3, 1, 6, 9, 2e-4)
    with pytest.raises(ValueError, match=r"generated 2 tokens where 3"):
        Continuation.of([5, 6], reference)


@pytest.mark.parametrize(("gap", "exceeds"), [(1e-3, False), (1.1e-3, True)])
def test_parting_is_allowed_at_a_near_tie_only(gap: float, exceeds: bool) -> None:
    parted = Continuation.of([8], trace([5], [gap]))
    fine = PartDifference("embedding", Difference(), Difference())
    found = find_excesses([fine], LogitsDifference(positions=1), [Continuation(1, 1), parted], Tolerances.of("float32"))
    assert [(excess.figure, excess.where) for excess in found] == [("gap", "prompt 1, token 0")] * exceeds


def test_tolerances_by_dtype() -> None:
    assert set(DEFAULTS) == {"float32", "float16", "bfloat16"}
    assert Tolerances.of("float32", {"kl": 0.5}) == Tolerances(**{**DEFAULTS["float32"], "kl": 0.5})
    for name in Tolerances.names():
        assert DEFAULTS["float32"][name] < DEFAULTS["float16"][name] < DEFAULTS["bfloat16"][name]
