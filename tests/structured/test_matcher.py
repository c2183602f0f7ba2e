"""Masks and states against Python's re and json, on random walks through what they allow."""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from sampling.rows import NEUTRAL, assert_follows, brute_force, drawn, inputs
from tiny import byte_level_tokenizer, sentencepiece_tokenizer

from jaxllm.sampling.variant import SamplerVariant
from jaxllm.structured.grammar import MAX_CACHED, GrammarCompiler
from jaxllm.structured.matcher import Matcher
from jaxllm.structured.params import StructuredOutputsParams
from jaxllm.text.detokenizer import BYTE_OF_CHARACTER

pytest.importorskip("llguidance")

VOCAB = 391  # more than either tokenizer has, and no multiple of 32
TOKENIZERS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "sides": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 12}, "maxItems": 3},
    },
    "required": ["name", "size", "sides"],
    "additionalProperties": False,
}


@functools.cache
def compiler(name: str = "byte-level") -> GrammarCompiler:
    tokenizer = TOKENIZERS[name]()
    return GrammarCompiler(tokenizer, VOCAB, {tokenizer.eos_token_id})


def allowed(matcher: Matcher) -> np.ndarray:
    mask = np.full(-(-VOCAB // 32), 0xFFFFFFFF, np.uint32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
    assert not bits[VOCAB:].any(), "bits beyond the vocabulary"
    return bits[:VOCAB]


def walk(name: str, params: StructuredOutputsParams, rng: np.random.Generator, most: int = 150) -> str | None:
    """Text of random allowed tokens up to an end-of-sequence token; None if that does not come in `most` tokens."""
    tokenizer, matcher, tokens = TOKENIZERS[name](), compiler(name).matcher(params), []
    eos = tokenizer.eos_token_id
    while len(tokens) < most:
        choices = np.flatnonzero(allowed(matcher))
        assert choices.size, "something can always follow"
        assert (eos in choices) == matcher.is_accepting
        token = int(eos if eos in choices and rng.random() < 0.5 else rng.choice(choices))
        assert matcher.accept([token]) == 1
        if token == eos:
            assert matcher.is_terminated
            return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        tokens.append(token)
    return None


def is_shape(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "size", "sides"]
        and len(value["name"]) <= 8
        and value["size"] in ("small", "large")
        and len(value["sides"]) <= 3
        and all(isinstance(side, int) and 1 <= side <= 12 for side in value["sides"])
    )


CHOICES = ["yes", "no", "none of these", 'say "no"\n', "größer", "😀"]
CONSTRAINTS: list[tuple[StructuredOutputsParams, Callable[[str], object]]] = [
    (
        StructuredOutputsParams(regex=r"[0-9]{3}-[a-z]+(x|é)?"),
        lambda text: re.fullmatch(r"[0-9]{3}-[a-z]+(x|é)?", text),
    ),
    (StructuredOutputsParams(choice=CHOICES), lambda text: text in CHOICES),
    (
        StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        lambda text: is_shape(text) and "\n" not in text,
    ),
    (StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?"), lambda text: is_shape(text) and "  " not in text),
    (StructuredOutputsParams(grammar='start: "a" list\nlist: "," "b" | "," list'), lambda t: re.fullmatch("a,+b", t)),
    (StructuredOutputsParams(grammar='root ::= "a" tail\ntail ::= "b" | "," tail'), lambda t: re.fullmatch("a,*b", t)),
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("params", "holds"), CONSTRAINTS, ids=lambda value: getattr(value, "kind", ""))
def test_random_walks_follow_the_constraint(name: str, params: StructuredOutputsParams, holds: Any) -> None:
    rng = np.random.default_rng(0)
    texts = [walk(name, params, rng) for _ in range(30)]
    finished = [text for text in texts if text is not None]
    assert len(finished) >= 10
    for text in finished:
        assert holds(text), text
    assert len(set(finished)) > 3


def test_the_mask_is_what_continues_a_choice() -> None:
    """Byte for byte: a token may come iff the text with it begins one of the choices.

    Where only one text can follow, the library may narrow the mask to that text's usual tokens.
    """
    tokenizer, texts = byte_level_tokenizer(), ["the sea", "the stars", "these", "größe"]
    spelled = {
        index: bytes(BYTE_OF_CHARACTER[character] for character in token)
        for token, index in tokenizer.get_vocab().items()
        if index not in tokenizer.added_tokens_decoder
    }
    rng = np.random.default_rng(1)
    for _ in range(40):
        matcher, so_far = compiler().matcher(StructuredOutputsParams(choice=texts)), b""
        while not matcher.is_terminated:
            expected = np.zeros(VOCAB, bool)
            for index, characters in spelled.items():
                expected[index] = any(text.encode().startswith(so_far + characters) for text in texts)
            expected[tokenizer.eos_token_id] = so_far.decode(errors="replace") in texts
            got = allowed(matcher)
            assert got.any()
            assert not got[~expected].any()
            following = {spelled.get(int(index), b"")[:1] for index in np.flatnonzero(expected)}
            if len(following) > 1:
                np.testing.assert_array_equal(got, expected)
            token = int(rng.choice([index for index in spelled if expected[index]]))
            assert matcher.accept([token]) == 1
            so_far += spelled[token]
        assert so_far.decode() in texts


@pytest.mark.parametrize(("so_far", "temperature"), [("", 1.0), ("the s", 1.4)], ids=["begin", "within"])
def test_draws_under_a_mask_follow_the_exact_distribution(so_far: str, temperature: float) -> None:
    """The model's distribution over what the grammar allows, and nothing else: 100,000 draws, chi-square."""
    tokenizer, draws = byte_level_tokenizer(), 100_000
    matcher = compiler().matcher(StructuredOutputsParams(regex="(the s|[a-f]|[0-9]{2}){1,3}(ea|tars|mall|e)?"))
    ids = tokenizer.encode(so_far)
    assert matcher.accept(ids) == len(ids)
    mask = np.empty(-(-VOCAB // 32), np.uint32)
    matcher.fill(mask)
    logits = np.random.default_rng(9).normal(0, 1, VOCAB).astype(np.float32)
    of_all = NEUTRAL | {"temperature": temperature}
    expected = brute_force(np.where(allowed(matcher), logits, -np.inf), **of_all)
    assert (expected > 0).sum() > 5
    parameters = inputs(draws, position=len(ids), seed=np.arange(draws), temperature=temperature)
    parameters = parameters._replace(mask=jnp.tile(jnp.asarray(mask), (draws, 1)))
    assert_follows(drawn(np.tile(logits, (draws, 1)), parameters, SamplerVariant(mask=True)), expected)


def test_what_is_taken_back_never_happened() -> None:
    tokenizer, rng = byte_level_tokenizer(), np.random.default_rng(2)
    params = StructuredOutputsParams(regex=r"([a-c]|[0-9]{2})+")
    matcher, masks = compiler().matcher(params), []
    for _ in range(60):
        masks = masks[: matcher.num_accepted]
        masks.append(allowed(matcher))
        token = int(rng.choice(np.flatnonzero(masks[-1])))
        assert matcher.accept([token]) == 1
        if rng.random() < 0.4 or token == tokenizer.eos_token_id:
            back = int(rng.integers(1, matcher.num_accepted + 1))
            matcher.rollback(back)
            np.testing.assert_array_equal(allowed(matcher), masks[matcher.num_accepted])
    matcher.rollback(matcher.num_accepted)
    np.testing.assert_array_equal(allowed(matcher), masks[0])
    with pytest.raises(ValueError, match="count=1 tokens cannot be taken back: 0 were accepted"):
        matcher.rollback(1)


def test_tokens_that_do_not_fit_change_nothing() -> None:
    tokenizer = byte_level_tokenizer()
    matcher = compiler().matcher(StructuredOutputsParams(regex="[0-9]+"))
    eos, before = tokenizer.eos_token_id, allowed(matcher)
    assert matcher.accept([eos]) == 0
    assert matcher.accept(tokenizer.encode("x")) == 0
    np.testing.assert_array_equal(allowed(matcher), before)
    assert matcher.accept([*tokenizer.encode("1"), *tokenizer.encode("x"), *tokenizer.encode("2")]) == 1
    assert matcher.num_accepted == 1
    assert matcher.accept([eos, eos]) == 2
    assert matcher.accept(tokenizer.encode("1")) == 0
    assert np.flatnonzero(allowed(matcher)).tolist() == [eos]


def test_every_end_of_sequence_token_ends_a_text() -> None:
    tokenizer = byte_level_tokenizer()
    several = GrammarCompiler(tokenizer, VOCAB, {0, tokenizer.eos_token_id})
    for eos in (0, tokenizer.eos_token_id):
        matcher = several.matcher(StructuredOutputsParams(choice=["yes"]))
        assert matcher.accept(tokenizer.encode("yes")) == len(tokenizer.encode("yes"))
        assert np.flatnonzero(allowed(matcher)).tolist() == sorted(several.eos_token_ids)
        assert matcher.accept([eos]) == 1
        assert np.flatnonzero(allowed(matcher)).tolist() == sorted(several.eos_token_ids)


def test_many_rows_are_filled_as_one_by_one() -> None:
    tokenizer, params = byte_level_tokenizer(), StructuredOutputsParams(regex="([0-9]+x)*")
    matchers = {}
    for row, text in ((0, ""), (2, "12"), (3, "1x"), (5, "3x")):
        matchers[row] = compiler().matcher(params)
        assert matchers[row].accept(tokenizer.encode(text)) == len(tokenizer.encode(text))
    matchers[5].accept([tokenizer.eos_token_id])
    masks = np.full((6, -(-VOCAB // 32)), 7, np.uint32)
    assert compiler().fill(masks, matchers) == {}
    for row in range(6):
        expected = np.full_like(masks[row], 7)
        if row in matchers:
            matchers[row].fill(expected)
        np.testing.assert_array_equal(masks[row], expected)
    with pytest.raises(ValueError, match="contiguous rows of 13 uint32"):
        compiler().fill(masks[:, :-1], matchers)


def test_a_state_that_the_library_gives_up_harms_its_own_row_only() -> None:
    matchers = {row: compiler().matcher(StructuredOutputsParams(regex="[0-9]+")) for row in (0, 1)}
    matchers[1].state.consume_token(byte_level_tokenizer().encode("x")[0])  # behind the matcher's back: an error stays
    masks = np.zeros((2, -(-VOCAB // 32)), np.uint32)
    problems = compiler().fill(masks, matchers)
    assert list(problems) == [1]
    assert "doesn't satisfy the grammar" in problems[1]
    assert masks[0].any()
    for use in (lambda: matchers[1].fill(masks[1]), lambda: matchers[1].accept(byte_level_tokenizer().encode("1"))):
        with pytest.raises(RuntimeError, match="cannot be followed any further"):
            use()


def test_requests_share_a_grammar_but_not_its_state() -> None:
    own = GrammarCompiler(byte_level_tokenizer(), VOCAB, {0})
    params = StructuredOutputsParams(regex="[0-9]+")
    first = own.matcher(params)
    first.accept(byte_level_tokenizer().encode("1"))
    second = own.matcher(StructuredOutputsParams(regex="[0-9]+"))
    assert (first.num_accepted, second.num_accepted) == (1, 0)
    assert first.is_accepting
    assert not second.is_accepting
    assert len(own._prototypes) == 1
    for index in range(MAX_CACHED + 3):
        own.matcher(StructuredOutputsParams(choice=[f"a{index}"]))
    assert len(own._prototypes) == MAX_CACHED


def test_properties_that_the_schema_does_not_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    tokenizer = byte_level_tokenizer()
    for closed, text in ((False, '{"b":'), (True, '{"b":'), (False, '{"a":{"b":'), (True, '{"a":{"b":')):
        matcher = compiler().matcher(StructuredOutputsParams(json=schema, disable_additional_properties=closed))
        tokens = tokenizer.encode(text)
        assert (matcher.accept(tokens) == len(tokens)) != closed


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (StructuredOutputsParams(json={"type": "nonsense"}), "json cannot be compiled: Invalid type: nonsense"),
        (
            StructuredOutputsParams(json={"type": "array", "uniqueItems": True}),
            "json cannot be compiled: Unimplemented",
        ),
        (StructuredOutputsParams(regex="(["), "regex cannot be compiled: .*unclosed"),
        (StructuredOutputsParams(regex="(?=a)b"), "regex cannot be compiled: .*look-around"),
        (StructuredOutputsParams(grammar="start: missing"), "grammar cannot be compiled: .*unknown name"),
        (StructuredOutputsParams(grammar="root ::= missing"), "grammar cannot be compiled: .*missing"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_explained(params: StructuredOutputsParams, message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)structured_outputs\.{message}"):
        compiler().matcher(params)


def test_wrong_masks_and_tokenizers_are_refused() -> None:
    with pytest.raises(ValueError, match="row of 13 uint32"):
        compiler().matcher(StructuredOutputsParams(json_object=True)).fill(np.zeros(12, np.uint32))
    with pytest.raises(ValueError, match="end-of-sequence"):
        GrammarCompiler(byte_level_tokenizer(), VOCAB, ())
    with pytest.raises(ValueError, match="cannot be used with this tokenizer"):
        GrammarCompiler(object(), VOCAB, {0})
