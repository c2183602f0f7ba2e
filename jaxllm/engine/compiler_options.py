"""What XLA is told of a step's program."""

from typing import Any

from jaxllm.engine import medium_batch, small_batch
from jaxllm.engine.spec import RunnerSpec
from jaxllm.engine.step_shape import StepShape


def compiler_options(spec: RunnerSpec, shape: StepShape) -> dict[str, Any]:
    """XLA options of a step."""
    if spec.platform != "gpu":
        return {}
    # Rematerialization takes every update of the cache for a copy, finds several times the device's memory in use, and
    # spends its time on computing values twice in order to save some.
    options: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}
    if not autotuned(spec, shape):
        options |= {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return options


def autotuned(spec: RunnerSpec, shape: StepShape) -> bool:
    """Whether XLA chooses the matrix products of a program by trying them on the device.

    Of many tokens cuBLAS multiplies at 700 TFLOP/s as it is, faster than the kernels that XLA generates and chooses,
    and there is nothing to choose (H200, Qwen3-0.6B, 16,384 tokens: 45.4 and 47.9 ms; three such programs compiled in 4
    and 16 s). Of few tokens the generated kernels win (64 rows: 2.76 and 3.18 ms), but only those chosen on the device:
    what XLA takes without trying is six to twelve times as slow. Where our own kernels multiply, little is left to
    choose for. And where programs are compiled when the cache has the memory already, nothing can be tried.
    """
    if spec.platform != "gpu" or spec.config.enforce_eager or not shape.decode:
        return False
    sizes = (spec.attention, spec.run_time, spec.layout, shape.rows, spec.dtype)
    return not (small_batch.fits(*sizes) or medium_batch.fits(*sizes, spec.multiprocessors))


def compiled_by_workers(spec: RunnerSpec, shape: StepShape) -> bool:
    """Whether a process that has none of the devices compiles a program: those that are not `autotuned`.

    Steps with prompts that were compiled so are as fast: 447,000 and 547,000 tokens/s (16 x 4,095 and 256 x 1,000 on an
    H200, Qwen3-0.6B) beside 453,000 and 545,000 on the same machine.
    """
    return not autotuned(spec, shape)
