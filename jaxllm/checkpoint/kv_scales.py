"""Scales of a quantized KV cache, where a checkpoint brings them: one number for K and one for V of each layer.

They stand beside the weights under the names that vLLM reads: `self_attn.k_scale` and `v_scale` (compressed-tensors),
`self_attn.k_proj.k_scale` and `v_proj.v_scale` (ModelOpt), `self_attn.k_proj.output_scale` and `v_proj.output_scale`
(older compressed-tensors), or one `self_attn.kv_scale` for both (older still).
"""

import logging
import re
from collections import defaultdict

import numpy as np

from jaxllm.checkpoint.checkpoint import Checkpoint, CheckpointError, LazyTensor

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:k_proj\.|attn\.)?(?P<k>k_scale)|(?:v_proj\.|attn\.)?(?P<v>v_scale)"
    r"|(?P<k_output>k_proj\.output_scale)|(?P<v_output>v_proj\.output_scale)|(?P<both>kv_scale))"
)
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is a scale of the KV cache."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(checkpoint: Checkpoint) -> tuple[tuple[float, float], ...]:
    """For each layer, the factors of stored K and V: the checkpoint's, or 1 where it has none (logged).

    Raises:
        CheckpointError: if some layers have scales and others lack them, a layer has several or only one, or one is no
            positive number.
    """
    layers = checkpoint.config.num_hidden_layers
    found: defaultdict[int, dict[str, LazyTensor]] = defaultdict(dict)
    for name, tensor in checkpoint.tensors.items():
        if match := _NAME.fullmatch(name):
            layer = int(match["layer"])
            kinds = "kv" if match["both"] else "k" if match["k"] or match["k_output"] else "v"
            for kind in kinds:
                if kind in found[layer]:
                    raise CheckpointError(
                        f"model {checkpoint.name!r}: {name} and {found[layer][kind].name} are both scales of the KV "
                        "cache for the same numbers: remove one of them"
                    )
                found[layer][kind] = tensor
    if not found:
        logger.info("fp8 KV cache: the checkpoint has no scales; keys and values are stored as they are, up to 448")
        return ((1.0, 1.0),) * layers
    missing = [f"layer {layer}: {kind}_scale" for layer in range(layers) for kind in "kv" if kind not in found[layer]]
    if missing:
        raise CheckpointError(
            f"model {checkpoint.name!r} has scales of the KV cache for some layers, but not for {', '.join(missing)}: "
            "use a checkpoint that has all of them or none, or kv_cache_dtype='auto'"
        )
    logger.info("fp8 KV cache: scales of the checkpoint")
    return tuple((_number(found[layer]["k"]), _number(found[layer]["v"])) for layer in range(layers))


def _number(tensor: LazyTensor) -> float:
    if tensor.dtype not in _DTYPES or int(np.prod(tensor.shape)) != 1:
        raise CheckpointError(
            f"{tensor.name} is {tensor.storage}{list(tensor.shape)}: a scale of the KV cache is one floating-point "
            "number for all heads; use kv_cache_dtype='auto' to do without"
        )
    value = float(np.asarray(tensor.read(), np.float32).reshape(()))
    if not np.finfo(np.float32).tiny <= value <= np.finfo(np.float32).max:
        raise CheckpointError(
            f"{tensor.name} is {value:g}: a scale of the KV cache is a positive number that float32 holds; use "
            "kv_cache_dtype='auto' to do without"
        )
    return value
