"""Requests for benchmarks: random tokens of given lengths, reproducible by seed."""

import argparse
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Tokens to generate for all."""
        return sum(self.output_lens)


def length_range(text: str) -> tuple[int, int]:
    """Parse `N` or `LOW:HIGH`."""
    low, colon, high = text.partition(":")
    try:
        bounds = int(low), int(high if colon else low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a length nor LOW:HIGH") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: lengths are at least 1, and LOW is at most HIGH")
    return bounds


def random_workload(
    num_requests: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int, max_token: int = 10_000
) -> Workload:
    """Uniform lengths and tokens, drawn in the order of nano-vLLM's benchmark: its seed 0 gives its very lengths."""
    source = random.Random(seed)
    prompts = [[source.randint(0, max_token) for _ in range(source.randint(*input_len))] for _ in range(num_requests)]
    return Workload(prompts, [source.randint(*output_len) for _ in range(num_requests)])
