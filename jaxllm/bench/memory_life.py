"""The life of an engine under the driver's eye: start, the sampler's worst first call, a load of random requests."""

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxllm.bench.random_model import random_runner_spec, random_weights
from jaxllm.checkpoint.resolve import resolve
from jaxllm.engine.engine import Engine
from jaxllm.engine.runner import Runner
from jaxllm.memory.device import read_device, read_settled
from jaxllm.memory.report import MemoryReport
from jaxllm.memory.views import DeviceView
from jaxllm.sampling_params import SamplingParams

Result = dict[str, Any]
Say = Callable[[Result], None]


def life(
    say: Say,
    shape: str,
    requests: int = 0,
    prompts: Sequence[int] = (1, 900),
    outputs: Sequence[int] = (1, 48),
    seconds: float = 60,
    burst: bool = True,
    jax_first: bool = False,
    on_device: bool = True,
    folder: str | None = None,
    **options: Any,
) -> Result:
    """An engine from start to the end of a load, watched by the driver.

    Args:
        say: takes what is known so far, and events.
        shape: of the model.
        requests: random ones, queued at once.
        prompts: shortest and longest.
        outputs: shortest and longest.
        seconds: most for the load; what is not done then is aborted.
        burst: whether the first call is a row for every seat, each with top_p and 20 log probabilities.
        jax_first: use JAX before the engine is made.
        on_device: make the weights where they lie; else from a checkpoint in host memory.
        folder: of a checkpoint to load instead.
        options: of the engine.
    """
    begun = time.perf_counter()
    if jax_first:
        jax.block_until_ready(jax.device_put(0))
    spec, checkpoint = random_runner_spec(shape, resolve(folder) if folder else None, **options)
    device = jax.devices()[0]
    jax.block_until_ready(jax.device_put(0, device))  # the pool is taken with the first array
    idle = read_settled(device)
    made = on_device and folder is None
    with Watch(device) as watch:
        runner = _Watched(spec, random_weights(spec) if made else checkpoint, say)
        engine = Engine(runner, None, frozenset(), 0)
        result = _of_report(runner.memory_report) | {
            "startup": runner.memory_report.startup_seconds,
            "process_startup": time.perf_counter() - begun,
            "phases": runner.startup["phases"],
            "made": {name: runner.startup[name]["programs"] for name in ("lowered", "compiled", "kept")},
            "num_programs": len(list(runner.programs)),
            "kv_bytes_match": runner.kv.nbytes == runner.memory_report.kv_array_bytes,
        }
        result |= _views("idle", idle) | _views("ready", read_settled(device))
        say(result | watch.most)
        if burst:
            _burst(engine)
            say(result | watch.most | {"burst": runner.spec.config.max_rows})
            result["burst"] = runner.spec.config.max_rows
        if requests:
            result |= _serve(engine, device, requests, prompts, outputs, seconds)
    return result | watch.most | _views("after", read_settled(device)) | _of_allocator(device, runner.memory_report)


class _Watched(Runner):
    """Says when the weights are loaded and the measurement begins, and waits there."""

    def __init__(self, spec: Any, source: Any, say: Say):
        self._say = say
        super().__init__(spec, source)

    def _size(self, *arguments: Any) -> MemoryReport:
        self._say({"event": "measuring"})
        return super()._size(*arguments)


def _of_report(report: MemoryReport) -> Result:
    budget = report.budget
    return {
        "utilization": budget.utilization,
        "limit": budget.limit,
        "total": budget.total,
        "source": report.source,
        "other": budget.non_framework,
        "weights": budget.weights,
        "reserve": budget.activations,
        "headroom": budget.headroom,
        "caps": {cap.name: cap.bytes for cap in budget.caps},
        "blocks": report.num_kvcache_blocks,
        "fitting": report.fitting_blocks,
        "block_size": report.block_size,
        "block_bytes": report.block_bytes,
        "bound_by": report.bound_by,
        "measure_seconds": report.measure_seconds,
        "measured_programs_seconds": report.measured_programs_seconds,
        "other_programs": report.other_programs,
        "measuring_cost": report.measuring_cost,
        "programs": [dataclasses.asdict(program) for program in report.programs],
        "predicted": report.predicted_activations,
        "notes": list(report.notes),
    }


def _of_allocator(device: jax.Device, report: MemoryReport) -> Result:
    """How far the allocator's peak stayed below what the report adds up to; None where there is no allocator."""
    stats = device.memory_stats()
    reported = report.budget.weights + report.kv_array_bytes + report.budget.activations
    return {"peak_below_report": None if stats is None else reported - stats["peak_bytes_in_use"]}


