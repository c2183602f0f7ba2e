"""What both sides read: the user's prompts, or built-in ones."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.checkpoint.checkpoint import Checkpoint, CheckpointError
from jaxllm.models.config import ModelConfig
from jaxllm.models.rope import longest_context
from jaxllm.text.prompt import encode_prompt

logger = logging.getLogger(__name__)

BUILT_IN = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Q: A train leaves at 9:40 and arrives at 13:25. How long is the journey?\nA:",
    "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist",
)
"""Prose, code, numbers, and letters beyond ASCII: short, of different lengths."""

_DRAWN_LENGTHS = (7, 20, 33)


def find_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer; None where it has none."""
    try:
        return checkpoint.tokenizer()
    except CheckpointError as error:
        logger.info("%s", error)
        return None


def tokenize(
    tokenizer: Any, model: ModelConfig, texts: Sequence[str], ids: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """Token ids of all prompts; the built-in ones where none is given, or drawn ids where there is no tokenizer.

    Args:
        tokenizer: of the checkpoint; None where it has none.
        model: its shapes.
        texts: prompts as text.
        ids: prompts as token ids, after the texts.
        new_tokens: to be generated after each.

    Raises:
        ValueError: for a prompt that is empty, too long for the model, of ids that it does not have, or of text where
            there is no tokenizer; names the prompt.
    """
    if tokenizer is None and texts:
        raise ValueError("--prompt needs a tokenizer, and this checkpoint has none; give token ids with --prompt-ids")
    if texts or ids:
        prompts = [encode_prompt(tokenizer, text) for text in texts] + [list(prompt) for prompt in ids]
    elif tokenizer is not None:
        prompts = [encode_prompt(tokenizer, text) for text in BUILT_IN]
    else:
        logger.warning("the checkpoint has no tokenizer: comparing on drawn token ids")
        draw = np.random.default_rng(0)
        prompts = [draw.integers(model.vocab_size, size=length).tolist() for length in _DRAWN_LENGTHS]
    for index, prompt in enumerate(prompts):
        _check(index, prompt, model, new_tokens)
    return prompts


def _check(index: int, prompt: Sequence[int], model: ModelConfig, new_tokens: int) -> None:
    if not prompt:
        raise ValueError(f"prompt {index} has no tokens; at least one is needed")
    longest = longest_context(model)
    if len(prompt) + new_tokens > longest:
        raise ValueError(
            f"prompt {index} has {len(prompt)} tokens and --tokens is {new_tokens}: together more than the model's "
            f"{longest} positions; shorten either"
        )
    outside = [token for token in prompt if not 0 <= token < model.vocab_size]
    if outside:
        raise ValueError(f"prompt {index} has the token id {outside[0]}; allowed are 0 to {model.vocab_size - 1}")
