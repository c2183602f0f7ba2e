"""The PyTorch reference: logits and greedy continuations of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest


def round_reference_kv(monkeypatch: pytest.MonkeyPatch, scales: Sequence[tuple[float, float]]) -> None:
    """Let attention of transformers' Qwen3 see K and V as a float8 cache holds them: rounded by ml_dtypes.

    Args:
        monkeypatch: undoes it.
        scales: of each layer's K and V.
    """
    import torch
    from transformers.models.qwen3 import modeling_qwen3

    attention = modeling_qwen3.eager_attention_forward

    def rounded(values: Any, scale: float) -> Any:
        scaled = np.clip(values.numpy() / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return torch.from_numpy(scaled.astype(np.float32) * np.float32(scale))

    def forward(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        k, v = scales[module.layer_idx]
        return attention(module, query, rounded(key, k), rounded(value, v), *args, **options)

    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", forward)


def reference_model(path: Path, gguf_file: str | None = None, **options: Any) -> Any:
    """The checkpoint as transformers loads it, float32, on the CPU."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    quantization = {}
    if gguf_file and hasattr(transformers, "GgufConfig"):  # such versions compute on packed weights where they can
        quantization["quantization_config"] = transformers.GgufConfig(dequantize=True)
    options = {"dtype": torch.float32, **quantization, **options}
    return AutoModelForCausalLM.from_pretrained(path, gguf_file=gguf_file, **options).eval()


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits `[batch, tokens, vocab]`, dense causal attention."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def reference_greedy(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, num_valid_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens of transformers' `generate`, end-of-sequence ignored, and the gap of its top two logits.

    Returns:
        Two arrays `[prompts, new_tokens]`.
    """
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    gaps = []

    class Record(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores[:, num_valid_tokens:] = -torch.inf
            top = scores.topk(2).values
            gaps.append((top[:, 0] - top[:, 1]).numpy())
            return scores

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=None,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([Record()]),
        )
    return out[:, longest:].numpy(), np.stack(gaps, axis=1)


def assert_greedy(
    model: Any,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    num_valid_tokens: int,
    near_tie: float,
) -> int:
    """Each token is the reference's most likely one behind those before it, or less likely by a near-tie.

    Such a continuation is the one that greedy generation makes, up to near-ties, and past them the one it would go on
    with; all positions of a row are computed at once here, where `generate` takes a pass for each.

    Returns:
        How many tokens were the most likely ones.
    """
    import torch

    equal = 0
    for row, (prompt, tokens) in enumerate(zip(prompts, continuations, strict=True)):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *tokens[:-1]]])
            logits = model(ids, logits_to_keep=len(tokens), use_cache=False).logits[0, :, :num_valid_tokens].numpy()
        behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
        assert behind.max() < near_tie, (row, behind.argmax(), behind.max())
        equal += int((behind == 0).sum())
    return equal


def assert_greedy_equal(got: Sequence[Sequence[int]], tokens: np.ndarray, gaps: np.ndarray, near_tie: float) -> int:
    """Each row equals the reference up to a position where the reference's own top two are a near-tie.

    Returns:
        How many tokens were equal.
    """
    equal = 0
    for row, (ours, theirs) in enumerate(zip(got, tokens, strict=True)):
        assert len(ours) == len(theirs)
        different = np.flatnonzero(np.asarray(ours) != theirs)
        if len(different):
            first = different[0]
            assert gaps[row, first] < near_tie, (row, first, gaps[row, first], list(ours)[first], theirs[first])
            equal += int(first)
        else:
            equal += len(theirs)
    return equal