def engine_bytes(view: DeviceView) -> int:
    """What this process holds of the card, as the driver lists it; or else all that no other process is listed with."""
    driver = view.driver
    return driver.used - driver.foreign if driver.own is None else driver.own


def _views(when: str, view: DeviceView) -> Result:
    """`card`: all that other processes are not listed with; so that it can be compared with the limit."""
    return {
        f"used_{when}": engine_bytes(view),
        f"card_{when}": view.driver.used - view.driver.foreign,
        f"outside_{when}": view.non_framework,
        f"neighbours_{when}": len(view.driver.neighbours),
    }


class Watch:
    """The most that the engine took of the card, read by a thread ten times a second."""

    def __init__(self, device: jax.Device):
        self._device = device
        self.most = {"used_most": 0}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(0.1):
            self.most = {"used_most": max(self.most["used_most"], engine_bytes(read_device(self._device)))}

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def _burst(engine: Engine) -> None:
    """As the very first call: as many one-token prompts as there are rows, each with top_p and 20 log probabilities."""
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=20, max_tokens=3, ignore_eos=True)
    for index in range(engine.runner.spec.config.max_rows):
        engine.add_request(f"burst{index}", [index % 7 + 1], params)
    while engine.has_unfinished_requests():
        engine.step()


def _serve(
    engine: Engine, device: jax.Device, requests: int, prompts: Sequence[int], outputs: Sequence[int], seconds: float
) -> Result:
    """Random requests, all queued at once, until all are done; bytes in use and free blocks along the way."""
    rng = random.Random(0)
    vocabulary = engine.runner.spec.model.vocab_size
    shared = [rng.randrange(vocabulary) for _ in range(prompts[1])]
    names = []
    for index in range(requests):
        length = rng.randint(*prompts)
        # Some begin alike, so that the prefix cache is in play.
        prompt = shared[:length] if rng.random() < 0.15 else [rng.randrange(vocabulary) for _ in range(length)]
        made = engine.prepare_each(str(index), prompt, _params(rng, vocabulary, outputs, index >= requests // 3))
        for request in made:
            engine.submit(request)
            names.append(request.request_id)
    start, least_free = time.perf_counter(), engine.runner.num_blocks
    in_use: list[int] = []
    finished = engine.stats.scheduler.finished
    while engine.has_unfinished_requests() and time.perf_counter() - start < seconds:
        engine.step()
        least_free = min(least_free, engine.stats.scheduler.free_blocks)
        stats = device.memory_stats()
        if stats:
            in_use.append(stats["bytes_in_use"])
    statistics = engine.stats.scheduler
    for name in names:
        engine.abort_request(name)
    return {
        "asked": len(names),
        "finished": statistics.finished - finished,
        "serve_seconds": round(time.perf_counter() - start, 1),
        **_flatness(in_use),
        "steps": statistics.steps,
        "preemptions": statistics.preemptions,
        "least_free_blocks": least_free,
        "compiled_while_serving": engine.stats.compilations_after_ready,
    }


def _flatness(in_use: Sequence[int]) -> Result:
    """How much bytes in use vary from step to step, with the results under way, and grow from one half to the other."""
    half = len(in_use) // 2
    if not half:
        return {"in_use_spread": None, "in_use_growth": None}
    return {"in_use_spread": max(in_use) - min(in_use), "in_use_growth": max(in_use[half:]) - max(in_use[:half])}


def _params(rng: random.Random, vocabulary: int, outputs: Sequence[int], everything: bool) -> SamplingParams:
    """Of a random request; `everything`: also what the sampler has a program of its own for."""
    most = rng.randint(*outputs)
    extras: dict[str, Any] = {}
    if everything:
        ids = [rng.randrange(vocabulary) for _ in range(40)]
        extras = {
            "n": rng.choice([1] * 19 + [2]),
            "presence_penalty": rng.choice([0.0, 0.5]),
            "frequency_penalty": rng.choice([0.0, 0.5]),
            "repetition_penalty": rng.choice([1.0, 1.1]),
            "logit_bias": dict.fromkeys(ids[:10], 2.0) if rng.random() < 0.2 else {},
            "allowed_token_ids": ids if rng.random() < 0.1 else None,
            "min_tokens": most // 2,
            "stop_token_ids": ids[:3],
            "logprobs": rng.choice([None] * 9 + [20]),
            "prompt_logprobs": rng.choice([None] * 49 + [5]),
        }
    return SamplingParams(
        temperature=rng.choice([0.7, 1.3] if extras.get("n", 1) > 1 else [0.0, 0.7, 1.3]),
        top_k=rng.choice([-1, 20, 100]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.choice([None, 7]),
        max_tokens=most,
        ignore_eos=True,
        **extras,
    )
