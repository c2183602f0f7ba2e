"""What a compiled program sends between devices, read from its HLO."""

import math
import re
from collections import Counter

import jax

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


def largest_result(compiled: jax.stages.Compiled) -> int:
    """Elements of the largest result of any collective; 0 where there is none."""
    return max((math.prod(shape) for _, shape in collectives(compiled)), default=0)
