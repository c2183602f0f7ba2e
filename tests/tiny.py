"""Tiny random checkpoints and tokenizers, built offline, for everybody's tests.

A checkpoint is a real one: written by transformers' `save_pretrained`, with a fast tokenizer beside it. Its weights are
large enough that logits have a standard deviation of about 1, so that greedy choices are rarely near-ties.
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

CORPUS = (
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog. "
    "Once upon a time there was a small model that wrote small stories about the sea and the stars. " * 4
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)
# Larger than the tokenizer (about 330 tokens) and odd: real checkpoints pad their embedding beyond the tokenizer.
VOCAB_SIZE = 391

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@functools.cache
def byte_level_tokenizer(*, adds_bos: bool = False) -> Any:
    """A fast byte-level BPE tokenizer: 256 bytes, some merges, specials, a chat template with `enable_thinking`.

    With `adds_bos` every encoding begins with <|bos|> and so does the chat template, as Llama 3 does both.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS[:4]),
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS], trainer)
    # Qwen3's <think> is an added token that is not special: it is shown to the user.
    backend.add_tokens(list(SPECIAL_TOKENS[4:]))
    if adds_bos:
        bos = backend.token_to_id("<|bos|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = "{{- bos_token }}" + CHAT_TEMPLATE if adds_bos else CHAT_TEMPLATE
    return tokenizer


@functools.cache
def sentencepiece_tokenizer(*, adds_bos: bool = True) -> Any:
    """A tokenizer that behaves like Llama 2's: "▁" for spaces, byte fallback, the decoder strips one leading space."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges: list[tuple[str, str]] = []
    characters = sorted(set(CORPUS.replace(" ", "▁") + "äöüéßабв中文"))
    pieces += characters
    for word in ("▁the", "▁of", "▁small", "▁stories", "ing", "▁Paris", "▁a"):
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if (left, right) not in merges:
                merges.append((left, right))
                pieces.append(left + right)
    pieces = list(dict.fromkeys(pieces))
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def tiny_checkpoint(
    folder: Path,
    family: str = "qwen3",
    *,
    shards: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    logit_std: float = 1.0,
    adds_bos: bool = False,
    **config: Any,
) -> Path:
    """Write a random checkpoint with its tokenizer into `folder` and return it.

    `config` overrides fields of the Hugging Face config (`SIZES` are the defaults). `shards` splits it into several
    safetensors files with an index. The same arguments are written once in a process and copied afterwards.
    """
    key = json.dumps([family, shards, dtype, seed, logit_std, adds_bos, config], sort_keys=True)
    shutil.copytree(_written(key), folder, dirs_exist_ok=True)
    return folder


@functools.cache
def _cache_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jaxllm-tiny-")


@functools.cache
def _written(key: str) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, shards, dtype, seed, logit_std, adds_bos, overrides = json.loads(key)
    folder = Path(tempfile.mkdtemp(dir=_cache_folder().name))
    tokenizer = byte_level_tokenizer(adds_bos=adds_bos)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(family, **{**SIZES, **ids, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomize_(model, logit_std)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **({"max_shard_size": "60KB"} if shards else {}))
    tokenizer.save_pretrained(folder)
    return folder


def randomize_(model: Any, logit_std: float = 1.0) -> None:
    """Fill a torch model with random weights that keep activations near unit size and give logits `logit_std`."""
    import torch

    output = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter is output or parameter is embedding:
                continue
            elif parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:  # norm scales: not all one, so that a forgotten scale shows
                parameter.uniform_(0.5, 1.5)
        embedding.normal_(0.0, 1.0 if embedding is not output else logit_std * embedding.shape[1] ** -0.5)
        if output is not embedding:
            output.normal_(0.0, logit_std * output.shape[1] ** -0.5)
