"""Requests for benchmarks: random tokens of given lengths, reproducible by seed."""

import argparse
import math
import random
from dataclasses import dataclass

MAX_TOKEN = 10_000
"""The largest token of a prompt, as in nano-vLLM's benchmark."""

SHAREGPT_LONGEST = 1024
SHAREGPT_INPUT = (85.0, 1.2)
SHAREGPT_OUTPUT = (248.0, 0.9)
"""Median and spread (standard deviation of the logarithm) of log-normal lengths, cut to 4 .. `SHAREGPT_LONGEST`.

The medians are such that the means after cutting are those of the ShareGPT conversations in Kwon et al., "Efficient
Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023), figure 11: 161 tokens in, 338 out.
The spreads are our choice: many short requests and a long tail.
"""


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

    def first(self, requests: int | None) -> "Workload":
        """The first so many requests; all for None."""
        return Workload(self.prompts[:requests], self.output_lens[:requests])

    def within(self, vocabulary: int) -> "Workload":
        """The same with ids that a model of so many has."""
        if vocabulary > MAX_TOKEN:
            return self
        return Workload([[token % vocabulary for token in prompt] for prompt in self.prompts], self.output_lens)

    def with_fresh_tokens(self, turn: int) -> "Workload":
        """Prompts of the same lengths, of other tokens in each turn, so that no prefix cache knows them."""
        prompts = [[(token + turn * 7919) % MAX_TOKEN for token in prompt] for prompt in self.prompts]
        return Workload(prompts, self.output_lens)


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
    num_requests: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int, max_token: int = MAX_TOKEN
) -> Workload:
    """Uniform lengths and tokens, drawn in the order of nano-vLLM's benchmark: its seed 0 gives its very lengths."""
    source = random.Random(seed)
    prompts = [[source.randint(0, max_token) for _ in range(source.randint(*input_len))] for _ in range(num_requests)]
    return Workload(prompts, [source.randint(*output_len) for _ in range(num_requests)])


def sharegpt_workload(num_requests: int, seed: int) -> Workload:
    """Random tokens with lengths as in a mix of chats: `SHAREGPT_INPUT` and `SHAREGPT_OUTPUT`, drawn independently."""
    source = random.Random(seed)

    def length(median: float, spread: float) -> int:
        return min(SHAREGPT_LONGEST, max(4, round(median * math.exp(source.gauss(0, spread)))))

    lens = [(length(*SHAREGPT_INPUT), length(*SHAREGPT_OUTPUT)) for _ in range(num_requests)]
    prompts = [[source.randint(0, MAX_TOKEN) for _ in range(n)] for n, _ in lens]
    return Workload(prompts, [n for _, n in lens])
