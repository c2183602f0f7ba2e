"""What a user may give as prompts, brought to one form."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from jaxllm.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


def split_prompts(prompts: Any) -> list[Any]:
    """The single prompts of a call: text, token ids (also as an array), or any iterable of either.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | Mapping | Set) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be text, token ids, or a list of either, not {type(prompts).__name__}")
    if getattr(prompts, "ndim", None) == 1:
        return [prompts]
    many = list(prompts)
    return [many] if many and all(_is_integer(item) for item in many) else many


def pair_params(prompts: Sequence[Any], params: Params) -> list[tuple[Any, SamplingParams]]:
    """Each prompt with its parameters.

    Raises:
        TypeError: if `params` is neither SamplingParams nor a list of them.
        ValueError: if there are not as many as prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in prompts]
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}")
    each = list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} sampling_params for {len(prompts)} prompts; give one for all, or one for each")
    return list(zip(prompts, each, strict=True))


def prompt_token_ids(prompt: Any) -> list[int]:
    """Token ids as plain integers.

    Raises:
        TypeError: if `prompt` is no list or one-dimensional array of integers.
    """
    token_ids = None
    if hasattr(prompt, "__array__"):
        array = np.asarray(prompt)
        if array.ndim == 1 and (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
            token_ids = [int(token) for token in array.tolist()]
    elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray | Mapping | Set):
        items = list(prompt)
        if set(map(type, items)) <= {int}:  # the usual case, at a fiftieth of the price: prompts have thousands
            token_ids = items
        elif all(_is_integer(item) for item in items):
            token_ids = [operator.index(item) for item in items]
    if token_ids is None:
        raise TypeError(f"a prompt must be text or a list of token ids, not {prompt!r:.80}")
    return token_ids


def _is_integer(item: Any) -> bool:
    if isinstance(item, bool | np.bool_) or getattr(item, "ndim", None):
        return False
    try:
        operator.index(item)
    except TypeError:
        return False
    return True
