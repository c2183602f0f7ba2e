"""Variants are ordered by what they cover."""

import itertools

import pytest

from jaxllm.engine.spec import KERNEL_SAMPLERS
from jaxllm.sampling.variant import GREEDY, KERNEL, PLAIN, Filters, SamplerVariant, covering, everything, join


def double(logits: object, inputs: object) -> object:
    return logits


def halve(logits: object, inputs: object) -> object:
    return logits


VARIANTS = [
    GREEDY,
    PLAIN,
    SamplerVariant(filters=Filters.SMALL_TOP_K),
    SamplerVariant(filters=Filters.ALL, logprobs=0),
    SamplerVariant(edits=True, penalties=True),
    SamplerVariant(mask=True, logprobs=20),
    SamplerVariant(processors=(double,)),
    SamplerVariant(processors=(double, halve)),
]


def test_the_union_covers_both_and_is_the_smallest() -> None:
    for a, b in itertools.product(VARIANTS, repeat=2):
        union = a | b
        assert union == b | a
        assert union.covers(a)
        assert union.covers(b)
        assert all(other.covers(union) for other in VARIANTS if other.covers(a) and other.covers(b))
    assert join([]) == GREEDY
    assert join(VARIANTS[:6]).name == "plain+all+edits+penalties+mask+logprobs20"


def test_logprobs_of_none_is_less_than_of_the_chosen_token_alone() -> None:
    assert SamplerVariant(logprobs=0).covers(PLAIN)
    assert not PLAIN.covers(SamplerVariant(logprobs=0))
    assert (PLAIN.name, GREEDY.name) == ("plain", "greedy")


def test_the_first_that_serves_is_taken() -> None:
    compiled = [PLAIN, SamplerVariant(filters=Filters.ALL), SamplerVariant(filters=Filters.ALL, edits=True)]
    assert covering(PLAIN, compiled) is compiled[0]
    assert covering(GREEDY, compiled) is compiled[0]
    assert covering(PLAIN, [GREEDY]) is None
    assert covering(SamplerVariant(filters=Filters.TOP_P), compiled) is compiled[1]
    assert covering(SamplerVariant(edits=True), compiled) is compiled[2]
    assert covering(SamplerVariant(mask=True), compiled) is None


def test_the_kernel_serves_whoever_needs_no_edits() -> None:
    """No request needs it; whatever is compiled beside it covers it."""
    for needed in (GREEDY, PLAIN, SamplerVariant(filters=Filters.ALL, suppress=True)):
        assert KERNEL.covers(needed)
        assert not needed.covers(KERNEL)
    for other in (SamplerVariant(edits=True), SamplerVariant(logprobs=0), SamplerVariant(mask=True)):
        assert not KERNEL.covers(other)
    assert [variant.kernel for variant, _ in KERNEL_SAMPLERS] == [True, True]
    (first, _), (last, _) = KERNEL_SAMPLERS
    assert last.covers(first)
    assert last.covers(everything())


def test_different_processors_do_not_mix() -> None:
    with pytest.raises(ValueError, match="different logits processors"):
        SamplerVariant(processors=(double,)) | SamplerVariant(processors=(halve,))
