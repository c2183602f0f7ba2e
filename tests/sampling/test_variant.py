"""Variants are ordered by what they cover."""

import itertools

import pytest

from jaxllm.sampling.variant import GREEDY, PLAIN, Filters, SamplerVariant, covering, join


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


def test_different_processors_do_not_mix() -> None:
    with pytest.raises(ValueError, match="different logits processors"):
        SamplerVariant(processors=(double,)) | SamplerVariant(processors=(halve,))
