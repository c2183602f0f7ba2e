"""The measurements of `jaxllm.bench.memory`, one function each, run in processes of their own.

Each is given `say`, which takes what is known so far, for the case that the task is stopped, and events: an event waits
until whoever started the task lets it go on.
"""

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxllm.bench.memory_life import Result, Say, life
from jaxllm.bench.random_model import random_checkpoint, random_runner_spec, random_weights
from jaxllm.checkpoint.safetensors_writer import write_safetensors
from jaxllm.engine.compile_step import compile_step
from jaxllm.engine.device_state import allocate_state
from jaxllm.engine.programs import Programs
from jaxllm.engine.runner import Runner, cache_demand
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.step_shape import StepShape, StepShapes
from jaxllm.engine.warm_up import WARM_UP_BLOCKS, largest, measure, worst_step
from jaxllm.models.shapes import SHAPES
from jaxllm.models.weights import Weights


def transients(say: Say, shape: str, plain: bool = False, **options: Any) -> Result:
    """What the largest programs take: measured, according to the compiler, and by the naive measurement.

    Args:
        say: takes what is known so far.
        shape: of the model.
        plain: measure the largest programs without log probabilities and the like as well.
        options: of the engine. The programs are those of an engine that compiles before it is ready.
    """
    spec, _ = random_runner_spec(shape, **options)
    weights = random_weights(spec)
    shapes = largest(spec.shapes) + (_largest_plain(spec.shapes) if plain else [])
    programs = Programs(partial(compile_step, spec, weights, spec.layout, WARM_UP_BLOCKS))
    programs.prepare(shapes, workers=len(shapes))
    measured = measure(weights.leaves, spec.layout, spec.placement, spec.state, programs, shapes, spec.max_model_len)
    return {
        "programs": [dataclasses.asdict(program) for program in measured],
        "predicted": cache_demand(spec).predicted_activations,
        "attention": spec.attention.value,
        "weights": weights.nbytes,
    }


def _largest_plain(shapes: StepShapes) -> list[StepShape]:
    """The largest prefill and decode whose sampler does the least."""
    most = largest(shapes)
    sampler = shapes.samplers[0]
    return [] if sampler == shapes.samplers[-1] else [dataclasses.replace(shape, sampler=sampler) for shape in most]


def truth(say: Say, shape: str, **options: Any) -> Result:
    """Search for the largest cache beside which the largest programs, compiled for it, still run.

    First the engine's own number, then a 49th more: if that fails, the engine has 98 % of the largest. Then bisection.
    """
    spec, _ = random_runner_spec(shape, enforce_eager=True, **options)
    runner = Runner(spec, random_weights(spec))
    mine, block_bytes = runner.num_blocks, runner.layout.block_bytes
    _free(runner)
    tried: dict[int, bool] = {}

    def survives(blocks: int) -> bool:
        tried[blocks] = survives_load(spec, runner.weights, blocks)
        best = max((n for n, ran in tried.items() if ran), default=0)
        fatal = min((n for n, ran in tried.items() if not ran), default=None)
        say({"engine": mine, "largest": best, "fatal": fatal, "block_bytes": block_bytes, "tried": list(tried.items())})
        return tried[blocks]

    low, high = mine, mine + mine // 48
    if survives(low):
        while survives(high):
            low, high = high, high + mine // 48
        while high - low > max(1, mine // 500):
            middle = (low + high) // 2
            low, high = (middle, high) if survives(middle) else (low, middle)
    return {"utilization": spec.config.gpu_memory_utilization}


def _free(runner: Runner) -> None:
    """Give back all but the weights."""
    for array in (runner.kv, *runner.state):
        array.delete()


def survives_load(spec: RunnerSpec, weights: Weights, blocks: int) -> bool:
    """Whether the largest programs run beside a cache of so many blocks, for which they are compiled."""
    shapes, layout, placement = largest(spec.shapes), spec.layout, spec.placement
    kv = None
    try:
        programs = Programs(partial(compile_step, spec, weights, layout, blocks))
        programs.prepare(shapes, workers=len(shapes))
        state = allocate_state(spec.state, placement)
        kv = layout.allocate(blocks, placement)
        for _ in range(3):
            for shape in shapes:
                program = programs[shape]
                packed = placement.put(worst_step(program.layout, spec.max_model_len))
                results, kv, state = program.compiled(weights.leaves, kv, state, packed)
        jax.block_until_ready((results, kv, state))
        return True
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    finally:
        if kv is not None and not kv.is_deleted():
            kv.delete()


def hold(say: Say, size: int, late: bool = False) -> Result:
    """A neighbour: takes `size` bytes of the card, without JAX, until it may go on; `late`: only once it may begin.

    Raises:
        RuntimeError: if the card does not give them.
    """
    runtime = importlib.import_module("cuda.bindings.runtime")
    if late:
        say({"event": "waiting"})
    status, _ = runtime.cudaMalloc(size)
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"a neighbour could not take {size} bytes: {status.name}")
    say({"event": "holding"})
    return {}


def write(say: Say, shape: str, folder: str, shard_bytes: int) -> Result:
    """Write a checkpoint with made-up weights."""
    import json

    path, checkpoint = Path(folder), random_checkpoint(shape)
    path.mkdir(parents=True)
    write_safetensors(checkpoint.tensors, path, shard_bytes)
    (path / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    return {"files": len(list(path.glob("*.safetensors")))}


TASKS: dict[str, Callable[..., Result]] = {
    "transients": transients,
    "life": life,
    "truth": truth,
    "hold": hold,
    "write": write,
}
