"""A barrier among thread blocks that run at the same time."""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from kernels_pallas.warpgroup import Ref

FENCE = "fence.proxy.async.global;"
"""Between what threads write by themselves and what TMA reads: needed on either side of the barrier."""

ARRIVE_AND_WAIT = """{
    .reg .pred early;
    .reg .u32 seen;
    red.release.gpu.global.add.u32 [$0], 1;
WAIT:
    ld.acquire.gpu.global.u32 seen, [$0];
    setp.lt.u32 early, seen, $1;
    @early bra WAIT;
}"""

RESET = "st.relaxed.gpu.global.u32 [$0], 0;"


def wait_for_all(counters: Ref, index: int, barriers: int, blocks: int) -> None:
    """Wait until `blocks` thread blocks have come here; each then sees what the others wrote before.

    Args:
        counters: int32 in device memory, one for each barrier of a launch; zeros before the first launch.
        index: which barrier, from 0 in turn. When all have come here all have left the one before it, whose counter is
            set to zero again; that of a launch's last barrier by the next launch's first.
        barriers: of a launch, two or more.
        blocks: how many take part; all of them must be running or able to start.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_: object, counters: ir.Value) -> None:
        utils.inline_ptx(FENCE, has_side_effects=True)  # every thread, of its own writes
        utils.warpgroup_barrier()
        with utils.single_thread(utils.ThreadSubset.WARPGROUP):
            utils.inline_ptx(
                ARRIVE_AND_WAIT, _pointer(counters, index), utils.c(blocks, _word()), has_side_effects=True
            )
            utils.inline_ptx(RESET, _pointer(counters, (index - 1) % barriers), has_side_effects=True)
        utils.warpgroup_barrier()
        utils.inline_ptx(FENCE, has_side_effects=True)

    emit(counters)


def _word() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _pointer(counters: ir.Value, index: int) -> ir.Value:
    return utils.memref_ptr(utils.memref_slice(counters, utils.ds(index, 1)))
