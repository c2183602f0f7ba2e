"""Processes that measure: what they say, and what is said of those that do not answer."""

import pytest

from jaxllm.bench.child import Child


def test_answers_are_its_lines_of_json() -> None:
    with Child("platform", []) as child, pytest.raises(ValueError, match=r"platform has ended \(exit code 0\)"):
        child.answer(30)  # it prints a line that is no JSON
    with Child("code", ["-q"], {"PYTHON_COLORS": "0"}) as child:
        assert child.ask("import sys; sys.ps1 = sys.ps2 = ''; print('\\n{\"a\": 1}', flush=True)", 30) == {"a": 1}


def test_one_that_takes_too_long_is_ended() -> None:
    with Child("json.tool", []) as child, pytest.raises(ValueError, match=r"json.tool took more than 0.3 s"):
        child.answer(0.3)


def test_one_that_fails_is_quoted() -> None:
    with Child("json.tool", ["/nonexistent.json"]) as child, pytest.raises(ValueError, match="No such file"):
        child.answer(30)
