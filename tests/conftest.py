"""What all tests share: eight CPU devices, quick compilation and its cache, the marker `gpu`, tiny models."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny import tiny_checkpoint

# Before the backend starts: tensor parallelism is tested on several devices of one CPU.
jax.config.update("jax_num_cpu_devices", 8)

# Before PyTorch is imported, here or by a process that a test starts: its threads spin while they wait for one another,
# and processes that run tests side by side have more of them than cores. Tiny models are no slower with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG_FILES = ("test_equivalence", "test_smollm2", "test_decoder", "test_request_fields", "test_mesh", "test_examples")
"""They begin first, so that at the end no process works on a long file while the other has nothing left."""

OPTIMIZATION = "jax_disable_most_optimizations"

_cache = tempfile.TemporaryDirectory(prefix="jaxllm-tests-")
jax.config.update("jax_compilation_cache_dir", _cache.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with long files; skip GPU tests where there is none, and compile quickly there.

    XLA computes the same by plainer machine code, in half the compile time. `full_optimization` is for programs that
    run so much that they take longer then, and for the model that users see first.
    """
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)
    if jax.default_backend() != "gpu":
        jax.config.update(OPTIMIZATION, True)
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="module")
def full_optimization() -> Iterator[None]:
    """Programs of this module are compiled as users compile them."""
    jax.config.update(OPTIMIZATION, False)
    yield
    jax.config.update(OPTIMIZATION, jax.default_backend() != "gpu")


@pytest.fixture(scope="module")
def few_programs() -> Iterator[None]:
    """Engines that are made in this module have two sizes of steps at most, and plain draws do without filters."""
    # Not at the top: what is imported there has no types checked at run time.
    from jaxllm.engine import spec
    from jaxllm.sampling.variant import PLAIN, everything

    of = spec.shape_options
    with pytest.MonkeyPatch.context() as patched:
        samplers = ((PLAIN, 64), (everything(), 64))
        patched.setattr(spec, "shape_options", lambda platform: of(platform) | {"samplers": samplers})
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a tiny checkpoint; arguments as `tiny_checkpoint`."""

    def write(family: str = "qwen3", **options: Any) -> Path:
        return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, **options)

    return write


@pytest.fixture(scope="session")
def small_llm(tiny: Callable[..., Path]) -> Iterator[Any]:
    """One small engine for tests that only need some engine; they leave nothing behind in it."""
    from jaxllm import LLM

    yield LLM(
        str(tiny()),
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        kvcache_block_size=16,
        num_kvcache_blocks=128,
    )


@pytest.fixture(scope="module")
def plain_sampler() -> Iterator[None]:
    """Programs with no more of a sampler than greedy requests need, as on GPUs: a third of the time to compile."""
    from jaxllm.sampling.variant import SamplerVariant

    options = {"samplers": ((SamplerVariant(suppress=True), 16),)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxllm.engine.spec.shape_options", lambda platform: dict(options))
        yield
