"""The measurements of `jaxllm.bench.memory`, one function each, run in processes of their own."""

import dataclasses
import json
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxllm.bench.random_model import random_runner_spec
from jaxllm.engine import runner as engine_runner
from jaxllm.engine.compile_step import compile_step
from jaxllm.engine.engine import Engine
from jaxllm.engine.programs import Programs
from jaxllm.engine.runner import Runner
from jaxllm.engine.warm_up import WARM_UP_BLOCKS, largest, measure, worst_step
from jaxllm.memory.device import read_device
from jaxllm.memory.predict import Workload, activation_bytes
from jaxllm.memory.views import DeviceView
from jaxllm.models.weights import Weights
from jaxllm.sampling_params import SamplingParams

Result = dict[str, Any]


def progress(result: Result) -> None:
    """Print what is known so far: of a task that is stopped, the last such line counts."""
    print(json.dumps(result), flush=True)


def transients(shape: str, utilization: float, settings: list[dict[str, Any]]) -> Result:
    """Measure the largest programs under several settings, weights loaded once."""
    rows = []
    weights: Weights | None = None
    for setting in settings:
        spec, checkpoint = random_runner_spec(shape, gpu_memory_utilization=utilization, **setting)
        weights = weights or engine_runner.load(spec, checkpoint)
        config = spec.config
        layout = spec.layout
        shapes = largest(spec.shapes)
        made = Programs(partial(compile_step, spec, weights, layout, WARM_UP_BLOCKS))
        made.prepare(shapes, workers=len(shapes))
        programs = measure(weights.leaves, layout, spec.placement, spec.state, made, shapes, spec.max_model_len)
        workload = Workload(config.max_num_batched_tokens, config.max_num_seqs)
        rows.append(
            {
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "max_num_seqs": config.max_num_seqs,
                "kvcache_block_size": config.kvcache_block_size,
                "programs": [dataclasses.asdict(program) for program in programs],
                "predicted": activation_bytes(spec.model, workload, itemsize=spec.dtype.itemsize),
            }
        )
        progress({"rows": rows})
    return {"rows": rows}


def life(
    shape: str,
    requests: int,
    longest: int,
    compilation_cache: str | None = None,
    jax_first: bool = False,
    **options: Any,
) -> Result:
    """An engine from start to the end of a load of random requests, watched by the driver.

    With `compilation_cache` JAX keeps its compilations there; with `jax_first` JAX is up before the engine is made.
    """
    begun = time.perf_counter()
    if jax_first:
        jax.block_until_ready(jax.device_put(0))
    if compilation_cache:
        jax.config.update("jax_compilation_cache_dir", compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    spec, checkpoint = random_runner_spec(shape, **options)
    device = jax.devices()[0]
    jax.block_until_ready(jax.device_put(0, device))  # the pool is taken with the first array
    loaded = read_device(device)
    with Watch(device) as watch:
        engine = Engine(Runner(spec, checkpoint), None, frozenset(), 0)
        ready = read_device(device)
        startup = time.perf_counter() - begun
        progress(_at_ready(engine, ready) | {"startup": startup, "used_loaded": _ours(loaded)})
        flat = _serve(engine, device, requests, longest)
    end = read_device(device)
    report = engine.runner.memory_report
    reported = report.budget.weights + report.kv_array_bytes + report.budget.activations
    stats = engine.stats.scheduler
    return _at_ready(engine, ready) | {
        "startup": startup,
        "used_loaded": _ours(loaded),
        "used_most": watch.most,
        "outside": end.non_framework,
        "serve": flat["seconds"],
        "in_use_spread": flat["spread"],
        "allocator_peak_below_report": None if end.allocator is None else reported - end.allocator.peak,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "least_free_blocks": flat["least_free"],
    }


def _at_ready(engine: Engine, view: DeviceView) -> Result:
    report = engine.runner.memory_report
    return {
        "utilization": report.budget.utilization,
        "limit": report.budget.limit,
        "total": report.budget.total,
        "used_ready": _ours(view),
        "used_most": _ours(view),
        "own": view.driver.own,
        "source": view.driver.source,
        "reserve": report.budget.activations,
        "contiguous_ready": view.contiguous,
        "outside_ready": view.non_framework,
        "outside": view.non_framework,
        "blocks": report.num_kvcache_blocks,
        "bound_by": report.bound_by,
        "kv_bytes_match": engine.runner.kv.nbytes == report.kv_array_bytes,
        "sizing": report.measure_seconds,
        "programs": [dataclasses.asdict(program) for program in report.programs],
        "predicted": report.predicted_activations,
        "notes": report.notes,
    }


def _ours(view: DeviceView) -> int:
    """Bytes in use on the card but for other processes: what `gpu_memory_utilization` limits."""
    return view.driver.used - view.driver.foreign


class Watch:
    """The most bytes in use on the card, read by a thread as often as it can."""

    def __init__(self, device: jax.Device):
        self.device = device
        self.most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._end.wait(0.02):
            self.most = max(self.most, _ours(read_device(self.device)))

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def _burst(engine: Engine) -> None:
    """As the very first call: as many one-token prompts as there are rows, all of them through the filters."""
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, max_tokens=3, ignore_eos=True)
    for index in range(engine.runner.spec.config.max_rows):
        engine.add_request(f"burst{index}", [index % 7 + 1], params)
    while engine.has_unfinished_requests():
        engine.step()


