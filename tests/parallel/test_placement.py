"""A caller's mesh: any names, further axes, part of the devices, any axis types; and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jaxllm.parallel.mesh import DATA, TENSOR, make_mesh
from jaxllm.parallel.placement import Placement

P = PartitionSpec


def test_the_engine_s_own_mesh() -> None:
    placement = Placement.of(make_mesh(4))
    assert (placement.tensor_parallel_size, placement.data_parallel_size) == (4, 1)
    assert placement.spec(TENSOR, None) == P("tensor", None) and placement.replicated.spec == P()
    assert placement.kv_spec == P(None, None, None, "tensor", None, None)
    assert placement.heads_spec == P(None, "tensor", None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, AxisType.Manual])
def test_a_mesh_with_further_axes(kind: AxisType) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "fsdp", "tensor"), axis_types=(kind,) * 3)
    placement = Placement.of(mesh, data_axis="replica")
    assert (placement.tensor_parallel_size, placement.data_parallel_size) == (2, 2)
    assert placement.kv_spec == P(None, None, "replica", "tensor", None, None)
    assert placement.mesh.axis_types == (AxisType.Auto,) * 3 and placement.mesh.shape == mesh.shape
    assert (placement.mesh.devices == mesh.devices).all()
    assert str(placement) == "mesh (replica 2, fsdp 2, tensor 2), tensor axis 'tensor', data axis 'replica'"


def test_several_axes_as_one() -> None:
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"))
    placement = Placement.of(mesh, ["fsdp", "tensor"])
    assert placement.tensor_parallel_size == 8 and placement.spec(TENSOR) == P(("fsdp", "tensor"))
    array = jax.device_put(jnp.arange(16), placement.sharding(TENSOR))
    assert [int(shard.data[0]) for shard in array.addressable_shards] == list(range(0, 16, 2))


def test_no_parallelism_and_part_of_the_devices() -> None:
    placement = Placement.of(Mesh(np.array(jax.devices()[5:7]), ("batch",)), None)
    assert placement.tensor_parallel_size == 1 and placement.spec(TENSOR, DATA) == P(None, None)
    assert placement.local_devices == jax.devices()[5:7]
    assert jax.device_put(jnp.zeros(3), placement.replicated).devices() == set(jax.devices()[5:7])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"tensor_axis='tensor' names 'tensor', which the mesh does not have. Its axes: 'x' of 2, 'y' of 4; None"),
        ({"tensor_axis": "x", "data_axis": "z"}, r"data_axis='z' names 'z'"),
        ({"tensor_axis": "x", "data_axis": ("y", "x")}, r"share x: an axis has one part"),
        ({"tensor_axis": ("x", "x")}, r"tensor_axis=\('x', 'x'\) names an axis twice"),
    ],
)
def test_axes_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement.of(jax.make_mesh((2, 4), ("x", "y")), **arguments)


def test_what_is_no_mesh() -> None:
    with pytest.raises(
        TypeError, match=r"is a AbstractMesh: a jax.sharding.Mesh is needed, for instance jax.make_mesh"
    ):
        Placement.of(AbstractMesh((2,), ("tensor",)))  # type: ignore[arg-type]


def test_a_mesh_of_other_processes_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    with pytest.raises(ValueError, match=r"has no device of this process \(3 of 1\)"):
        Placement.of(make_mesh(2))


def test_tracing_inside_the_caller_s_mesh() -> None:
    """An explicit mesh in force would refuse the engine's arrays, which lie on the same devices but an Auto mesh."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    placement = Placement.of(mesh)
    weight = jax.device_put(jnp.ones((8, 4)), placement.sharding(TENSOR, None))

    def double(weight: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda w: w * 2, mesh=placement.mesh, in_specs=placement.spec(TENSOR), out_specs=placement.spec(TENSOR)
        )(weight).T

    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="context mesh"):
            jax.jit(double)(weight)
        with placement.own_mesh():
            doubled = jax.jit(double)(weight)
    np.testing.assert_array_equal(np.asarray(doubled), np.full((4, 8), 2.0))
