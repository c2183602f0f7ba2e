"""The two ways a kernel is run here: interpreted on the CPU with race detection, or compiled for the GPU at hand."""

import contextlib
import io
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
BETWEEN_BLOCKS = ("paged_decode/merge.py", "small_batch/pieces.py")
"""Where a thread block reads what others wrote. The interpreter runs blocks one after another, each with a clock of its
own, and so cannot tell that the reads come later; on a GPU a counter sees to it."""

on_gpu = jax.default_backend() == "gpu"


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def execute(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`execute(kernel, *args, **kwargs)`: run a kernel of this package either way; no data race may be found."""

    def interpreted(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert max(os.cpu_count() or 1, jax.device_count("cpu")) >= 3
        # Scores of unwritten slots are NaN until they are masked; NumPy may warn of the product that makes them.
        warnings.filterwarnings("ignore", "invalid value encountered in matmul", RuntimeWarning)
        interpreter.reset_gpu_interpret_mode_state()
        with contextlib.redirect_stdout(io.StringIO()) as told:
            result = kernel(*args, **kwargs, interpret=plgpu.InterpretGPUParams(detect_races=True))
            jax.block_until_ready(result)
        races = told.getvalue().split("RACE DETECTED")[1:]
        assert bool(races) == interpreter.get_races().races_found
        unexpected = [race for race in races if not any(file in race.partition("clock:")[0] for file in BETWEEN_BLOCKS)]
        assert not unexpected, "".join(unexpected)
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
