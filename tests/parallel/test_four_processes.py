"""Four real processes on this machine, CPU devices, gloo: one engine over all, as under Slurm, until one is killed."""

import json
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from parallel.launch import assert_all_end, launched
from parallel.serving import GREEDY, OPTIONS, PROMPTS

from jaxllm import LLM, SamplingParams
from jaxllm.convert import convert

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


def test_four_processes_serve_one_model(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Restored from an Orbax folder, of which each reads its part; requests of process 0; until one is killed."""
    folder = tiny(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    llm = LLM(str(folder), **OPTIONS | {"enable_prefix_caching": False, "max_num_seqs": 1})
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SamplingParams(**GREEDY))]
    orbax = convert(str(folder), tmp_path / "orbax").target
    port = free_port()
    variables = [slurm(index, 4, port) for index in range(4)]
    with launched("serving.py", [(orbax, tmp_path / "results")] * 4, variables) as running:
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
