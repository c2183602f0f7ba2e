"""The KV cache as one array: its shape, its dtype and scales, its bytes, its sharding, its creation."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from jaxllm.layers.kv_quantization import QUANTIZED_DTYPE, KVScales
from jaxllm.models.config import ModelConfig
from jaxllm.parallel.placement import Placement

LayerScales = tuple[tuple[float, float], ...]
"""Of each layer, the factors of K and of V."""


@dataclass(frozen=True)
class KVLayout:
    """Shape of the cache but for the number of blocks, and what its numbers mean.

    Attributes:
        num_layers: layers of the model.
        num_kv_heads: KV heads over all devices of a model, repeated ones included.
        block_size: tokens per block.
        head_dim: elements per head.
        dtype: of the elements; uint8 for the bits of a float8, where XLA attends (`as_bytes`).
        tensor_parallel_size: devices that the heads are spread over.
        scales: for each layer of a quantized cache, what stored K and V are multiplied with; None where the cache has
            the model's dtype. They are constants of the programs: all layers share one trace, which picks its own, and
            where all are 1 the compiler leaves them out.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: jnp.dtype
    tensor_parallel_size: int = 1
    scales: LayerScales | None = None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        block_size: int,
        dtype: jnp.dtype,
        tensor_parallel_size: int,
        scales: LayerScales | None = None,
    ) -> "KVLayout":
        """The layout for a run-time configuration (`jaxllm.models.params.runtime_config`)."""
        kv_heads, layers = config.num_key_value_heads, config.num_hidden_layers
        return cls(layers, kv_heads, block_size, config.head_dim, jnp.dtype(dtype), tensor_parallel_size, scales)

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """`[layers, 2, blocks, kv_heads, block_size, head_dim]`: a page of one head is contiguous."""
        return (self.num_layers, 2, num_blocks, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one device, K and V of all layers."""
        heads = self.num_kv_heads // self.tensor_parallel_size
        return 2 * self.num_layers * self.block_size * heads * self.head_dim * self.dtype.itemsize

    def as_bytes(self) -> "KVLayout":
        """The same with uint8 in place of float8: XLA writes bytes in place, but on a CPU not float8."""
        return replace(self, dtype=jnp.dtype(jnp.uint8)) if self.dtype == QUANTIZED_DTYPE else self

    def scales_of(self, layer: int | Int[Array, ""]) -> KVScales | None:
        """The factors of a layer's K and V; None where the cache has the model's dtype."""
        return None if self.scales is None else jnp.asarray(np.asarray(self.scales, np.float32))[layer]

    def sharding(self, placement: Placement) -> NamedSharding:
        """How the array lies on the mesh."""
        return NamedSharding(placement.mesh, placement.kv_spec)

    def abstract(self, num_blocks: int, placement: Placement) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of `num_blocks` on each replica, for compiling before the array exists."""
        shape = self.shape(num_blocks * placement.data_parallel_size)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.sharding(placement))

    def allocate(self, num_blocks: int, placement: Placement) -> jax.Array:
        """The array, zero-filled where it lies: there is no copy on the host and no second one on a device."""
        array = self.abstract(num_blocks, placement)
        with placement.own_mesh():
            return jax.jit(lambda: jnp.zeros(array.shape, array.dtype), out_shardings=array.sharding)()
