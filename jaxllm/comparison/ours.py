"""Our side: the model's parts one by one, and greedy continuations from the engine."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Shaped

from jaxllm.cache.kv_array import LayerScales
from jaxllm.comparison.metrics import Difference, LogitsDifference, PartDifference, Trace, part_names
from jaxllm.layers.attention import causal_attention
from jaxllm.layers.kv_quantization import KVScales, rounded_as_in_cache
from jaxllm.llm import LLM
from jaxllm.models.decoder import Decoder
from jaxllm.models.weights import Weights
from jaxllm.sampling_params import SamplingParams

Part = Callable[[Shaped[np.ndarray, "tokens *size"]], Float[np.ndarray, "tokens _"]]

_STEP_TOKENS = 64
"""Tokens of an engine step. Few, so that prompts come in chunks, mixed with rows that decode, and one program does."""


def make_llm(
    model: str,
    *,
    dtype: str,
    kv_cache_dtype: str,
    tensor_parallel_size: int,
    num_prompts: int,
    max_len: int,
    tokenizer: bool,
) -> LLM:
    """An engine that is just large enough for the comparison; its weights serve the dense passes as well."""
    block_size = 64
    rows = min(num_prompts, _STEP_TOKENS)
    max_len = max(max_len, 2)
    return LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        max_num_seqs=rows,
        max_num_batched_tokens=_STEP_TOKENS,
        max_model_len=max_len,
        kvcache_block_size=block_size,
        num_kvcache_blocks=rows * -(-max_len // block_size),
        enforce_eager=True,
        skip_tokenizer_init=not tokenizer,
    )


def engine_continuations(llm: LLM, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens of every prompt through continuous batching and the paged cache, past any end-of-sequence."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def compare_parts(
    weights: Weights, traces: Sequence[Trace], num_valid: int
) -> tuple[list[PartDifference], LogitsDifference]:
    """Every part of our model against the reference, over all prompts.

    Args:
        weights: ours.
        traces: the reference's outputs.
        num_valid: ids that the tokenizer knows.
    """
    vocab_size = traces[0].outputs[-1].shape[-1]
    parts = _parts(weights, max(len(trace.tokens) for trace in traces))
    names = part_names(weights.config.num_hidden_layers)
    differences = [PartDifference(name, Difference(), Difference()) for name in names]
    logits = LogitsDifference()
    for trace in traces:
        own: np.ndarray = trace.tokens
        given: np.ndarray = trace.tokens
        for index, (part, expected) in enumerate(zip(parts, trace.outputs, strict=True)):
            own, local = part(own), part(given)
            given = expected
            size = expected.shape[-1]  # a vocabulary that was padded to divide over devices is longer
            found = PartDifference(
                names[index], Difference.of(own[:, :size], expected), Difference.of(local[:, :size], expected)
            )
            differences[index] |= found
        logits |= LogitsDifference.of(own[:, :vocab_size], trace.outputs[-1], num_valid)
    return differences, logits


def compare_through_cache(
    weights: Weights, traces: Sequence[Trace], num_valid: int, scales: LayerScales
) -> LogitsDifference:
    """Our model's logits against the reference's where attention sees keys and values as a quantized cache holds them.

    Args:
        weights: ours.
        traces: the reference's outputs.
        num_valid: ids that the tokenizer knows.
        scales: of the cache.
    """
    vocab_size = traces[0].outputs[-1].shape[-1]
    parts = _parts(weights, max(len(trace.tokens) for trace in traces), scales)
    logits = LogitsDifference()
    for trace in traces:
        own: np.ndarray = trace.tokens
        for part in parts:
            own = part(own)
        logits |= LogitsDifference.of(own[:, :vocab_size], trace.outputs[-1], num_valid)
    return logits


def _parts(weights: Weights, length: int, scales: LayerScales | None = None) -> list[Part]:
    """The model's parts as functions from host to host, for up to `length` tokens; with `scales`, K and V are rounded.

    All inputs are padded to `length`, and layers are passed as arguments to one function: each kind of part compiles
    once, however many layers and prompts there are. No token sees the padding after it.
    """
    model = weights.model()
    dtype = weights.leaves[0].dtype
    angles = model.angles(jnp.arange(length))

    def part(function: Callable[[Array], Array]) -> Part:
        def call(x: np.ndarray) -> np.ndarray:
            padded = np.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)])
            moved = jnp.asarray(padded, jnp.int32 if x.ndim == 1 else dtype)
            return np.asarray(function(moved).astype(jnp.float32))[: len(x)]

        return call

    def whole(method: Callable[[Decoder, Array], Array]) -> Part:
        jitted = jax.jit(lambda leaves, x: method(weights.with_leaves(leaves).model(), x))
        return part(lambda x: jitted(weights.leaves, x))

    def layer(index: int) -> Part:
        graphdef, state = nnx.split(model.layers[index])
        own = None if scales is None else jnp.asarray(scales[index], jnp.float32)
        return part(lambda x: _layer(graphdef, state, x, angles, own))

    return [
        whole(lambda model, tokens: model.embed_tokens(tokens)),
        *(layer(index) for index in range(weights.config.num_hidden_layers)),
        whole(lambda model, x: model.norm(x)),
        whole(lambda model, x: model.logits(x)),
    ]


@jax.jit(static_argnums=0)
def _layer(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    x: Float[Array, "tokens hidden"],
    angles: tuple[Array, Array],
    scales: KVScales | None,
) -> Float[Array, "tokens hidden"]:
    """One block with dense causal attention."""

    def dense(_layer: int, q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        if scales is not None:
            k, v = rounded_as_in_cache(k, scales[0]), rounded_as_in_cache(v, scales[1])
        return causal_attention(q, k, v), cache

    return nnx.merge(graphdef, state)(x, angles, 0, dense, None)[0]
