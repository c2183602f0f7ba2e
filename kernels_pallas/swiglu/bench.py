"""Speed of SwiGLU's product, beside XLA's two products and activation, and beside its products alone."""

import dataclasses
import functools
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.swiglu import SwigluConfig, swiglu, swiglu_reference
from kernels_pallas.swiglu.tuned import TUNED
from kernels_pallas.timing import median_seconds, random_array

LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured product: `tokens` tokens of `hidden` numbers with `mlp` rows of gate and of up."""

    tokens: int
    hidden: int = 1024
    mlp: int = 3072
    config: SwigluConfig = TUNED

    @property
    def name(self) -> str:
        """The sizes, and the tuning parameters where not the default."""
        config = self.config
        tuned = (
            ""
            if config == TUNED
            else f" {config.columns}x{config.step}x{config.stages} width{config.width} cluster{config.cluster}"
        )
        return f"{self.tokens} x {self.hidden} x {self.mlp}{tuned}"

    @property
    def operations(self) -> int:
        """Floating-point operations of a layer."""
        return 4 * self.tokens * self.hidden * self.mlp

    @property
    def repetitions(self) -> int:
        """Passes through the layers: some 20 ms."""
        return max(1, int(20e-3 / (LAYERS * self.operations / 600e12)))


POINTS = tuple(Point(tokens, *sizes) for sizes in ((1024, 3072), (4096, 12288)) for tokens in (1024, 4096, 16384))
QUICK = (Point(16384),)
TUNE = tuple(
    Point(16384, config=SwigluConfig(columns=columns, stages=stages, width=width, cluster=cluster))
    for columns, stages in ((128, 4), (64, 6))
    for cluster in (1, 2)
    for width in (4, 8, 16)
)


def measure(points: tuple[Point, ...], operations_per_second: float) -> Generator[dict[str, Any]]:
    """Compile all points in parallel, then time each: microseconds a layer, TFLOP/s, share of the large product's."""
    runs: dict[str, Callable[..., jax.Array]] = {"us": swiglu, "xla us": swiglu_reference, "products us": _products}
    with ThreadPoolExecutor(16) as pool:
        compiled = {
            name: list(pool.map(functools.partial(_compile, name=name, run=run), points)) for name, run in runs.items()
        }
    for index, point in enumerate(points):
        x = random_array((point.tokens, point.hidden), jnp.bfloat16)
        weights = [random_array((point.mlp, point.hidden), jnp.bfloat16, seed) * 0.05 for seed in range(2 * LAYERS)]
        result: dict[str, Any] = {"point": point.name}
        for name in runs:
            seconds = median_seconds(compiled[name][index], x, weights)
            result[name] = seconds / (LAYERS * point.repetitions) * 1e6
        rate = point.operations / result["us"] * 1e6
        result |= {"TFLOP/s": rate / 1e12, "share": rate / operations_per_second}
        yield result | {"gain": result["xla us"] / result["us"]}


def _products(x: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    gated, passed = (
        lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype) for weight in (gate, up)
    )
    return gated, passed


def _compile(point: Point, name: str, run: Callable[..., Any]) -> Callable[..., jax.Array]:
    keywords = {"config": point.config} if name == "us" else {}

    def layers(x: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, list[Any]]:
        results = []
        for layer in range(LAYERS):
            result = run(x, weights[2 * layer], weights[2 * layer + 1], **keywords)
            x, result = lax.optimization_barrier((x, result))  # the next layer begins when this one is done
            results.append(result)
        return x, results

    def repeat(x: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, list[Any]]:
        # All results are carried on: none is left out as unused.
        return lax.fori_loop(1, point.repetitions, lambda _, carry: layers(carry[0], weights), layers(x, weights))

    x = jax.ShapeDtypeStruct((point.tokens, point.hidden), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((point.mlp, point.hidden), jnp.bfloat16)
    # As the engine compiles its steps.
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
    return jax.jit(repeat).lower(x, [weight] * (2 * LAYERS)).compile(compiler_options=options)
