"""Several real processes on this machine, CPU devices, gloo: one model over all, and what happens when one dies."""

import json
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from parallel.every_field import OPTIONS, assert_equal, generated, requests
from parallel.launch import Process, assert_all_end, launched

from jaxllm import LLM
from jaxllm.checkpoint import load_parameters, resolve
from jaxllm.convert import convert
from jaxllm.models.params import parameter_specs
from jaxllm.models.weights import Weights
from jaxllm.parallel import distributed
from jaxllm.parallel.mesh import make_mesh


def processes(task: str, count: int, folder: Path, results: Path) -> AbstractContextManager[list[Process]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return launched("processes.py", [(task, port, count, index, folder, results) for index in range(count)])


def test_processes_run_one_model(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Restored from an Orbax folder, of which each reads its part."""
    folder = tiny(num_attention_heads=4, num_key_value_heads=2)
    checkpoint = resolve(str(folder))
    config = checkpoint.config
    arrays = load_parameters(checkpoint, parameter_specs(config), make_mesh(1), "float32")
    model = Weights.of(config, "float32", arrays).model()
    tokens = jnp.asarray([[5, 17, 123, 9, 256, 77, 31, 2]])
    expected = jax.jit(lambda tokens: model(tokens).argmax(-1))(tokens).tolist()
    folder = convert(str(folder), tmp_path / "orbax").target
    with processes("together", 2, folder, tmp_path / "results") as running:
        for process in running:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    results = [json.loads((tmp_path / f"results.{index}").read_text()) for index in range(2)]
    for result in results:
        assert result["chosen"] == expected and result["smallest"] == 99 and result["received"] == 14_000
        # Two of four devices: half of what is divided, and the norms, which are everywhere, twice.
        assert result["local bytes"] < 0.6 * result["bytes"]


def test_processes_serve_every_field_of_a_request(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Two devices, one a process: grammars, penalties, masks, log probabilities, as alone on one device."""
    prompts, params = requests()
    with processes("serve", 2, tiny(), tmp_path / "results") as running:
        alone = LLM(
            str(tiny()), **OPTIONS | {"num_kvcache_blocks": 64}
        )  # an engine of before may be compiled otherwise
        want = [generated(alone, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
        for process in running:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
    for index in range(2):
        result = json.loads((tmp_path / f"results.{index}").read_text())
        assert result["preemptions"] > 0
        assert_equal(result["outputs"], want)
    for one, asked in zip(want, params, strict=True):
        assert (one["logprobs"][0] is not None) == (asked.logprobs is not None)
        assert (one["prompt_logprobs"] is not None) == (asked.prompt_logprobs is not None)
    texts = [text for one in want[6:] for _, text, _ in one["outputs"]]
    assert texts[:1] in ([], ["The sea"], ["Paris"]) and all(set(text) <= set("abc") for text in texts[1:])


def test_the_end_of_process_0_ends_the_others(tmp_path: Path) -> None:
    """That of another one: `test_four_processes`."""
    with processes("die", 2, tmp_path, tmp_path / "none") as running:
        for process in running:
            assert process.stdout is not None
            while "started" not in (line := process.stdout.readline()):
                assert line, process.communicate()[1]
        running[0].send_signal(signal.SIGKILL)
        assert_all_end(running[1:])


def test_one_process_needs_no_others() -> None:
    value = {"a": [1, 2]}
    assert distributed.broadcast(value) is value and distributed.smallest(7) == 7


def test_arguments_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="num_processes, process_id missing: give coordinator, num_processes and"):
        distributed.start("localhost:1234")
    with pytest.raises(ValueError, match=r"process_id=2 must be from 0 to num_processes - 1 = 1"):
        distributed.start("localhost:1234", 2, 2)

    given: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: given.append(options))
    distributed.start()
    distributed.start("localhost:1234", 2, 0)  # no cluster manager chooses the devices then
    assert [options["cluster_detection_method"] for options in given] == [None, "deactivate"]

    def no_cluster(*_: Any, **__: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", no_cluster)
    with pytest.raises(ValueError, match=r"are unknown \(coordinator_address should.*give coordinator='host:port'"):
        distributed.start()
