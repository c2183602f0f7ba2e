"""Speed of drawing tokens, by what rows ask for and how likely the likeliest tokens are, beside sorting in jnp."""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.compiling import compile_all
from kernels_pallas.sample import sample_tokens, sample_tokens_reference
from kernels_pallas.timing import median_seconds, random_array

DRAWS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "top_p 0.95": (1.0, 0, 0.95, 0.0),
    "top_k 20, top_p 0.95, T 0.6": (0.6, 20, 0.95, 0.0),
}
FLAT, PEAKED = 1.0, 4.0
"""Standard deviations of the logits: the second's likeliest hundred tokens have most of the probability."""


@dataclasses.dataclass(frozen=True)
class SampleProgram:
    """Draws for `rows` rows, `times` times with other noise each time; `plain` is the jnp oracle's."""

    rows: int
    times: int
    vocab: int
    plain: bool = False

    def function(self) -> Callable[..., jax.Array]:
        """Of logits and each row's temperature, top_k, top_p and min_p; the tokens' sum."""
        draw: Callable[..., jax.Array] = sample_tokens_reference if self.plain else sample_tokens
        known = np.ones(self.vocab, bool)

        def run(logits: jax.Array, *parameters: jax.Array) -> jax.Array:
            nothing = jnp.full((self.rows, 1), 2**30, jnp.int32)
            row = jnp.arange(self.rows, dtype=jnp.uint32)

            def again(turn: jax.Array, total: jax.Array) -> jax.Array:
                keys = jnp.stack([row, jnp.full_like(row, turn.astype(jnp.uint32))], axis=1)
                return total + draw(logits, *parameters, keys, nothing, known)

            return jax.lax.fori_loop(0, self.times, again, jnp.zeros((self.rows,), jnp.int32))

        return run

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Their shapes."""
        struct = jax.ShapeDtypeStruct
        row = struct((self.rows,), jnp.float32)
        return struct((self.rows, self.vocab), jnp.float32), row, struct((self.rows,), jnp.int32), row, row


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured batch: all rows draw as `DRAWS[draw]` says, from normal logits of a standard deviation."""

    rows: int
    draw: str
    deviation: float = FLAT
    vocab: int = 151_936

    @property
    def name(self) -> str:
        """Rows, draw and logits."""
        return f"{self.rows} {self.draw} {'flat' if self.deviation == FLAT else 'peaked'}"

    def program(self, *, plain: bool = False) -> SampleProgram:
        """What it is measured with, which points of as many rows share."""
        return SampleProgram(self.rows, 2 if plain else max(20, 4000 // self.rows), self.vocab, plain)

    def inputs(self) -> list[jax.Array]:
        """The program's arguments."""
        logits = self.deviation * random_array((self.rows, self.vocab), jnp.float32)
        shapes = self.program().arguments()[1:]
        values = DRAWS[self.draw]
        return [logits, *(jnp.full(s.shape, value, s.dtype) for s, value in zip(shapes, values, strict=True))]


POINTS = tuple(
    Point(rows, draw, deviation)
    for rows in (8, 64, 256)
    for draw in DRAWS
    for deviation in (FLAT, PEAKED)
    if deviation == FLAT or "top" in draw
)
QUICK = tuple(point for point in POINTS if point.rows == 256)


def measure(points: Sequence[Point], copy_bytes_per_second: float) -> Generator[dict[str, Any]]:
    """Microseconds a draw, and logits read once by that time against the copy ceiling."""
    programs = [point.program(plain=plain) for point in points for plain in (False, True)]
    compiled = compile_all(programs)
    for point in points:
        inputs = point.inputs()
        times = {}
        for plain in (False, True):
            program = point.program(plain=plain)
            times[plain] = median_seconds(compiled[program], *inputs, repeats=1 if plain else 5) / program.times
        rate = inputs[0].nbytes / times[False]
        yield {
            "point": point.name,
            "us": times[False] * 1e6,
            "TB/s": rate / 1e12,
            "share": rate / copy_bytes_per_second,
            "jnp us": times[True] * 1e6,
            "gain": times[True] / times[False],
        }
