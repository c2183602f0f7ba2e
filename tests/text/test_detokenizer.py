"""Streamed text equals the full decode, for every script, whatever the tokens are, at linear cost."""

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_level_tokenizer, sentencepiece_tokenizer

from jaxllm.text import Detokenizer
from jaxllm.text.detokenizer import BYTE_OF_CHARACTER

TEXTS = [
    "The capital of France is Paris.",
    " leading,  double   spaces and trailing ",
    "line\n\n\tindented\r\n",
    "it's . , ! ? 're n't  ' m",  # what clean_up_tokenization_spaces would change
    "äöü ß é ñ ø",
    "Русский текст, ελληνικά, עברית, العربية",
    "हिन्दी தமிழ் ไทย አማርኛ မြန်မာ ខ្មែរ",
    "中文，日本語、한국어 漢字",
    "😀 👩‍👩‍👧‍👦 🇫🇷 👍🏽 ❤️",
    "𝒳 𐍈 𒀀 e\u0301 \u200d \ufeff \ufffd",
    "▁ Ġ Ċ <0xE4> <think> </think>",
    "\x00\x01\x7f",
    "",
]
TOKENIZERS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def reference(tokenizer: Any, ids: list[int], skip: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def streamed(tokenizer: Any, ids: list[int], skip: bool = True, size: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.add(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("text", TEXTS)
def test_every_script(tokenizer: Any, text: str, size: int) -> None:
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids, size=size)
    assert "".join(pieces) == reference(tokenizer, ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    # Ids beyond the tokenizer too: a padded embedding can produce them, and they decode to nothing.
    ids = st.lists(st.integers(0, len(tokenizer) + 5), max_size=40)

    @settings(max_examples=300, deadline=None)
    @given(ids, st.booleans(), st.integers(1, 5))
    def check(ids: list[int], skip: bool, size: int) -> None:
        assert "".join(streamed(tokenizer, ids, skip, size)) == reference(tokenizer, ids, skip)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_bytes_valid_and_not(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    backend_bytes = st.lists(
        st.one_of(st.binary(max_size=6), st.text(max_size=4).map(lambda text: text.encode("utf-8", "ignore"))),
        max_size=8,
    )

    @settings(max_examples=300, deadline=None)
    @given(backend_bytes)
    def check(parts: list[bytes]) -> None:
        ids = [byte_id(tokenizer, byte) for byte in b"".join(parts)]
        assert "".join(streamed(tokenizer, ids)) == reference(tokenizer, ids)

    check()


@functools.cache
def byte_id(tokenizer: Any, byte: int) -> int:
    """The token of one byte, in either kind of tokenizer."""
    name = f"<0x{byte:02X}>" if tokenizer.unk_token == "<unk>" else CHARACTER_OF_BYTE[byte]
    return tokenizer.convert_tokens_to_ids(name)


def test_half_a_character_is_held_back(tokenizer: Any) -> None:
    ids = [byte_id(tokenizer, byte) for byte in "😀".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([index]) for index in ids[:3]] == ["", "", ""]
    assert detokenizer.add(ids[3:]) + detokenizer.finish() == "😀"


def test_byte_level_text_comes_at_once() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("a 😀b")
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.add([index]) for index in ids) == "a 😀b"  # nothing left for finish
    assert detokenizer.finish() == ""


def test_special_tokens(tokenizer: Any) -> None:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = [bos, *tokenizer.encode(" the sea", add_special_tokens=False), eos]
    for skip in (True, False):
        assert "".join(streamed(tokenizer, ids, skip)) == reference(tokenizer, ids, skip)


def test_thinking_tokens_are_shown() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("<think>the sea</think>the stars<|im_end|>")
    assert "".join(streamed(tokenizer, ids)) == "<think>the sea</think>the stars"


def test_cost_is_linear(tokenizer: Any) -> None:
    """Tokens decoded in all, counted, for 20,000 tokens that never make a valid character and for plain text."""
    calls = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], **options: Any) -> str:
            calls.append(len(ids))
            return tokenizer.decode(ids, **options)

    plain = tokenizer.encode("the small stories of Paris. " * 1000)
    streamed(Counting(), plain)
    streamed(Counting(), [byte_id(tokenizer, 0xFF)] * 20_000)
    assert sum(calls) <= 4 * (len(plain) + 20_000)
