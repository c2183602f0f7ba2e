"""All between one layer's attention and the next one's, for decode steps, in one launch.

Output projection, residual, norm, MLP, residual, norm, and q, k and v of the next layer with their norms and rotary
embedding: six phases, between which all thread blocks wait for one another (a "megakernel"; loading the next phase's
weights before the wait is Hazy Research's idea, 2025). Launched one after another, the same work is a dozen kernels.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kernels_pallas.hopper import MULTIPROCESSORS
from kernels_pallas.interlayer.config import HEAD_DIM, TOKENS, InterlayerShape, LayerWeights, refusal
from kernels_pallas.interlayer.grid_barrier import wait_for_all
from kernels_pallas.interlayer.phases import PHASES, Inputs, Outputs, phases
from kernels_pallas.interlayer.product import Scratch
from kernels_pallas.warpgroup import Ref

BARRIERS = PHASES - 1
"""Counters that a launch needs."""


def interlayer(
    attended: Float[Array, "tokens heads head_dim"],
    x: Float[Array, "tokens hidden"],
    weights: LayerWeights,
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    counters: Int32[Array, "barriers"],
    *,
    eps: float,
    multiprocessors: int = MULTIPROCESSORS,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[
    Float[Array, "tokens hidden"],
    Float[Array, "tokens heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
]:
    """The state before the next layer, and its q, k and v there, normed and rotated.

    Args:
        attended: output of a layer's attention, bfloat16, like all but the angles. Tokens are a multiple of 64.
        x: the state before that attention.
        weights: of its layer behind the attention, and of the next before it.
        cos: cosines of the tokens' angles, float32, with the scaling of the rotary embedding, if any.
        sin: sines.
        counters: `BARRIERS` zeros, or what an earlier launch left of them; no other launch uses them at the same time.
        eps: of all norms.
        multiprocessors: no more than the GPU has, or the kernel does not end: its thread blocks wait for one another.
        interpret: run in Pallas's GPU interpreter (on a CPU), phase after phase.

    Raises:
        ValueError: for shapes or dtypes the kernel cannot run.
    """
    (tokens, heads, head_dim), hidden = attended.shape, x.shape[1]
    kv_heads, mlp = weights.k.shape[0] // HEAD_DIM, weights.gate.shape[0]
    reason = refusal(hidden=hidden, mlp=mlp, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=x.dtype)
    if reason is not None:
        raise ValueError(reason)
    if tokens % TOKENS:
        raise ValueError(f"x has {tokens} tokens; the kernel between attentions takes multiples of {TOKENS}. Pad x.")
    weights.check(hidden=hidden, mlp=mlp, heads=heads, kv_heads=kv_heads, dtype=x.dtype)
    shape = InterlayerShape(tokens, hidden, mlp, heads, kv_heads, multiprocessors, eps, dtype=x.dtype)
    norms = () if weights.q_norm is None or weights.k_norm is None else (weights.q_norm, weights.k_norm)
    operands = (
        counters, attended.reshape(tokens, -1), x, cos, sin, weights.o, weights.mlp_norm, weights.gate, weights.up,
        weights.down, weights.norm, weights.q, weights.k, weights.v, *norms
    )  # fmt: skip
    return _interlayer(operands, shape=shape, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))
def _interlayer(
    operands: tuple[jax.Array, ...], *, shape: InterlayerShape, interpret: plgpu.InterpretGPUParams | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`interlayer` of checked arguments: under its own `jit`, all layers of a program share one lowering."""
    results = Outputs.of(shape)

    def kernel(only: int | None, *refs: Ref) -> None:
        inputs, refs = Inputs(*refs[: len(operands)]), refs[len(operands) :]
        outputs, scratch = Outputs(*refs[: len(results)]), Scratch(*refs[len(results) :])
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
                wait_for_all(inputs.counters, index, BARRIERS, shape.blocks)

    def call(only: int | None, outputs: tuple[jax.Ref, ...] | None) -> tuple[jax.Array, ...]:
        # Outputs follow the inputs either as aliased inputs or as outputs.
        return plgpu.kernel(
            functools.partial(kernel, only),
            out_type=tuple(results) if outputs is None else (),
            grid=(shape.blocks,),
            grid_names=("block",),
            scratch_types=list(Scratch.types(shape)),
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            kernel_name="interlayer",
            interpret=interpret,
        )(*operands, *(outputs or ()))

    if interpret is None:
        outputs = Outputs(*call(None, None))
    else:  # where thread blocks run one after another, and could not wait for one another
        held = tuple(jax.new_ref(jnp.zeros(each.shape, each.dtype)) for each in results)
        for phase in range(PHASES):
            call(phase, held)
        outputs = Outputs(*(ref[...] for ref in held))
    q, k, v = (each.reshape(shape.tokens, -1, HEAD_DIM) for each in (outputs.q, outputs.k, outputs.v))
    return outputs.x, q, k, v
