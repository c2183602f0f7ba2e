"""All between one layer's attention and the next one's, for decode steps, in one launch.

Output projection, residual, norm, MLP, residual, norm, and q, k and v of the next layer with their norms and rotary
embedding: six phases, between which all thread blocks wait for one another (a "megakernel"; loading the next phase's
weights before the wait is Hazy Research's idea, 2025). Launched one after another, the same work is a dozen kernels.
What precedes the first layer's attention, and what follows the last one's, are launches of some of the phases.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kernels_pallas.hopper import MULTIPROCESSORS
from kernels_pallas.interlayer.config import (
    HEAD_DIM,
    TOKENS,
    InterlayerShape,
    WeightsBefore,
    WeightsBehind,
    check_weights,
    refusal,
)
from kernels_pallas.interlayer.grid_barrier import wait_for_all
from kernels_pallas.interlayer.phases import Inputs, Outputs, phases
from kernels_pallas.interlayer.product import Scratch
from kernels_pallas.warpgroup import Ref

State = Float[Array, "tokens hidden"]
Heads = tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]
Counter = Int32[Array, "1"]


def interlayer(
    attended: Float[Array, "tokens heads head_dim"],
    x: State,
    behind: WeightsBehind,
    before: WeightsBefore,
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    counter: Counter,
    *,
    eps: float,
    multiprocessors: int = MULTIPROCESSORS,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[State, Heads]:
    """The state before the next layer, and its q, k and v there, normed and rotated.

    Args:
        attended: output of a layer's attention, bfloat16, like all but the angles. Tokens are a multiple of 64.
        x: the state before that attention.
        behind: weights of its layer.
        before: weights of the next layer.
        cos: cosines of the tokens' angles, float32, with the scaling of the rotary embedding, if any.
        sin: sines.
        counter: zero, or what an earlier launch left of it; no other launch uses it at the same time.
        eps: of all norms.
        multiprocessors: no more than the GPU has, or the kernel does not end: its thread blocks wait for one another.
            The same for all launches with a counter.
        interpret: run in Pallas's GPU interpreter (on a CPU), phase after phase.

    Raises:
        ValueError: for shapes or dtypes the kernel cannot run.
    """
    shape = _shape(x, attended.shape[1:], before.k.shape[0], behind.gate.shape[0], multiprocessors, eps)
    operands = {"attended": _flat(attended), "cos": cos, "sin": sin, **vars(behind), **vars(before)}
    outputs = _checked(shape, operands, x, counter, interpret)
    return outputs["x"], _heads(outputs)


def before_attention(
    x: State,
    weights: WeightsBefore,
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    counter: Counter,
    *,
    eps: float,
    multiprocessors: int = MULTIPROCESSORS,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Heads:
    """q, k and v of a first layer: as the end of `interlayer`, of a state `x` that nothing is added to."""
    heads = weights.q.shape[0] // HEAD_DIM, HEAD_DIM
    shape = _shape(x, heads, weights.k.shape[0], TOKENS, multiprocessors, eps, behind=False)
    return _heads(_checked(shape, {"cos": cos, "sin": sin, **vars(weights)}, x, counter, interpret))


def behind_attention(
    attended: Float[Array, "tokens heads head_dim"],
    x: State,
    weights: WeightsBehind,
    norm: Float[Array, "hidden"],
    counter: Counter,
    *,
    eps: float,
    multiprocessors: int = MULTIPROCESSORS,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> State:
    """The state behind a last layer after a model's `norm`: as the beginning of `interlayer`."""
    shape = _shape(x, attended.shape[1:], HEAD_DIM, weights.gate.shape[0], multiprocessors, eps, before=False)
    operands = {"attended": _flat(attended), "norm": norm, **vars(weights)}
    return _checked(shape, operands, x, counter, interpret)["normed"]


def _flat(heads: jax.Array) -> jax.Array:
    return heads.reshape(heads.shape[0], -1)


def _heads(outputs: dict[str, jax.Array]) -> Heads:
    q, k, v = (outputs[name].reshape(outputs[name].shape[0], -1, HEAD_DIM) for name in ("q", "k", "v"))
    return q, k, v


def _shape(
    x: jax.Array, heads: tuple[int, ...], kv_size: int, mlp: int, multiprocessors: int, eps: float, **halves: bool
) -> InterlayerShape:
    (tokens, hidden), (count, head_dim), kv_heads = x.shape, heads, kv_size // HEAD_DIM
    reason = refusal(hidden=hidden, mlp=mlp, heads=count, kv_heads=kv_heads, head_dim=head_dim, dtype=x.dtype)
    if reason is not None:
        raise ValueError(reason)
    if tokens % TOKENS:
        raise ValueError(f"x has {tokens} tokens; the kernel between attentions takes multiples of {TOKENS}. Pad x.")
    return InterlayerShape(tokens, hidden, mlp, count, kv_heads, multiprocessors, eps, dtype=x.dtype, **halves)


def _checked(
    shape: InterlayerShape,
    operands: dict[str, Any],
    x: jax.Array,
    counter: jax.Array,
    interpret: plgpu.InterpretGPUParams | None,
) -> dict[str, jax.Array]:
    """The outputs that there are, by their names in `Outputs`."""
    check_weights(shape, {name: value for name, value in operands.items() if name not in ("attended", "cos", "sin")})
    there = {name: value for name, value in operands.items() if value is not None}
    return _launch({"counter": counter, "x": x, **there}, shape=shape, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))
def _launch(
    operands: dict[str, jax.Array], *, shape: InterlayerShape, interpret: plgpu.InterpretGPUParams | None
) -> dict[str, jax.Array]:
    """Of checked operands: under its own `jit`, all layers of a program share one lowering."""
    made = {name: each for name, each in Outputs.of(shape)._asdict().items() if each is not None}

    def kernel(only: int | None, *refs: Ref) -> None:
        inputs, refs = Inputs(**dict(zip(operands, refs, strict=False))), refs[len(operands) :]
        outputs, scratch = Outputs(**dict(zip(made, refs, strict=False))), Scratch(*refs[len(made) :])
        steps = phases(shape, lax.axis_index("block"), inputs, outputs, scratch)
        if only is not None:
            steps = [steps[only]]
        prefetches = [phase.prefetch for phase in steps if phase.prefetch is not None]
        if prefetches:
            prefetches.pop(0)()
        for index, phase in enumerate(steps):
            phase.run()
            if phase.prefetch is not None and prefetches:  # `Scratch` is free, and nothing in between uses it
                prefetches.pop(0)()
            if index < len(steps) - 1:
                wait_for_all(inputs.counter, shape.blocks)

    def call(only: int | None, outputs: tuple[jax.Ref, ...] | None) -> tuple[jax.Array, ...]:
        # Outputs follow the inputs either as aliased inputs or as outputs.
        return plgpu.kernel(
            functools.partial(kernel, only),
            out_type=tuple(made.values()) if outputs is None else (),
            grid=(shape.blocks,),
            grid_names=("block",),
            scratch_types=list(Scratch.types(shape)),
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            kernel_name="interlayer",
            interpret=interpret,
        )(*operands.values(), *(outputs or ()))

    if interpret is None:
        results = call(None, None)
    else:  # where thread blocks run one after another, and could not wait for one another
        held = tuple(jax.new_ref(jnp.zeros(each.shape, each.dtype)) for each in made.values())
        for phase in range(shape.phases):
            call(phase, held)
        results = tuple(ref[...] for ref in held)
    return dict(zip(made, results, strict=True))
