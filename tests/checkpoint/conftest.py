"""What the checkpoint tests share: a mesh of the one CPU device, and torch's view of a written checkpoint."""

import jax
import pytest
from jax.sharding import Mesh


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((1, 1), ("data", "tensor"), devices=jax.devices()[:1])
