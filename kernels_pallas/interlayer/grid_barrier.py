"""A barrier among thread blocks that run at the same time."""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from kernels_pallas.warpgroup import Ref

FENCE = "fence.proxy.async.global;"
"""Between what threads write by themselves and what TMA reads: needed on either side of the barrier."""

ARRIVE_AND_WAIT = """{{
    .reg .pred early;
    .reg .u32 before, seen, all;
    atom.release.gpu.global.add.u32 before, [$0], 1;
    div.u32 all, before, {blocks};
    mad.lo.u32 all, all, {blocks}, {blocks};
WAIT:
    ld.acquire.gpu.global.u32 seen, [$0];
    setp.lt.u32 early, seen, all;
    @early bra WAIT;
}}"""


def wait_for_all(counter: Ref, blocks: int) -> None:
    """Wait until `blocks` thread blocks have come here; each then sees what the others wrote before.

    Args:
        counter: one int32 in device memory, zero before the first launch. It counts arrivals and is never set back:
            they come in turns of `blocks`, so that an arrival's own number tells up to which one to wait. Its 32 bits
            hold those of some ten thousand steps of a model with thirty layers.
        blocks: how many take part; all of them must be running or able to start.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_: object, counter: ir.Value) -> None:
        utils.inline_ptx(FENCE, has_side_effects=True)  # every thread, of its own writes
        utils.warpgroup_barrier()
        with utils.single_thread(utils.ThreadSubset.WARPGROUP):
            utils.inline_ptx(ARRIVE_AND_WAIT.format(blocks=blocks), utils.memref_ptr(counter), has_side_effects=True)
        utils.warpgroup_barrier()
        utils.inline_ptx(FENCE, has_side_effects=True)

    emit(counter)
