"""The PyTorch side: the checkpoint as transformers loads and runs it."""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxllm.checkpoint.checkpoint import Checkpoint
from jaxllm.checkpoint.load import check_tensors
from jaxllm.comparison.metrics import Trace
from jaxllm.models.params import parameter_specs


def require_torch(device: str) -> Any:
    """The torch module.

    Raises:
        ValueError: if torch is not installed, or has no GPU where `device` is "cuda"; says what to do.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"the reference needs PyTorch, which cannot be imported ({error}); install it with: "
            "pip install 'jaxllm[compare]'"
        ) from error
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--reference-device cuda, but this PyTorch ({torch.__version__}) sees no GPU; leave it at cpu, or "
            "install a PyTorch built for CUDA"
        )
    return torch


def check_checkpoints(model: Checkpoint, reference: Checkpoint, tensor_parallel_size: int) -> None:
    """Refuse what cannot be compared before anything is loaded.

    Tensors that the reference lacks would be random in transformers, hence the strict check of both sides.

    Raises:
        ValueError: naming the field and both values, the tensors that do not fit, or a `tensor_parallel_size` that does
            not divide the model.
    """
    for field in ("hidden_size", "num_hidden_layers", "vocab_size"):
        ours, theirs = getattr(model.config, field), getattr(reference.config, field)
        if ours != theirs:
            raise ValueError(
                f"{field} is {ours} in {model.name!r} and {theirs} in {reference.name!r}: only checkpoints of the same "
                "shapes can be compared"
            )
    check_tensors(model.tensors, parameter_specs(model.config, tensor_parallel_size), model.name)
    check_tensors(reference.tensors, parameter_specs(reference.config), reference.name)


def run_reference(
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    *,
    dtype: str,
    device: str,
    new_tokens: int,
    num_valid: int,
) -> list[Trace]:
    """Run the prompts, each alone, and let go of the model before returning.

    Attention is transformers' "eager" implementation: the plain formula, without a kernel's own roundings.

    Args:
        checkpoint: what to load; through transformers' own reader, .gguf files included.
        prompts: token ids.
        dtype: of weights and activations.
        device: "cpu" or "cuda".
        new_tokens: length of the greedy continuations.
        num_valid: ids that may be generated.
    """
    torch = require_torch(device)
    torch.set_float32_matmul_precision("highest")  # float32 means float32, whatever the installation's default
    model = _load(checkpoint, getattr(torch, dtype)).to(device)
    with torch.inference_mode():
        traces = [_trace(model, prompt, new_tokens, num_valid) for prompt in prompts]
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return traces


def _load(checkpoint: Checkpoint, dtype: Any) -> Any:
    import transformers

    source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.path}
    if checkpoint.path.is_file():
        source = {"pretrained_model_name_or_path": checkpoint.path.parent, "gguf_file": checkpoint.path.name}
        # Newer versions compute with packed weights unless told otherwise, in kernels with roundings of their own.
        if hasattr(transformers, "GgufConfig"):
            source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(dtype=dtype, attn_implementation="eager", **source)
    return model.eval()


def _trace(model: Any, prompt: Sequence[int], new_tokens: int, num_valid: int) -> Trace:
    import torch

    ids = torch.tensor([list(prompt)], device=model.device)
    with _recorded(model) as outputs:
        logits = model(ids, use_cache=False).logits
    outputs.append(_to_numpy(logits))
    continuation, gaps = _greedy(model, ids, new_tokens, num_valid)
    return Trace(np.asarray(prompt, np.int32), outputs, continuation, gaps)


@contextlib.contextmanager
def _recorded(model: Any) -> Iterator[list[Float[np.ndarray, "tokens hidden"]]]:
    """The outputs of embedding, layers and final norm, in the order in which they run.

    By hooks: the last entry of transformers' `output_hidden_states` has the final norm applied, and the output of the
    last layer is nowhere.
    """
    outputs: list[np.ndarray] = []

    def record(_module: Any, _args: Any, output: Any) -> None:
        outputs.append(_to_numpy(output[0] if isinstance(output, tuple) else output))

    parts = [model.get_input_embeddings(), *model.model.layers, model.model.norm]
    hooks = [part.register_forward_hook(record) for part in parts]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _to_numpy(hidden: Any) -> Float[np.ndarray, "tokens size"]:
    """The one sequence of a batch, in float32 on the host: exact for every smaller dtype."""
    return hidden[0].float().cpu().numpy()


def _greedy(model: Any, ids: Any, new_tokens: int, num_valid: int) -> tuple[list[int], list[float]]:
    """Greedy tokens past any end-of-sequence, with the distance of the two largest logits at each."""
    if not new_tokens:
        return [], []
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

    gaps: list[float] = []

    class Record(LogitsProcessor):
        """Keeps ids that the tokenizer does not know from being chosen, and notes the gap of the largest two."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores[:, num_valid:] = -float("inf")
            first, second = scores[0].float().topk(2).values.tolist()
            gaps.append(first - second)
            return scores

    # The checkpoint's own would come in where ours says nothing: a repetition penalty, an end-of-sequence.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    out = model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=new_tokens,
        logits_processor=LogitsProcessorList([Record()]),
    )
    return out[0, ids.shape[1] :].tolist(), gaps
