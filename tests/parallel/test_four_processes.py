"""Four real processes on this machine, CPU devices, gloo: one engine over all, as under Slurm, until one is killed."""

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel.serving import GREEDY, OPTIONS, PROMPTS

from jaxllm import LLM, SamplingParams
from jaxllm.convert import convert

ROOT = Path(__file__).parents[2]

LOWEST_PORT = 65535 - 2**12 + 1


def slurm(index: int, count: int, port: int) -> dict[str, str]:
    """What `srun` tells a process. JAX derives the port from the number of the job."""
    job = {"SLURM_JOB_ID": str(port - LOWEST_PORT), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(count)}
    return job | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}


def free_port() -> int:
    """One of those that JAX takes under Slurm."""
    for port in random.sample(range(LOWEST_PORT, 65535), 100):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("localhost", port))
            return port
    raise AssertionError("no port is free")


@contextmanager
def processes(count: int, folder: Path, results: Path) -> Iterator[list[subprocess.Popen[str]]]:
    port = free_port()
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    started = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "parallel" / "serving.py"), folder, results],
            env=environment | slurm(index, count, port),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(count)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def assert_all_end(survivors: list[subprocess.Popen[str]]) -> None:
    """Within 30 s, in failure, and each says why."""
    start = time.monotonic()
    for process in survivors:
        _, errors = process.communicate(timeout=30)
        assert process.returncode not in (0, None), errors
        assert "Terminating process because the JAX distributed service detected fatal errors" in errors, errors
    assert time.monotonic() - start < 30


def test_four_processes_serve_one_model(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Restored from an Orbax folder, of which each reads its part; requests of process 0; until one is killed."""
    folder = tiny(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    llm = LLM(str(folder), **OPTIONS | {"enable_prefix_caching": False, "max_num_seqs": 1})
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SamplingParams(**GREEDY))]
    orbax = convert(str(folder), tmp_path / "orbax").target
    with processes(4, orbax, tmp_path / "results") as running:
        files = [tmp_path / f"results.{index}" for index in range(4)]
        end = time.monotonic() + 500
        while not all(file.exists() for file in files):
            ended = [process for process in running if process.poll() is not None]
            assert not ended and time.monotonic() < end, [process.communicate()[1] for process in ended]
            time.sleep(0.2)
        for result in [json.loads(file.read_text()) for file in files]:
            assert result["tokens"] == result["after wake"] == expected
            assert result["preemptions"] > 0 and result["prefix hits"] > 0
            assert result["smallest"] == 97 and result["received"] == 14_000
            # One device of four: a quarter of what is divided, and the norms, which are everywhere.
            assert result["local bytes"] < 0.3 * result["bytes"]
        running[2].send_signal(signal.SIGKILL)  # while all generate
        assert_all_end([process for process in running if process is not running[2]])