def _serve(engine: Engine, device: jax.Device, requests: int, longest: int) -> Result:
    """Random requests, all queued at once, until all are done; bytes in use and free blocks along the way."""
    _burst(engine)
    rng = random.Random(0)
    vocabulary = engine.runner.spec.model.vocab_size
    shared = [rng.randrange(vocabulary) for _ in range(longest)]
    for index in range(requests):
        length = rng.randint(1, longest)
        # A third begin alike, so that the prefix cache is in play.
        prompt = shared[:length] if rng.random() < 0.3 else [rng.randrange(vocabulary) for _ in range(length)]
        engine.add_request(str(index), prompt, _params(rng))
    start, in_use, least_free = time.perf_counter(), set(), engine.runner.num_blocks
    while engine.has_unfinished_requests():
        engine.step()
        least_free = min(least_free, engine.stats.scheduler.free_blocks)
        stats = device.memory_stats()
        if stats:
            in_use.add(stats["bytes_in_use"])
    spread = max(in_use) - min(in_use) if in_use else 0
    return {"seconds": time.perf_counter() - start, "spread": spread, "least_free": least_free}


def _params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([-1, 20]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.choice([None, 7]),
        max_tokens=rng.randint(1, 48),
        ignore_eos=True,
    )


def truth(shape: str, utilization: float) -> Result:
    """Bisection: the largest cache with which the largest programs, compiled for it, still run."""
    spec, checkpoint = random_runner_spec(shape, gpu_memory_utilization=utilization, enforce_eager=True)
    runner = Runner(spec, checkpoint)
    engine_blocks = runner.num_blocks
    runner.kv.delete()
    tried: dict[int, bool] = {}

    def survives(blocks: int) -> bool:
        tried[blocks] = survives_load(runner, blocks)
        progress(
            {"engine": engine_blocks, "largest": max((n for n, ran in tried.items() if ran), default=0), "tried": tried}
        )
        return tried[blocks]

    low, high = engine_blocks, engine_blocks + engine_blocks // 16
    if not survives(low):
        return {"engine": engine_blocks, "largest": 0, "tried": tried}
    while survives(high):
        low, high = high, high + engine_blocks // 16
    while high - low > max(1, engine_blocks // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if survives(middle) else (low, middle)
    return {"engine": engine_blocks, "largest": low, "tried": tried}


def survives_load(runner: Runner, blocks: int) -> bool:
    """Whether the largest programs run beside a cache of so many blocks, for which they are compiled."""
    spec, shapes = runner.spec, largest(runner.shapes)
    kv = None
    try:
        programs = Programs(partial(compile_step, spec, runner.weights, runner.layout, blocks))
        programs.prepare(shapes, workers=2)
        kv = runner.layout.allocate(blocks, spec.placement)
        for _ in range(3):
            for shape in shapes:
                program = programs[shape]
                step = worst_step(program.layout, spec.max_model_len)
                packed = spec.placement.put(step)
                results, kv, runner.state = program.compiled(runner.weights.leaves, kv, runner.state, packed)
        jax.block_until_ready((results, kv))
        return True
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    finally:
        if kv is not None and not kv.is_deleted():
            kv.delete()


def hold(size: int, seconds: float) -> Result:
    """A neighbour: takes `size` bytes of the card, without JAX, and lets go after `seconds`."""
    import importlib

    runtime = importlib.import_module("cuda.bindings.runtime")
    status, pointer = runtime.cudaMalloc(size)
    time.sleep(seconds)
    runtime.cudaFree(pointer)
    return {"status": status.name}


TASKS: dict[str, Callable[..., Result]] = {"transients": transients, "life": life, "truth": truth, "hold": hold}
