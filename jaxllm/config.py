"""What a user can set about the engine."""

import logging
from dataclasses import dataclass, fields

from jaxllm.checks import integer, real
from jaxllm.models.config import ModelConfig
from jaxllm.models.rope import longest_context

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "xla", "mosaic_gpu")
KV_CACHE_DTYPES = {"auto": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""JAX's names for what `kv_cache_dtype` stands for; None is the model's dtype."""
DEFAULT_MAX_MODEL_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine options, with nano-vLLM's names and defaults where it has them.

    Attributes:
        max_num_batched_tokens: most tokens of one step on a replica, over all its requests; also the largest chunk of a
            prompt.
        max_num_seqs: most requests of a replica in one step. More than `max_num_batched_tokens` are never used.
        max_model_len: most tokens of a request, prompt and output together. None means 4,096. Capped by the model:
            its positions, or what linear or YaRN scaling of the rotary embedding stretches them to.
        gpu_memory_utilization: share of the device's memory that weights, activations and KV cache may take. On a CPU
            the KV cache gets a fixed share of the free host memory instead (`jaxllm.memory`).
        tensor_parallel_size: devices that the model is split over.
        data_parallel_size: replicas of the model, each on so many devices, that requests are divided among.
        kvcache_block_size: tokens per KV block, a multiple of 16 up to 256. Half a block is lost per request on
            average, and prefixes are shared in whole blocks.
        num_kvcache_blocks: KV blocks of each replica; -1 takes as many as fit.
        kv_cache_memory_bytes: bytes of each device for the KV cache, instead of what `gpu_memory_utilization` leaves.
        enable_prefix_caching: share the KV of equal beginnings between requests.
        dtype: of weights and activations. "auto" is the checkpoint's own, and float32 on a CPU.
        kv_cache_dtype: "auto" is `dtype`; "fp8" and "fp8_e4m3" are float8_e4m3fn: one byte a number, twice the tokens
            in the same memory, keys and values rounded to 4 significant bits. They are divided by the checkpoint's
            scales of each layer, or by 1 where it has none.
        attention: "mosaic_gpu", the Pallas kernels for NVIDIA Hopper GPUs; "xla", which runs everywhere; or "auto": the
            kernels where they run.
        enforce_eager: compile each program when it is first needed instead of before the engine is ready: starts
            faster, and pauses later.
        skip_tokenizer_init: take and give token ids only. Ids with which a checkpoint only pads its vocabulary are not
            known then, and can be generated.
        seed: of the draws of requests that bring none.

    Raises:
        TypeError: for an unknown option or a value of the wrong type.
        ValueError: for a value out of range. Both name the option, the value and what is allowed.
    """

    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    kvcache_block_size: int = 64
    num_kvcache_blocks: int = -1
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    attention: str = "auto"
    enforce_eager: bool = False
    skip_tokenizer_init: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size", "data_parallel_size"):
            self._require(integer(name, getattr(self, name)) >= 1, name, "at least 1")
        if self.max_model_len is not None:
            self._require(integer("max_model_len", self.max_model_len) >= 2, "max_model_len", "at least 2, or None")
        size = integer("kvcache_block_size", self.kvcache_block_size)
        self._require(16 <= size <= 256 and size % 16 == 0, "kvcache_block_size", "a multiple of 16 from 16 to 256")
        blocks = integer("num_kvcache_blocks", self.num_kvcache_blocks)
        self._require(blocks == -1 or blocks >= 1, "num_kvcache_blocks", "at least 1, or -1 for as many as fit")
        if self.kv_cache_memory_bytes is not None:
            integer("kv_cache_memory_bytes", self.kv_cache_memory_bytes)
            self._require(self.kv_cache_memory_bytes >= 1, "kv_cache_memory_bytes", "at least 1, or None")
            self._require(
                blocks == -1, "num_kvcache_blocks", "-1 where kv_cache_memory_bytes is given: one sets the size"
            )
        integer("seed", self.seed)
        real("gpu_memory_utilization", self.gpu_memory_utilization)
        self._require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "in (0, 1]")
        self._require(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
        names = f"one of {', '.join(KV_CACHE_DTYPES)} (e5m2 has too few significant bits)"
        self._require(self.kv_cache_dtype in tuple(KV_CACHE_DTYPES), "kv_cache_dtype", names)
        self._require(self.attention in ATTENTIONS, "attention", f"one of {', '.join(ATTENTIONS)}")
        for name in ("enable_prefix_caching", "enforce_eager", "skip_tokenizer_init"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(field.name for field in fields(cls))

    @property
    def max_rows(self) -> int:
        """Most rows of a step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def model_len(self, model: ModelConfig) -> int:
        """`max_model_len` as it holds for `model`."""
        limit = longest_context(model)
        if self.max_model_len is not None and self.max_model_len > limit:
            logger.warning(
                "max_model_len=%d is more than the model's %d positions; using %d", self.max_model_len, limit, limit
            )
        return min(self.max_model_len or DEFAULT_MAX_MODEL_LEN, limit)

    def dtype_name(self, model: ModelConfig, platform: str) -> str:
        """The dtype that "auto" stands for: on CPUs float32, since their bfloat16 products of few rows are slow."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if platform == "cpu" else model.dtype

    @property
    def quantizes_kv(self) -> bool:
        """Whether the KV cache has another dtype than the model, and scales."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype] is not None

    def kv_dtype_name(self, dtype: str) -> str:
        """The dtype of the KV cache of a model in `dtype`."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype] or dtype

    def _require(self, condition: bool, name: str, allowed: str) -> None:
        if not condition:
            raise ValueError(f"{name} must be {allowed}; got {getattr(self, name)!r}")
