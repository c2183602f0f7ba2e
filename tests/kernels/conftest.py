"""The two ways a kernel is run here: interpreted on the CPU with race detection, or compiled for the GPU at hand."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

on_gpu = jax.default_backend() == "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def execute(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`execute(kernel, *args, **kwargs)`: run a kernel of this package either way; no data race may be found."""

    def interpreted(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Scores of unwritten slots are NaN until they are masked; NumPy may warn of the product that makes them.
        warnings.filterwarnings("ignore", "invalid value encountered in matmul", RuntimeWarning)
        interpreter.reset_gpu_interpret_mode_state()
        result = kernel(*args, **kwargs, interpret=plgpu.InterpretGPUParams(detect_races=True))
        jax.block_until_ready(result)
        assert not interpreter.get_races().races_found
        return result

    def compiled(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return jax.jit(lambda *args: kernel(*args, **kwargs))(*args)

    if request.param == "compiled":
        yield compiled
    else:
        if on_gpu:
            pytest.skip("interpreted on CPU machines only")
        yield interpreted
        interpreter.reset_gpu_interpret_mode_state()
