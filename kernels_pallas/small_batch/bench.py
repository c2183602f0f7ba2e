"""Speed of the fused projections of small decode batches, beside XLA's own kernels for the same computation.

Every measured chain runs through layers with weights of their own, each call needing the result of the one before, so
that it costs what it costs in a model: of `qkv` alone that is the cache. `gate_up` alone is the difference between
chains: `mlp` less `down`.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.compiling import compile_all
from kernels_pallas.kv_write import kv_write
from kernels_pallas.paged_decode import paged_decode, plan_decode, tuned_config
from kernels_pallas.small_batch.gate_up import gate_up
from kernels_pallas.small_batch.normed import normalized, normed_input
from kernels_pallas.small_batch.plan import plan_qkv
from kernels_pallas.small_batch.points import BLOCK, MODELS, PARTS, POINTS, QUICK, TUNE, Model, Point, weight_shapes
from kernels_pallas.small_batch.project import project_residual
from kernels_pallas.small_batch.qkv import QKVWeights, qkv_project
from kernels_pallas.small_batch.reference import (
    gate_up_reference,
    project_reference,
    qkv_heads_reference,
    rms_norm_reference,
)
from kernels_pallas.timing import median_seconds

__all__ = ["POINTS", "QUICK", "TUNE", "measure"]

EPS = 1e-6


class Data(NamedTuple):
    """Arrays that all points of a model share."""

    layers: list[dict[str, tuple[jax.Array, ...]]]  # weights by projection
    ones: jax.Array  # weights of the norms of the model's width
    head_ones: jax.Array  # and of a head's
    embedding: jax.Array
    attended: jax.Array  # [32, heads * head_dim], inputs of o where it is measured alone
    activated: jax.Array  # [32, mlp]


@dataclasses.dataclass(frozen=True)
class Chain:
    """All repetitions of a point's chain, by the fused kernels or as XLA would have it."""

    point: Point
    kernels: bool

    def function(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Of the model's arrays and the cache, which may be overwritten."""
        return functools.partial(_run, self.point, self.kernels)

    def arguments(self) -> tuple[Any, ...]:
        """Their shapes."""
        data = jax.eval_shape(functools.partial(_make, self.point.sizes))
        return data, jax.ShapeDtypeStruct(_cache_shape(self.point), jnp.bfloat16)


def measure(points: tuple[Point, ...], copy_bytes_per_second: float) -> Generator[dict[str, Any]]:
    """Compile all points at once, then time each: microseconds a layer, TB/s of weights, XLA's time."""
    chains = [Chain(point, kernels) for point in points for kernels in (True, False) if kernels or point.xla]
    compiled = compile_all(chains, donated=(1,))
    for name, model in MODELS.items():
        mine = [point for point in points if point.model == name]
        if not mine:
            continue
        data = _make(model)
        for point in mine:
            per_layer = 1e6 / (_repetitions(point) * model.layers)
            kernel = compiled[Chain(point, True)]
            out, cache = kernel(data, jnp.zeros(_cache_shape(point), jnp.bfloat16))
            seconds = _seconds(kernel, data, cache)
            result: dict[str, Any] = {"point": point.name, "us": seconds * per_layer}
            if point.part == "step":
                result["step ms"] = seconds / _repetitions(point) * 1e3
            else:
                rate = point.layer_bytes / result["us"] * 1e6
                result |= {"TB/s": rate / 1e12, "share": rate / copy_bytes_per_second}
            if point.xla:
                xla = compiled[Chain(point, False)]
                want, cache = xla(data, jnp.zeros(_cache_shape(point), jnp.bfloat16))
                seconds = _seconds(xla, data, cache)
                result |= {"xla us": seconds * per_layer, "gain": seconds * per_layer / result["us"]}
                if point.part != "step":  # a step's tokens are integers, which one rounding may change
                    result["difference"] = float(_relative_difference(out[: point.rows], want[: point.rows]))
            yield result


def _relative_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def _seconds(run: Callable[..., tuple[jax.Array, jax.Array]], data: Data, cache: jax.Array) -> float:
    """The cache is donated: each call goes on with the result of the one before."""
    state = {"cache": cache}

    def once() -> jax.Array:
        out, state["cache"] = run(data, state["cache"])
        return out

    return median_seconds(once)


def _repetitions(point: Point) -> int:
    expected = point.sizes.layers * (point.layer_bytes / 2e12 + 10e-6)
    return max(1, int(20e-3 / expected))


def _make(model: Model) -> Data:
    shapes = weight_shapes(model)
    seeds = iter(range(10**6))
    layers = [
        {name: tuple(_matrix(next(seeds), shape) for shape in shapes[name]) for name in shapes}
        for _ in range(model.layers)
    ]
    return Data(
        layers,
        jnp.ones((model.hidden,), jnp.bfloat16),
        jnp.ones((model.head_dim,), jnp.bfloat16),
        _matrix(next(seeds), (model.vocab, model.hidden)),
        _matrix(next(seeds), (32, model.heads * model.head_dim)),
        _matrix(next(seeds), (32, model.mlp)),
    )


@functools.partial(jax.jit, static_argnames="shape")
def _matrix(seed: int, shape: tuple[int, int]) -> jax.Array:
    """Random numbers that leave the size of what is multiplied with them."""
    return (jax.random.normal(jax.random.key(seed), shape) * shape[1] ** -0.5).astype(jnp.bfloat16)


def _cache_shape(point: Point) -> tuple[int, ...]:
    model = point.sizes
    blocks = point.rows * -(-point.context // BLOCK)
    return (model.layers, 2, blocks, model.kv_heads, BLOCK, model.head_dim)


def _run(point: Point, kernels: bool, data: Data, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
    model, parts = point.sizes, PARTS[point.part]
    tokens = point.tokens if kernels else point.rows
    row = jnp.arange(tokens, dtype=jnp.int32)
    width = -(-point.context // BLOCK)
    real = row < point.rows
    lengths = jnp.where(real, point.context, 0)
    slots = jnp.where(real, row * (width * BLOCK) + point.context - 1, 2**30 + row)
    tables = row[:, None] * width + jnp.arange(width, dtype=jnp.int32)
    tables = jnp.minimum(tables, point.rows * width - 1)
    angles = lengths[:, None] * jnp.float32(1e6) ** (-jnp.arange(model.head_dim // 2) / (model.head_dim // 2))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    config = tuned_config(model.head_dim, rows=tokens, kv_heads=model.kv_heads)
    plan = plan_decode(lengths, kv_heads=model.kv_heads, max_context=width * BLOCK, config=config)
    qkv_plan = plan_qkv(
        hidden=model.hidden, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim, config=point.qkv
    )

    def normed(x: jax.Array) -> Any:
        return normed_input(x, data.ones, config=point.project) if kernels else rms_norm_reference(x, data.ones, EPS)

    def add(part: str, x: jax.Array, y: jax.Array, weights: dict[str, tuple[jax.Array, ...]]) -> tuple[Any, ...]:
        if kernels:
            return project_residual(y, weights[part][0], x, data.ones, config=point.project)
        x = x + project_reference(y, weights[part][0])
        return x, normed(x)

    def layer(
        index: int, x: jax.Array, source: Any, cache: jax.Array, weights: dict[str, tuple[jax.Array, ...]]
    ) -> tuple[Any, ...]:
        attended = data.attended[:tokens]
        if "qkv" in parts:
            q, k, v = weights["qkv"]
            matrices = QKVWeights(q=q, k=k, v=v, q_norm=data.head_ones, k_norm=data.head_ones)
            if kernels:
                arguments = (source, matrices, cos, sin, cache, index, slots)
                heads, cache = qkv_project(*arguments, eps=EPS, plan=qkv_plan)
            else:
                heads, cache = _qkv_by_xla(source, matrices, cos, sin, cache, index, slots)
            if point.part == "step":
                scale = model.head_dim**-0.5
                heads, _ = paged_decode(heads, cache, index, tables, lengths, scale=scale, plan=plan)
            attended = heads.reshape(tokens, -1)
        if "o" in parts:
            x, source = add("o", x, attended, weights)
        activated = data.activated[:tokens]
        if "gate_up" in parts:
            gate, up = weights["gate_up"]
            if kernels:
                activated = gate_up(source, gate, up, eps=EPS, config=point.gate_up)
            else:
                activated = gate_up_reference(source, gate, up)
        if "down" in parts:
            x, source = add("down", x, activated, weights)
        return x, source, cache

    def body(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, cache = carry
        if point.part == "step":
            x = data.embedding[x]
        source = normed(x)
        for index, weights in enumerate(data.layers):
            x, source, cache = layer(index, x, source, cache, weights)
        if point.part == "step":
            final = normalized(source, EPS) if kernels else source
            logits = jax.lax.dot_general(
                final, data.embedding, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            x = jnp.argmax(logits, axis=1).astype(jnp.int32)
        return x, cache

    start = row if point.part == "step" else data.attended[:tokens, : model.hidden]
    return jax.lax.fori_loop(0, _repetitions(point), body, (start, cache))


def _qkv_by_xla(
    source: jax.Array,
    weights: QKVWeights,
    cos: jax.Array,
    sin: jax.Array,
    cache: jax.Array,
    index: int,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Projections, norms and rotation by XLA; the write by the kernel that is faster than its scatter."""
    q, k, v = qkv_heads_reference(source, weights, cos, sin, cache.shape[5], eps=EPS)
    return q, kv_write(cache, index, k, v, slots)
