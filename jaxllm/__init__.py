"""jaxllm: fast, honest LLM inference in JAX on NVIDIA GPUs.

    from jaxllm import LLM, SamplingParams
    llm = LLM("Qwen/Qwen3-0.6B")
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

Imports point one way: commands -> llm -> engine -> models, cache, memory, sampling, text, checkpoint -> layers ->
kernels_pallas. The names below are loaded when they are first used, so that `import jaxllm` and `--help` are quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxllm.version import __version__

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM
    from jaxllm.config import EngineConfig
    from jaxllm.llm import LLM
    from jaxllm.outputs import CompletionOutput, RequestOutput, StreamDelta
    from jaxllm.sampling_params import SamplingParams
    from jaxllm.structured.params import StructuredOutputsParams

_HOMES = {
    "AsyncLLM": "jaxllm.async_llm",
    "LLM": "jaxllm.llm",
    "EngineConfig": "jaxllm.config",
    "SamplingParams": "jaxllm.sampling_params",
    "RequestOutput": "jaxllm.outputs",
    "CompletionOutput": "jaxllm.outputs",
    "StreamDelta": "jaxllm.outputs",
    "StructuredOutputsParams": "jaxllm.structured.params",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
