"""What choosing tokens costs: the end of a decode step alone, and its share of a whole step."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxllm import cli
from jaxllm.bench.decode_batch import Batch, blocks_each, decode_batch
from jaxllm.bench.engines import make_parser
from jaxllm.bench.random_model import random_runner_spec
from jaxllm.bench.varied_model import varied_checkpoint
from jaxllm.engine.choose import Chosen, choose
from jaxllm.engine.compile_step import compile_step
from jaxllm.engine.device_state import DeviceState, StateUpdates, allocate_state
from jaxllm.engine.request import Request
from jaxllm.engine.runner import load
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.step_shape import PackedLayout, StepShape
from jaxllm.models.shapes import SHAPES
from jaxllm.parallel.mesh import TENSOR
from jaxllm.sampling.packing import NO_TOKEN

DESCRIPTION = """Time the end of a decode step, from logits to tokens, for requests that ask for more and more.

It is timed alone, on made-up logits that are flat (normal, so that filters keep many tokens) or peaked (few likely
tokens, as language models have them), and as part of whole steps of a model of the given shape, whose own logits are
flat. Shares are the time alone of the step with the same requests."""

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "all filters": {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    "everything": {
        "temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {token: 0.5 for token in range(100)},
        "allowed_token_ids": range(300), "logprobs": 20,
    },
}  # fmt: skip
"""Fields of the requests, all in a batch the same. `everything`: filters, penalties, bias, mask, log probabilities."""

_LOOPS = 20
"""Times that tokens are chosen in one call, so that launches wait for no host."""

_CALLS = 5
"""Steps that are sent at once."""


def _parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser("sampler", DESCRIPTION, repetitions=5)
    parser.add_argument("--rows", type=int, default=512, metavar="N", help="requests of the batch (default 512)")
    parser.add_argument("--context", type=int, default=700, metavar="N", help="tokens of each (default 700)")
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME",
                        help=f"what the requests ask for (default all): {', '.join(CASES)}")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    args = _parser().parse_args(argv)
    cli.set_up_logging(args.verbose)
    with cli.exit_codes():
        if args.model not in SHAPES:
            raise ValueError(f"--model {args.model}: needs a shape with made-up weights: {', '.join(SHAPES)}")
        if args.rows < 1 or args.context < 2:
            raise ValueError(f"--rows {args.rows} --context {args.context}: at least 1 row of 2 tokens is needed")
        if (args.data_parallel_size or 1) > 1:
            raise ValueError(
                f"--data-parallel-size {args.data_parallel_size}: replicas choose for themselves; measure one, with 1"
            )
        results = run(args)
        print(json.dumps(results) if args.json else table(results))
    return cli.OK


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The device, the batch, and one result for each case."""
    options = {"max_num_seqs": args.rows} | cli.engine_options(args)
    spec, _ = random_runner_spec(args.model, **options)
    bench = _Bench(spec, args)
    batches = {name: bench.batch(CASES[name]) for name in args.case}
    bench.compile({shape for shape, *_ in batches.values()})
    results = []
    for name, batch in batches.items():
        alone = {kind: bench.alone(kind, *batch) for kind in ("flat", "peaked")}
        step = bench.step(*batch)
        shares = {f"share_{kind}": seconds / step for kind, seconds in alone.items()}
        results.append(
            {"case": name, "program": batch[0].name, "flat_us": 1e6 * alone["flat"], "peaked_us": 1e6 * alone["peaked"]}
            | {"step_ms": 1e3 * step}
            | shares
        )
    return {
        "device": jax.devices()[0].device_kind,
        "model": args.model,
        "rows": args.rows,
        "context": args.context,
        "vocab": spec.run_time.vocab_size,
        "cases": results,
    }


def table(results: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{results['model']} on {results['device']}: {results['rows']} rows of {results['context']} tokens, "
        f"{results['vocab']:,} logits each",
        f"{'':13}{'flat, us':>10}{'peaked, us':>12}{'step, ms':>10}{'share flat':>12}{'peaked':>9}",
    ]
    for one in results["cases"]:
        lines.append(
            f"{one['case']:13}{one['flat_us']:10.1f}{one['peaked_us']:12.1f}{one['step_ms']:10.3f}"
            f"{one['share_flat']:12.2%}{one['share_peaked']:9.2%}"
        )
    return "\n".join(lines)


