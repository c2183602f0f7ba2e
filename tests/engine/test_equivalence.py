"""The output of a request depends on nothing but the request: not on neighbours, pool size, chunks, prefix hits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine import spec

pytestmark = pytest.mark.usefixtures("few_programs", "full_optimization")

NUM_REQUESTS = 200
BASE = {
    "dtype": "float32",
    "max_num_seqs": 24,
    "max_num_batched_tokens": 512,
    "max_model_len": 768,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 1200,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def checkpoint(tiny: Any) -> Path:
    return tiny()


@pytest.fixture(scope="module")
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 600 tokens, a third of which begin with one of four long prefixes; outputs of 1 to 120."""
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, 330, n).tolist() for n in (16, 64, 200, 331)]
    prompts, params = [], []
    for i in range(NUM_REQUESTS):
        prompt = rng.integers(0, 330, rng.integers(1, 601)).tolist()
        if i % 3 == 0:
            prefix = prefixes[rng.integers(4)]
            prompt = (prefix + prompt)[: max(len(prefix) + 1, len(prompt))][:600]
        if i % 17 == 16:
            prompt = prompts[i - 9]  # the very same prompt again
        prompts.append(prompt)
        params.append(SamplingParams(temperature=0, max_tokens=int(rng.integers(1, 121)), ignore_eos=True))
    return prompts, params


def run_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made from now on run several decode steps in a program, as on a GPU."""
    ours, on_gpu = spec.shape_options, spec.shape_options("gpu")["loops"]
    monkeypatch.setattr(spec, "shape_options", lambda platform: ours(platform) | {"loops": on_gpu})


@pytest.fixture(scope="module")
def alone(
    checkpoint: Path,
    requests: tuple[list[list[int]], list[SamplingParams]],
    few_programs: None,
    full_optimization: None,
) -> list[list[int]]:
    """What each request gives with the engine to itself and no prefix cache; eight steps a call, which is quicker."""
    with pytest.MonkeyPatch.context() as patched:
        run_loops(patched)
        llm = LLM(str(checkpoint), **BASE | {"enable_prefix_caching": False, "max_num_seqs": 1})
    tokens = [llm.generate(p, s, use_tqdm=False)[0].outputs[0].token_ids for p, s in zip(*requests, strict=True)]
    assert [len(t) for t in tokens] == [s.max_tokens for s in requests[1]]
    assert len({tuple(t) for t in tokens}) > NUM_REQUESTS * 0.8, "the model says the same to everybody"
    return tokens


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "tiny pool": {"num_kvcache_blocks": 140},
    "chunks of 32": {"max_num_batched_tokens": 32},
    "loops, no prefix cache": {"enable_prefix_caching": False},
    "loops, tiny pool": {"num_kvcache_blocks": 140},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_same_tokens_as_alone(
    name: str,
    checkpoint: Path,
    requests: tuple[list[list[int]], list[SamplingParams]],
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "loops" in name:
        run_loops(monkeypatch)
    options = CONFIGURATIONS[name]
    llm = LLM(str(checkpoint), **BASE | options)
    outputs = llm.generate(*requests, use_tqdm=False)
    different = [i for i, o in enumerate(outputs) if o.outputs[0].token_ids != alone[i]]
    assert not different

    stats = llm.stats.scheduler
    assert stats.output_tokens == sum(map(len, alone))
    assert (stats.steps < stats.output_tokens / 24) == ("loops" in name and "tiny" not in name)
    assert stats.running == stats.waiting == 0
    assert stats.free_blocks == llm.stats.num_kvcache_blocks
    assert (stats.preemptions > 20) == ("tiny pool" in name)
    assert (stats.prefix_hit_tokens > 0) == options.get("enable_prefix_caching", True)
    assert sum(o.metrics.num_preemptions for o in outputs) == stats.preemptions
    assert any(o.metrics.num_cached_tokens > 0 for o in outputs) == options.get("enable_prefix_caching", True)


@pytest.fixture(scope="module")
def heads(tiny: Any) -> str:
    """A model with 4 KV heads."""
    return str(tiny(num_attention_heads=8, num_key_value_heads=4))


@pytest.mark.parametrize(("size", "expected"), [(3, "Sizes that do: 1, 2, 4, 8"), (16, "8 cpu device")])
def test_sizes_that_do_not_divide_are_refused(size: int, expected: str, heads: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size={size}.*{expected}"):
        LLM(heads, **BASE | {"tensor_parallel_size": size})
