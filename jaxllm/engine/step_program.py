"""What one step computes: the model over its tokens, one sampled token per row."""

from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Int32

from jaxllm.cache.kv_array import KV_SPEC
from jaxllm.engine.step_shape import PackedLayout, StepShape
from jaxllm.layers.paged_attention import PagedBatch, QueryTiles, paged_attention, query_tiles, write_kv
from jaxllm.models.decoder import Attend, Decoder
from jaxllm.parallel.mesh import TENSOR
from jaxllm.sampling.sampler import sample

KVArray = Float[Array, "layers 2 blocks kv_heads block_size head_dim"]
StepFunction = Callable[[Sequence[jax.Array], KVArray, Int32[Array, "size"]], tuple[Int[Array, "rows"], KVArray]]

_HEADS = PartitionSpec(None, TENSOR, None)


def step_function(
    graphdef: nnx.GraphDef, treedef: jax.tree_util.PyTreeDef, shape: StepShape, mesh: Mesh, num_valid_tokens: int
) -> StepFunction:
    """The function that a program of `shape` is compiled from: (weight leaves, kv, packed step) -> (tokens, kv).

    Args:
        graphdef: static part of the model (`nnx.split`).
        treedef: structure of its state, for which the leaves are given.
        shape: tokens, rows and family.
        mesh: attention runs under `shard_map` over its axis `tensor`, each device on its own KV heads.
        num_valid_tokens: ids that the tokenizer knows.
    """
    layout = PackedLayout(shape)

    def step(leaves: Sequence[jax.Array], kv: KVArray, packed: Int32[Array, "size"]) -> tuple[Array, Array]:
        model: Decoder = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        block_size = kv.shape[4]
        inputs = layout.unpack(packed, kv.shape[2] * block_size, block_size)
        attend = _paged_attend(inputs.batch, 1 if shape.decode else shape.tokens, mesh)
        hidden, kv = model.paged(inputs.tokens, inputs.positions, attend, kv)
        return sample(model.logits(hidden[inputs.last_token]), inputs.sampling, num_valid_tokens), kv

    return step


def _paged_attend(batch: PagedBatch, max_q_len: int, mesh: Mesh) -> Attend[KVArray]:
    tiles = query_tiles(batch, max_q_len=max_q_len)

    def attend(layer: int, q: Array, k: Array, v: Array, kv: KVArray) -> tuple[Array, KVArray]:
        def local(
            q: Array, k: Array, v: Array, kv: KVArray, batch: PagedBatch, tiles: QueryTiles
        ) -> tuple[Array, KVArray]:
            kv = write_kv(kv, layer, k, v, batch.slots)
            return paged_attention(q, kv, layer, batch.block_tables, tiles), kv

        specs = (_HEADS, _HEADS, _HEADS, KV_SPEC, PartitionSpec(), PartitionSpec())
        sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(_HEADS, KV_SPEC), check_vma=False)
        return sharded(q, k, v, kv, batch, tiles)

    return attend