class _Bench:
    """A model and a cache on the devices, and the programs that the batches need."""

    def __init__(self, spec: RunnerSpec, args: argparse.Namespace):
        self.spec, self.args, self.placement = spec, args, spec.placement
        self.iterations = spec.shapes.iterations(args.rows)
        self.blocks_each = blocks_each(spec, args.rows, args.context)
        self.weights = load(spec, varied_checkpoint(args.model))
        self.kv = spec.layout.allocate(args.rows * self.blocks_each, self.placement)
        self.state = allocate_state(spec.state, self.placement)
        self.updates = StateUpdates(spec.state, self.placement)
        self.logits = {kind: self._logits(kind) for kind in ("flat", "peaked")}

    def batch(self, fields: dict[str, Any]) -> Batch:
        """The program for requests with these fields, the step that they are decoded in, and the requests."""
        if "allowed_token_ids" in fields:  # more of them where there are more
            fields = fields | {"allowed_token_ids": range(self.spec.model.vocab_size // 4)}
        return decode_batch(self.spec, self.args.rows, self.args.context, fields)

    def compile(self, shapes: set[StepShape]) -> None:
        """Whole steps and their ends, several at a time."""
        num_blocks, abstract = self.args.rows * self.blocks_each, self.weights.abstract()

        def step(shape: StepShape) -> jax.stages.Compiled:
            return compile_step(self.spec, abstract, self.spec.layout, num_blocks, shape)

        with ThreadPoolExecutor(2 * len(shapes)) as threads:
            steps = {shape: threads.submit(step, shape) for shape in shapes}
            ends = {shape: threads.submit(self._compile_end, shape) for shape in shapes}
            self._steps = {shape: future.result() for shape, future in steps.items()}
            self._ends = {shape: future.result() for shape, future in ends.items()}

    def alone(self, kind: str, shape: StepShape, packed: Int32[np.ndarray, "size"], newcomers: list[Request]) -> float:
        """Seconds from logits to tokens."""
        buffer = self._sent(packed, newcomers)
        call = self._ends[shape]
        return self._median(lambda: call(self.logits[kind], self.state, buffer)) / _LOOPS

    def step(self, shape: StepShape, packed: Int32[np.ndarray, "size"], newcomers: list[Request]) -> float:
        """Seconds of a decode step, each of the iterations of a program being one."""
        buffer = self._sent(packed, newcomers)

        def calls() -> Any:
            for _ in range(_CALLS):
                results, self.kv, self.state = self._steps[shape](self.weights.leaves, self.kv, self.state, buffer)
            return results

        return self._median(calls) / (_CALLS * self.iterations)

    def _sent(self, packed: Int32[np.ndarray, "size"], newcomers: list[Request]) -> jax.Array:
        """The step on the devices, whose state knows its requests."""
        self.state = self.updates.admit(self.state, newcomers)
        return self.placement.put(packed)

    def _median(self, call: Callable[[], Any]) -> float:
        jax.block_until_ready(call())
        times = []
        for _ in range(self.args.repetitions):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _compile_end(self, shape: StepShape) -> jax.stages.Compiled:
        """The end of a step, `_LOOPS` times: what it makes of the same logits at one position after another."""
        spec, layout = self.spec, PackedLayout(shape)

        def end(logits: Array, state: DeviceState, buffer: Array) -> Chosen:
            fields = layout.unpack(buffer)
            suppressed = jnp.where((fields.suppress > 0)[:, None], fields.sampling.suppressed, NO_TOKEN)

            def chosen(i: Array | int) -> Chosen:
                i, given = lax.optimization_barrier((jnp.asarray(i), logits))  # or all would be computed once
                inputs = fields.sampling._replace(position=fields.context_len + i, suppressed=suppressed)
                return choose(
                    given, inputs, fields.extras, fields.seat, state, known_tokens=spec.known_tokens,
                    vocab=spec.model.vocab_size, sampler=shape.sampler, processors=spec.processors,
                    placement=spec.placement,
                )  # fmt: skip

            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(chosen, 0))
            return lax.fori_loop(0, _LOOPS, lambda i, total: jax.tree.map(jnp.add, total, chosen(i)), nothing)

        arguments = (self.logits["flat"], self.state, self.placement.put(layout.empty()[0]))
        with self.placement.own_mesh():
            return jax.jit(end, out_shardings=self.placement.replicated).lower(*arguments).compile()

    def _logits(self, kind: str) -> Float[Array, "rows vocab"]:
        shape = next(one for one in self.spec.shapes.decode if one.rows >= self.args.rows)
        size = (shape.rows, self.spec.run_time.vocab_size)

        def make() -> Float[Array, "rows vocab"]:
            normal, which, height = jax.random.split(jax.random.key(0), 3)
            flat = jax.random.normal(normal, size)
            if kind == "flat":
                return 3 * flat
            likely = jax.random.uniform(which, size) < 2e-4  # of 150,000, thirty
            return 2 * flat + jnp.where(likely, 12 * jax.random.exponential(height, size), 0)

        with self.placement.own_mesh():
            return jax.jit(make, out_shardings=self.placement.sharding(None, TENSOR))()


if __name__ == "__main__":
    sys.exit(main())
