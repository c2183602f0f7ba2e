"""Finding the thread block that finishes last of those whose results have to be put together."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from kernels_pallas.hopper import MATRIX_TILES
from kernels_pallas.warpgroup import Ref

SCALAR = plgpu.Layout.WG_SPLAT()

COUNT_DOWN = """{
    .reg .pred last;
    atom.acq_rel.gpu.global.add.s32 $0, [$1], -1;
    setp.eq.s32 last, $0, 1;
    @last st.global.s32 [$1], $2;
}"""


def count_down(pending: Ref, pieces: jax.Array, shared: Ref) -> jax.Array:
    """Take one off `pending[0]`, of `pieces`, and return what it was: 1 for the last block, which finds all pieces.

    Everything the block has written to device memory before is visible to a block that sees a lower number. The last
    one restores `pieces`. `shared` is a tile of `MATRIX_TILES`, of which one word is used. The interpreter has no such
    operation.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(transforms=MATRIX_TILES), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR),
    )
    def emit(_: object, pending: ir.Value, shared: ir.Value, pieces: FragmentedArray) -> FragmentedArray:
        word, place = ir.IntegerType.get_signless(32), utils.memref_ptr(shared)
        utils.warpgroup_barrier()  # all threads have written
        with utils.single_thread(utils.ThreadSubset.WARPGROUP):
            before = utils.inline_ptx(
                COUNT_DOWN,
                utils.memref_ptr(pending),
                pieces.registers.item(),
                result_types=word,
                has_side_effects=True,
            )
            llvm.store(before, place)
        utils.warpgroup_barrier()
        return FragmentedArray.splat(llvm.load(word, place), (), is_signed=True)

    return emit(pending, shared, pieces)
