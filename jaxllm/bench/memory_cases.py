"""What `python -m jaxllm.bench memory` measures, in the order in which it does."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from jaxllm.bench.card_jobs import READY, Job, Result, Task
from jaxllm.memory.units import GIB

SHAPE = "qwen3-0.6b"
_WHY = Path(__file__).parents[2] / "examples" / "why_measure.py"
_FEW: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
"""An engine with 14 programs, where a default one has 22; its requests share nothing, and so fill the cache."""
_FULL: dict[str, Any] = {"requests": 550, "prompts": (2600, 3900), "outputs": (8, 48), "seconds": 40}
_LONG: dict[str, Any] = {"requests": 70, "prompts": (18500, 20400), "outputs": (8, 48), "seconds": 45}
"""Loads that need more blocks than there are."""
_SOAK: dict[str, Any] = {"max_num_seqs": 1024, "kvcache_block_size": 256, "gpu_memory_utilization": 0.95}
_SOAKED: dict[str, Any] = {"requests": 1000, "prompts": (1000, 3800), "outputs": (150, 450)}
_BESIDE: dict[str, Any] = {"shape": SHAPE, "enforce_eager": True, "burst": False}
"""A life of which only the number of blocks counts: of those that fit, since a start takes no more than programs of one
before are for."""
NEIGHBOUR, CROWD = 8 * GIB, 40 * GIB

BUDGETS = ("budget .99", "budget .92", "budget .5")
SOAKS = ("soak .95", "soak .95 again")
STARTS = ("8b .9", "8b .9 again")
"""Of a model whose first start finds less memory than the next: XLA compares implementations of its larger products."""
TRANSIENTS = {
    "0.6b 2048/64/16": (10, ("qwen3-0.6b", 2048, 64, 16, True)),
    "0.6b 32768/1024/256": (10, ("qwen3-0.6b", 32768, 1024, 256, True)),
    "8b 2048/512/128": (17, ("qwen3-8b", 2048, 512, 128, False)),
    "8b 16384/256/32": (17, ("qwen3-8b", 16384, 256, 32, True)),
    "14b 8192/64/16": (28, ("qwen3-14b", 8192, 64, 16, False)),
    "14b 32768/512/256": (28, ("qwen3-14b", 32768, 512, 256, False)),
}
"""Tokens, rows and block size of a step; hundredths of the card, which have to hold weights and twice what a program
takes; and whether programs without log probabilities are measured as well."""


def jobs() -> list[Job]:
    """All measurements, the most telling first. Shares are hundredths of the card's memory; 100 is alone on it."""
    made = {
        "budget .99": _life("budget .99", 100, 130, **_FULL, on_device=False, gpu_memory_utilization=0.99),
        "soak .95": _life("soak .95", 100, 190, **_SOAK, **_SOAKED, seconds=90),
        "soak .95 again": _life("soak .95 again", 100, 70, **_SOAK, **_SOAKED | {"requests": 150}, seconds=25),
        **{
            name: Job(name, 100, most, "life", {"shape": "qwen3-8b", "burst": False})
            for name, most in zip(STARTS, (150, 70), strict=True)
        },
        "budget .92": _life(
            "budget .92",
            100,
            110,
            **_LONG,
            **_FEW,
            max_model_len=20480,
            kvcache_block_size=32,
            gpu_memory_utilization=0.92,
        ),
        "budget .5": _life(
            "budget .5",
            50,
            100,
            **_LONG | {"prompts": (9500, 10200)},
            **_FEW,
            max_model_len=10240,
            kvcache_block_size=16,
            gpu_memory_utilization=0.5,
        ),
        "truth": Job("truth", 25, 180, "truth", {"shape": SHAPE, "gpu_memory_utilization": 0.25}),
        "together": Job("together", 56, 120, script=together),
        "files": Job("files", 20, 90, script=files),
        "alone": _life("alone", 10, 60, **_BESIDE, gpu_memory_utilization=0.1),
        "leaves": Job("leaves", 16, 60, script=partial(neighbour, comes=False)),
        "comes": Job("comes", 16, 60, script=partial(neighbour, comes=True)),
        "why": Job("why", 30, 120, script=why),
        "late": _life("late", 100, 50, **_BESIDE, jax_first=True, gpu_memory_utilization=0.9),
        "crowded": Job("crowded", 100, 50, script=crowded),
    }
    for name, (share, (shape, tokens, rows, block, plain)) in TRANSIENTS.items():
        options: dict[str, Any] = {"max_num_batched_tokens": tokens, "max_num_seqs": rows, "kvcache_block_size": block}
        options |= {"shape": shape, "plain": plain, "gpu_memory_utilization": share / 100}
        made[name] = Job(name, share, 120, "transients", options)
    return [made[name] for name in _ORDER]


