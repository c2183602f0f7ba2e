"""Scenarios without a GPU: a model, a card and options in, a budget out."""

from dataclasses import dataclass, replace
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.memory.budget import DeviceBudget, block_bytes, outside_margin
from jaxllm.memory.cards import HOPPER
from jaxllm.memory.predict import ITEMSIZE, Workload, activation_bytes, state_bytes, weight_bytes
from jaxllm.memory.report import concurrency
from jaxllm.models.config import ModelConfig

ENGINE_OPTIONS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "kvcache_block_size",
)
"""Engine options that a plan depends on."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One question to the planner. Sizes in bytes per device; None is predicted from the model's shapes.

    Attributes:
        model: shapes.
        device: name of the card.
        total: its memory.
        config: engine options.
        max_model_len: most tokens of a request.
        dtype: of weights and activations.
        kv_dtype: of the KV cache.
        weights: measured weights, with the state of requests, as the engine measures them.
        activations: measured peak of the running programs.
        other: CUDA context and the like; None is the margin that the engine keeps for it.
    """

    model: ModelConfig
    device: str
    total: int
    config: EngineConfig
    max_model_len: int
    dtype: str
    kv_dtype: str
    weights: int | None = None
    activations: int | None = None
    other: int | None = None

    @property
    def workload(self) -> Workload:
        """The largest steps of the engine, which has kernels for 16 bits on some cards."""
        kernels = self.device.lower() in HOPPER and ITEMSIZE[self.dtype] <= 2
        return Workload(self.config.max_num_batched_tokens, self.config.max_num_seqs, kernels)

    def with_tp(self, tp: int) -> "Scenario":
        """The same on `tp` devices; what was measured is divided as far as it grows or shrinks with them."""
        factor = self.config.tensor_parallel_size
        return replace(
            self,
            config=replace(self.config, tensor_parallel_size=tp),
            weights=None if self.weights is None else self.weights * factor // tp,
            activations=None if self.activations is None else self.activations * factor // tp,
        )

    def with_dtypes(self, dtype: str, kv_dtype: str) -> "Scenario":
        """The same with other dtypes; what was measured is scaled by the size of an element."""
        new, old = ITEMSIZE[dtype], ITEMSIZE[self.dtype]
        weights = None if self.weights is None else self.weights * new // old
        # Activations are never narrower than 16 bits: fp8 is a storage format here.
        new, old = max(new, 2), max(old, 2)
        activations = None if self.activations is None else self.activations * new // old
        return replace(self, dtype=dtype, kv_dtype=kv_dtype, weights=weights, activations=activations)


@dataclass(frozen=True)
class Plan:
    """The answer: the budget of one device, and what the cache holds."""

    scenario: Scenario
    budget: DeviceBudget
    predicted_weights: int
    predicted_state: int
    predicted_activations: int

    @property
    def num_blocks(self) -> int:
        """Blocks that fit."""
        return self.budget.num_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens in them."""
        return self.num_blocks * self.scenario.config.kvcache_block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that fit at once."""
        return concurrency(self.num_blocks, self.scenario.config.kvcache_block_size, self.scenario.max_model_len)

    @property
    def blocks_without_warm_up(self) -> int:
        """Blocks that an engine would take that reserves nothing for running programs."""
        budget = self.budget
        return max(0, budget.headroom + budget.activations) // budget.block_bytes

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON's types.

        `kv_cache_bytes` is the headroom, `kv_array_bytes` the whole blocks in it; `weight_bytes` are those of the
        budget: with the state of requests.
        """
        s, b = self.scenario, self.budget
        return {
            "device": s.device,
            "device_memory": b.total,
            "limit": b.limit,
            "other_bytes": b.non_framework,
            "weight_bytes": b.weights,
            "activation_bytes": b.activations,
            "predicted_weight_bytes": self.predicted_weights,
            "predicted_state_bytes": self.predicted_state,
            "predicted_activation_bytes": self.predicted_activations,
            "kv_cache_bytes": b.headroom,
            "kv_array_bytes": self.num_blocks * b.block_bytes,
            "block_bytes": b.block_bytes,
            "num_kvcache_blocks": self.num_blocks,
            "num_tokens": self.num_tokens,
            "max_concurrency": self.max_concurrency,
            "blocks_without_warm_up": self.blocks_without_warm_up,
            "dtype": s.dtype,
            "kv_cache_dtype": s.kv_dtype,
            "max_model_len": s.max_model_len,
            **{name: getattr(s.config, name) for name in ENGINE_OPTIONS if name != "max_model_len"},
        }


def plan(scenario: Scenario) -> Plan:
    """Work out a scenario.

    Raises:
        ValueError: if the model cannot be divided over so many devices; lists the sizes that do.
    """
    tp, model, itemsize = scenario.config.tensor_parallel_size, scenario.model, ITEMSIZE[scenario.dtype]
    weights = weight_bytes(model, itemsize=itemsize, tensor_parallel_size=tp)
    state = state_bytes(
        model, rows=scenario.workload.rows, max_model_len=scenario.max_model_len, tensor_parallel_size=tp
    )
    activations = activation_bytes(model, scenario.workload, itemsize=max(2, itemsize), tensor_parallel_size=tp)
    block = block_bytes(
        num_layers=model.num_hidden_layers,
        block_size=scenario.config.kvcache_block_size,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        itemsize=ITEMSIZE[scenario.kv_dtype],
        tensor_parallel_size=tp,
    )
    budget = DeviceBudget.of(
        name=scenario.device,
        total=scenario.total,
        utilization=scenario.config.gpu_memory_utilization,
        non_framework=outside_margin(scenario.total) if scenario.other is None else scenario.other,
        weights=weights + state if scenario.weights is None else scenario.weights,
        activations=activations if scenario.activations is None else scenario.activations,
        block_bytes=block,
    )
    return Plan(scenario, budget, weights, state, activations)
