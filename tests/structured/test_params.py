"""Constraints are checked on construction; the message names field, value and range."""

from typing import Any

import pytest

from jaxllm.structured.params import StructuredOutputsParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"regex": ""}, "regex must be a text of at least one character"),
        ({"choice": []}, "choice must be texts of at least one character"),
        ({"choice": ["a", ""]}, "choice must be texts of at least one character"),
        ({"json": "{"}, "json must be a JSON schema; it is no JSON"),
        ({"json_object": False}, "json_object must be True, or left out; got False"),
    ],
)
def test_out_of_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": 3}, "regex must be a text, not 3"),
        ({"grammar": b"a"}, "grammar must be a text"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"choice": [1]}, "choice must be a list of texts"),
        ({"json": [1]}, "json must be a JSON schema, an object"),
        ({"json": {"enum": {1}}}, "cannot be written as JSON"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
    ],
)
def test_wrong_type(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        StructuredOutputsParams(**fields)


def test_equal_constraints_are_equal_whatever_their_form() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
    text = '{"type":"object",  "properties":{"b":{"type":"string"},"a":{"type":"string"}}}'
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(json=text)
    assert hash(StructuredOutputsParams(json=schema)) == hash(StructuredOutputsParams(json=text))
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    assert StructuredOutputsParams(json=schema).kind == "json"