_ORDER = (
    *("budget .99", *SOAKS, *STARTS, "budget .92"),
    *("budget .5", "14b 32768/512/256", "8b 16384/256/32"),
    *("truth", "files", "alone", "leaves", "comes", "0.6b 2048/64/16", "together", "why", "0.6b 32768/1024/256"),
    *("late", "8b 2048/512/128", "crowded", "14b 8192/64/16"),
)


def _life(name: str, share: int, most: float, **arguments: Any) -> Job:
    return Job(name, share, most, "life", {"shape": SHAPE} | arguments)


def together(seconds: float) -> Result:
    """Two engines, .35 and .20 of the card, started at the same time and then one after the other."""
    end, shares = time.monotonic() + seconds, (0.35, 0.20)
    result: Result = {"shares": shares}
    with ExitStack() as stack:
        both = [stack.enter_context(_beside(share, burst=True)) for share in shares]
        result["together"] = _alongside(both, end)
    result["in turn"] = []
    for share in shares:
        with _beside(share) as task:
            result["in turn"].append(_outcome(task.finish(end - time.monotonic())))
    return result


def _alongside(tasks: list[Task], end: float) -> list[Result]:
    """Let lives begin as soon as the last one could, and run at the same time."""
    for task in tasks:
        task.until(READY, 60)
    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(lambda task: _outcome(task.finish(end - time.monotonic(), waits=True)), tasks))


def _beside(share: float, **changes: Any) -> Task:
    return Task("life", **_BESIDE | {"gpu_memory_utilization": share} | changes)


def _outcome(life: Result) -> Result:
    sizes = ("blocks", "fitting", "bound_by", "used_most", "limit", "headroom", "other", "weights", "reserve")
    kept = (*sizes, "error", "notes")
    return {name: life[name] for name in kept if name in life}


def neighbour(seconds: float, comes: bool) -> Result:
    """An engine at .1, and a neighbour that takes or gives back 8 GiB when its weights are loaded."""
    end = time.monotonic() + seconds
    with Task("hold", size=NEIGHBOUR, late=comes) as other, _beside(0.1) as task:
        other.until("waiting" if comes else "holding", 60)

        def change() -> None:
            if comes:
                other.go()
                other.until("holding", 60)
            else:
                other.go()
                other.finish(30)
                other.__exit__()

        return _outcome(task.finish(end - time.monotonic(), {"measuring": change}))


def crowded(seconds: float) -> Result:
    """An engine that asks for .9 beside a neighbour that holds 40 GiB."""
    with Task("hold", size=CROWD) as other, _beside(0.9) as task:
        other.until("holding", 60)
        return _outcome(task.finish(seconds)) | {"neighbour": other.pid}


def files(seconds: float) -> Result:
    """The same weights in one file and in several, loaded by an engine each."""
    end = time.monotonic() + seconds
    result: Result = {}
    with tempfile.TemporaryDirectory(prefix="jaxllm-memory-") as folder, ExitStack() as stack:
        lives = []
        for name, shard_bytes in (("one file", 1 << 60), ("shards", 1 << 28)):
            path = str(Path(folder) / name.replace(" ", "-"))
            with Task("write", shape=SHAPE, folder=path, shard_bytes=shard_bytes) as task:
                result[name] = task.finish(end - time.monotonic())
            lives.append(stack.enter_context(_beside(0.1, folder=path)))
        for name, outcome in zip(("one file", "shards"), _alongside(lives, end), strict=True):
            result[name] |= outcome
    return result


def why(seconds: float) -> Result:
    """`examples/why_measure.py`, whose trials run side by side."""
    command = [sys.executable, str(_WHY), "--shape", SHAPE, "--gpu-memory-utilization", "0.06", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its trials are processes of their own
            return {"error": f"took more than {seconds:.0f} s"}
    return dict(json.loads(out.splitlines()[-1])) if process.returncode == 0 else {"error": errors.strip()[-800:]}
