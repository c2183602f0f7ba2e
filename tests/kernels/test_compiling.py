import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.compiling import compile_all
from kernels_pallas.paged_decode import points
from kernels_pallas.paged_decode.bench import DecodeProgram
from kernels_pallas.timing import repeated, repeated_in_pairs


@dataclasses.dataclass(frozen=True)
class Power:
    exponent: int

    def function(self):
        return lambda x: x**self.exponent

    def arguments(self):
        return (jax.ShapeDtypeStruct((3,), jnp.float32),)


def test_programs_lowered_elsewhere_run_here():
    programs = [Power(2), Power(3), Power(2)]
    compiled = compile_all(programs, processes=1, platform="cpu")
    assert list(compiled) == [Power(2), Power(3)]
    x = jnp.array([1.0, 2.0, 3.0])
    for program in programs:
        np.testing.assert_allclose(compiled[program](x), np.asarray(x) ** program.exponent)


def test_arguments_are_overwritten_where_they_may_be():
    x = jnp.arange(3.0)
    compiled = compile_all([Power(1)], donated=(0,), processes=1, platform="cpu")
    np.testing.assert_allclose(compiled[Power(1)](x), np.arange(3.0))
    assert x.is_deleted()


def test_layers_of_a_point_have_pages_of_their_own():
    point = points.Point(4, ("uniform", 300), block_size=64)
    program = DecodeProgram.of(point, pool=2 * 8 * 64 * 128 * 2048)
    needed = point.blocks_needed()
    pages = []
    for table in program.tables(point):
        assert table.shape == program.arguments()[3].shape
        for row, count in enumerate(needed):
            pages += list(np.asarray(table)[row, :count])
    assert len(pages) == program.layers * needed.sum()
    assert len(set(pages)) == len(pages) and max(pages) < program.blocks


def test_results_of_pairs_are_not_copied():
    product, copy = (lambda q, w: q @ w), "f32[64,64]{1,0} copy("
    matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    copies = [
        jax.jit(loop(product, 3)).lower(matrix, matrix).compile().as_text().count(copy)
        for loop in (repeated, repeated_in_pairs)
    ]
    assert copies == [2, 1]  # of the argument, which is not donated, in both
    assert repeated_in_pairs(lambda q, w: q + w, 3)(jnp.zeros(()), jnp.ones(())) == 6
