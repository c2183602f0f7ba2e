"""`python -m jaxllm.generate`: prompts from everywhere, text and JSON, exit codes."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.config import EngineConfig
from jaxllm.generate import main
from jaxllm.outputs import StreamDelta

OPTIONS = [
    "--max-tokens",
    "5",
    "--ignore-eos",
    "--max-model-len",
    "64",
    "--num-kvcache-blocks",
    "8",
    "--dtype",
    "float32",
]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> str:
    return str(tiny())


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "jaxllm.generate", *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_one_prompt_streams_and_ends_with_a_summary(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", model, *OPTIONS, "The quick"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and len(out) > 1
    assert err.splitlines()[-1].startswith("[5 tokens in ") and "tokens/s, first after" in err


def test_text_is_printed_as_it_is_made(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, stream = "", LLM.stream

    def watched(*arguments: Any, **options: Any) -> Iterator[StreamDelta]:
        nonlocal made
        for delta in stream(*arguments, **options):
            yield delta
            made += capsys.readouterr().out
            assert made.endswith(delta.text)
            pieces.append(delta.text)

    pieces: list[str] = []
    monkeypatch.setattr(LLM, "stream", watched)
    assert main(["--model", model, *OPTIONS, "The quick"]) == 0
    assert made == "".join(pieces) and len(pieces) > 3


def test_several_prompts_as_json(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = tmp_path / "steps.jsonl"
    assert main(["--model", model, *OPTIONS, "--json", "--stats-file", str(steps), "one", "two", "three"]) == 0
    assert json.loads(steps.read_text().splitlines()[-1])["output_tokens"] == 15
    result = json.loads(capsys.readouterr().out)
    assert [output["prompt"] for output in result["outputs"]] == ["one", "two", "three"]
    assert result["tokens"] == 15 and result["model"] == model
    assert result["tokens_per_s"] > 0 and result["time_to_first_token"] > 0
    assert all(len(output["outputs"][0]["token_ids"]) == 5 for output in result["outputs"])


def test_json_and_text_agree(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", model, *OPTIONS, "--json", "one"])
    text = json.loads(capsys.readouterr().out)["outputs"][0]["outputs"][0]["text"]
    main(["--model", model, *OPTIONS, "one"])
    assert capsys.readouterr().out == text + "\n"


def test_prompts_from_a_file_and_standard_input(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first line\n\nsecond line\n", encoding="utf-8")

    def prompts(*arguments: str) -> list[str]:
        assert main(["--model", model, *OPTIONS, "--json", *arguments]) == 0
        return [output["prompt"] for output in json.loads(capsys.readouterr().out)["outputs"]]

    assert prompts("--file", str(file)) == ["first line\n\nsecond line"]
    assert prompts("--file", str(file), "--lines") == ["first line", "second line"]
    # As under the C locale, where Python would make surrogates of what is not ASCII.
    pipe = io.TextIOWrapper(io.BytesIO("from a pïpe\r\n".encode()), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", pipe)
    assert prompts() == ["from a pïpe"]


def test_standard_input_that_is_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", pipe)
    with pytest.raises(SystemExit, match="2"):
        main(["--model", "/nowhere"])
    assert "standard input is not UTF-8 text (invalid start byte at byte 1)" in capsys.readouterr().err


def test_chat_uses_the_template(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prompt_tokens(*arguments: str) -> int:
        assert main(["--model", model, *OPTIONS, "--json", *arguments, "hello"]) == 0
        return json.loads(capsys.readouterr().out)["prompt_tokens"]

    plain, chat = prompt_tokens(), prompt_tokens("--chat")
    assert plain < chat < prompt_tokens("--chat", "--no-thinking")
    assert chat < prompt_tokens("--chat", "--system", "Be short.")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert prompt_tokens("--chat", "--chat-template", str(template)) == plain


def test_a_prompt_too_long_is_reported_and_the_others_are_served(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", model, *OPTIONS, "fine", "x" * 400]) == 1
    out, err = capsys.readouterr()
    assert "error: prompt 1:" in err and "max_model_len" in err
    assert out.startswith("=== fine\n")
    assert main(["--model", model, *OPTIONS, "x" * 400]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("error: prompt 0: the prompt has ") and "tokens/s" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1", "x"], "temperature must be"),
        (["--model", "/nowhere/at-all", "x"], "/nowhere/at-all"),
        (["--file", "/nowhere/prompt.txt"], "--file /nowhere/prompt.txt cannot be read: No such file"),
        (["--stats-file", "/nowhere/steps.jsonl", "x"], "--stats-file /nowhere/steps.jsonl cannot be written: No such"),
        (["x", "--memory-report", "/nowhere/memory.svg"], "--memory-report /nowhere/memory.svg cannot be written"),
        (["--max-num-seqs", "0", "x"], "max_num_seqs must be at least 1; got 0"),
        (["a", "--file", "b"], "not both"),
        (["--system", "Be short.", "x"], "add --chat"),
        (["--no-thinking", "x"], "add --chat"),
        (["--chat-template", "y", "x"], "add --chat"),
        (["--chat", "--chat-template", "/nowhere/t", "x"], "--chat-template /nowhere/t cannot be read: No such file"),
        (["--lines", "x"], "--lines is for --file"),
        (["--file", sys.executable], "is not UTF-8 text"),
    ],
)
def test_wrong_usage_exits_with_2(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if "--model" in arguments else ["--model", model, *arguments]
    with pytest.raises(SystemExit) as exit_:
        main(given)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_help_tells_the_engines_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    config = EngineConfig()
    assert f"per KV-cache block, a multiple of 16 up to 256 (default {config.kvcache_block_size})" in told
    assert f"share of the device's memory to use (default {config.gpu_memory_utilization})" in told
    assert "requests of a replica in one step (default one for each prompt, 512 at most)" in told  # the command's own


def test_help_and_version_do_not_import_jax() -> None:
    script = "import sys, jaxllm.generate as g\ntry: g.main(['--help'])\nfinally: print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "exit codes:" in done.stdout and "--max-num-batched-tokens" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
    assert run("--version").stdout.startswith("jaxllm 0.")


def test_the_demo_model_answers() -> None:
    """The README's first command."""
    done = run("--chat", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "demo model" in done.stderr
