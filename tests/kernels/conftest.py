"""The two ways a kernel is run here: interpreted on the CPU with race detection, or compiled for the GPU at hand."""

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

# The interpreter runs each warpgroup in a thread of the CPU client's pool, and the prefill kernel's three wait for one
# another. The eight CPU devices that tests/conftest.py asks for give the pool eight threads, however few the cores.
on_gpu = jax.default_backend() == "gpu"


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def execute(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`execute(kernel, *args, **kwargs)`: run a kernel of this package either way; no data race may be found."""

    def interpreted(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert max(os.cpu_count() or 1, jax.device_count("cpu")) >= 3
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
