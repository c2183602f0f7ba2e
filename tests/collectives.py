"""What a compiled program sends between devices, read from its HLO."""

import re
from collections import Counter

import jax

from jaxllm.engine.step_shape import StepShape
from jaxllm.models.config import ModelConfig
from jaxllm.sampling.sampler import SamplingMode
from jaxllm.sampling.variant import MAX_LOGPROBS, Filters, SamplerVariant

_OPERATION = re.compile(r"= (.+?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def collectives(compiled: jax.stages.Compiled) -> Counter[tuple[str, tuple[int, ...]]]:
    """Each collective of a program, as (operation, result shape), with how often it stands in the text.

    One inside a loop counts once.
    """
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for result, operation in _OPERATION.findall(compiled.as_text()):
        for sizes in _SHAPE.findall(result):
            found[operation, tuple(int(size) for size in sizes.split(",") if size)] += 1
    return found


Sent = Counter[tuple[str, tuple[int, ...]]]


def allowed(shape: StepShape, config: ModelConfig, tp: int) -> Sent:
    """All that a step program may send over `tp` devices: nothing but this.

    The layers: one sum of hidden states for the embedding and two a layer. The sampler: the best token of each device,
    and for filters and log probabilities some sums and the largest few, whatever the size of the vocabulary. For plain
    draws, and for programs in which the device chooses among all samplers.
    """
    if tp == 1:
        return Counter()
    layers: Sent = Counter({("all-reduce", (shape.tokens, config.hidden_size)): 2 * config.num_hidden_layers + 1})
    best: Sent = Counter({("all-gather", (shape.rows, tp)): 2})
    if isinstance(shape.sampler, SamplerVariant):
        assert shape.sampler.filters is Filters.NONE and shape.sampler.logprobs is None
        if not shape.decode and shape.tokens >= 4 * shape.rows:  # last tokens alone go through the last block's end
            layers -= Counter({("all-reduce", (shape.tokens, config.hidden_size)): 2})
            layers += Counter({("all-reduce", (shape.rows, config.hidden_size)): 2})
        return layers + best
    assert shape.sampler is SamplingMode.EVERYTHING
    filters: Sent = Counter({("all-reduce", (15, shape.rows)): 2, ("all-reduce", (shape.rows, 1)): 1})
    filters += Counter({("all-reduce", (shape.rows,)): 1})
    sent = sum([best] * 4 + [filters] * 2, layers) + _logprobs(shape.rows, tp)
    return sent if shape.decode else sent + _logprobs(shape.tokens, tp)


def _logprobs(rows: int, tp: int) -> Sent:
    """The most likely tokens and their ids; the token's own logit, the norm's sum; its rank."""
    largest = ("all-gather", (rows, tp * MAX_LOGPROBS))
    return Counter({largest: 2, ("all-reduce", (rows, 1)): 2, ("all-reduce", (rows,)): 1})
