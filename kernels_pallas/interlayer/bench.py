"""Speed of all between two layers' attention, beside XLA's kernels for it, and beside reading the weights."""

import dataclasses
import functools
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.interlayer.config import HEAD_DIM, WeightsBefore, WeightsBehind
from kernels_pallas.interlayer.mosaic_gpu import interlayer
from kernels_pallas.interlayer.reference import interlayer_reference
from kernels_pallas.timing import median_seconds, random_array

EPS = 1e-6

Weights = tuple[WeightsBehind, WeightsBefore]


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured step of `tokens` tokens; the sizes are Qwen3-0.6B's."""

    tokens: int
    hidden: int = 1024
    mlp: int = 3072
    heads: int = 16
    kv_heads: int = 8

    @property
    def name(self) -> str:
        """The sizes."""
        return f"{self.tokens} tokens, hidden {self.hidden}"

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of `WeightsBehind` and `WeightsBefore`."""
        q, kv = self.heads * HEAD_DIM, self.kv_heads * HEAD_DIM
        return {
            "o": (self.hidden, q), "mlp_norm": (self.hidden,), "gate": (self.mlp, self.hidden),
            "up": (self.mlp, self.hidden), "down": (self.hidden, self.mlp), "norm": (self.hidden,),
            "q": (q, self.hidden), "k": (kv, self.hidden), "v": (kv, self.hidden),
            "q_norm": (HEAD_DIM,), "k_norm": (HEAD_DIM,),
        }  # fmt: skip

    @property
    def layers(self) -> int:
        """Layers of different weights in turn, more than the L2 cache holds."""
        return 14 if self.hidden <= 1024 else 4

    def make(self, draw: Callable[[int, tuple[int, ...]], Any]) -> Weights:
        """A layer's weights; `draw` takes their index and shape."""
        made = {name: draw(index, shape) for index, (name, shape) in enumerate(self.weights.items())}
        behind = {field.name: made.pop(field.name) for field in dataclasses.fields(WeightsBehind)}
        return WeightsBehind(**behind), WeightsBefore(**made)

    @property
    def bytes(self) -> int:
        """Of the weights of a layer, which are most of what is read."""
        return 2 * sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in self.weights.values())


POINTS = (
    *(Point(tokens) for tokens in (64, 128, 256, 512)),
    *(Point(tokens, hidden=4096, mlp=12288, heads=32) for tokens in (64, 128, 256)),
)
QUICK = POINTS[1:3]


def measure(points: tuple[Point, ...], bytes_per_second: float) -> Generator[dict[str, Any]]:
    """Compile all points in parallel, then time each: microseconds a layer, and what its weights alone take to read."""
    runs: dict[str, Callable[..., Any]] = {"us": _kernel, "xla us": _reference}
    with ThreadPoolExecutor(16) as pool:
        compiled = {name: list(pool.map(functools.partial(_compile, run=run), points)) for name, run in runs.items()}
    for index, point in enumerate(points):
        layers = [point.make(_random_weights) for _ in range(point.layers)]
        attended = random_array((point.tokens, point.heads, HEAD_DIM), jnp.bfloat16)
        x = random_array((point.tokens, point.hidden), jnp.bfloat16)
        angles = jnp.ones((2, point.tokens, HEAD_DIM // 2), jnp.float32)
        result: dict[str, Any] = {"point": point.name}
        for name in runs:
            seconds = median_seconds(compiled[name][index], attended, x, layers, angles)
            result[name] = seconds / point.layers * 1e6
        yield result | {"weights us": point.bytes / bytes_per_second * 1e6, "gain": result["xla us"] / result["us"]}


def _random_weights(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return random_array(shape, jnp.bfloat16, seed) * shape[-1] ** -0.5


def _kernel(attended: jax.Array, x: jax.Array, weights: Weights, angles: jax.Array) -> tuple[jax.Array, Any]:
    counter = jnp.zeros(1, jnp.int32) + jnp.minimum(0, angles[0, 0, 0].astype(jnp.int32))
    return interlayer(attended, x, *weights, angles[0], angles[1], counter, eps=EPS)


def _reference(attended: jax.Array, x: jax.Array, weights: Weights, angles: jax.Array) -> tuple[jax.Array, Any]:
    return interlayer_reference(attended, x, *weights, angles[0], angles[1], eps=EPS)


def _compile(point: Point, run: Callable[..., tuple[jax.Array, Any]]) -> Callable[..., Any]:
    def layers(attended: jax.Array, x: jax.Array, layers: list[Weights], angles: jax.Array) -> Any:
        others = []
        for weights in layers:
            x, (attended, k, v) = run(attended, x, weights, angles)  # q stands in for the next layer's attention
            others += [k, v]
        return x, attended, others

    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = point.make(lambda _, shape: struct(shape))
    angles = jax.ShapeDtypeStruct((2, point.tokens, HEAD_DIM // 2), jnp.float32)
    attended, x = struct((point.tokens, point.heads, HEAD_DIM)), struct((point.tokens, point.hidden))
    return jax.jit(layers).lower(attended, x, [weights] * point.layers, angles).compile()
