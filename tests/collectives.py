"""What a compiled program sends between devices, read from its HLO."""

import math
import re
from collections import Counter

import jax
import numpy as np

from jaxllm.engine.step_shape import StepShape
from jaxllm.models.config import ModelConfig
from jaxllm.sampling.sampler import SamplingMode
from jaxllm.sampling.variant import MAX_LOGPROBS, Filters, SamplerVariant

_OPERATION = re.compile(r"= (.+?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_JOINED = re.compile(r"(?:replica_groups|source_target_pairs)=(.*?\]?[}\])])(?:, |$)", re.MULTILINE)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(r"mesh\[(.*)\] \{(.*)\}")


def collectives(compiled: jax.stages.Compiled) -> Counter[tuple[str, tuple[int, ...]]]:
    """Each collective of a program, as (operation, result shape), with how often it stands in the text.

    One inside a loop counts once.
    """
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for result, operation in _OPERATION.findall(compiled.as_text()):
        for sizes in _SHAPE.findall(result):
            found[operation, tuple(int(size) for size in sizes.split(",") if size)] += 1
    return found


def groups(compiled: jax.stages.Compiled) -> set[frozenset[int]]:
    """Which devices any collective of a program joins, by their places in the mesh."""
    found: set[frozenset[int]] = set()
    text = compiled.as_text()
    for line in filter(_OPERATION.search, text.splitlines()):
        found |= _joined(line)
    return found


def _joined(line: str) -> set[frozenset[int]]:
    """The groups of one collective, in any of the ways that XLA writes them."""
    (written,) = _JOINED.findall(line)
    if iota := _IOTA.fullmatch(written):
        shape, source, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        listed = np.arange(math.prod(source or [])).reshape(source).transpose(order).reshape(shape)
    elif axes := _AXES.fullmatch(written):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        names, joined = list(sizes), re.findall(r"'(\w+)'", axes[2])
        grid = np.arange(math.prod(map(int, sizes.values()))).reshape([int(size) for size in sizes.values()])
        order = [names.index(name) for name in (*(n for n in names if n not in joined), *joined)]
        listed = grid.transpose(order).reshape(-1, math.prod(int(sizes[name]) for name in joined))
    else:
        listed = np.array([group.split(",") for group in re.findall(r"\{([\d,]+)\}", written)], int)
    assert listed.ndim == 2 and listed.size, line
    return {frozenset(group) for group in listed.tolist()}


Sent = Counter[tuple[str, tuple[int, ...]]]


def allowed(shape: StepShape, config: ModelConfig, tp: int) -> Sent:
    """All that a step program may send over `tp` devices: nothing but this.

    The layers: one sum of hidden states for the embedding and two a layer. The sampler: the best token of each device,
    and for filters and log probabilities some sums and the largest few, whatever the size of the vocabulary. For plain
    draws, and for programs in which the device chooses among all samplers.
    """
    if tp == 1:
        return Counter()
    layers: Sent = Counter({("all-reduce", (shape.tokens, config.hidden_size)): 2 * config.num_hidden_layers})
    layers += Counter({("all-reduce", (max(2, shape.tokens), config.hidden_size)): 1})  # one token is looked up twice
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
