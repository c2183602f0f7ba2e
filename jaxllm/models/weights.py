"""A model as a static graph definition and a flat list of arrays.

Programs take the leaves as arguments and rebuild the module while they are traced, so that a step costs no walk over
the module (Flax's `nnx.jit` would do one on every call).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder


@dataclass(frozen=True)
class Weights:
    """Parameters on the devices.

    Attributes:
        config: run-time shapes.
        graphdef: static part of the module.
        treedef: structure of its state.
        paths: dotted path of each leaf.
        leaves: the arrays, in the order of `paths`; or their shapes, dtypes and shardings (`abstract`).
        owned: paths of the arrays that nobody but the engine holds, which may be freed before their successors come.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    treedef: jax.tree_util.PyTreeDef
    paths: tuple[str, ...]
    leaves: tuple[jax.Array | jax.ShapeDtypeStruct, ...]
    owned: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: DTypeLike,
        parameters: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
        owned: Collection[str] = (),
    ) -> "Weights":
        """Put `parameters`, by path, into a module of run-time shapes `config`, without allocating a second one.

        Shapes, dtypes and shardings of parameters that are not there yet give what `abstract` gives.
        """
        abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
        flat = nnx.to_flat_state(state)
        paths = tuple(".".join(map(str, path)) for path, _ in flat)
        leaves = tuple(parameters[path] for path in paths)
        return cls(config, graphdef, jax.tree.structure(state), paths, leaves, frozenset(owned))

    def with_leaves(self, leaves: tuple[jax.Array, ...]) -> "Weights":
        """The same module with other arrays."""
        return replace(self, leaves=leaves)

    def abstract(self) -> "Weights":
        """Shapes, dtypes and shardings in place of the arrays: to compile for, without keeping the arrays alive."""
        structs = (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in self.leaves)
        return replace(self, leaves=tuple(structs), owned=frozenset())

    def model(self) -> Decoder:
        """The module, holding these very arrays."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, self.leaves))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters over all devices, replicas counted once."""
        return sum(leaf.nbytes for leaf in self.leaves)
