"""Tokenizers: those of a checkpoint folder through AutoTokenizer, those of .gguf files from their metadata."""

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from jaxllm.checkpoint.checkpoint import CheckpointError
from jaxllm.checkpoint.folder import read_json
from jaxllm.checkpoint.gguf_file import read_gguf

logger = logging.getLogger(__name__)

# How text is cut before BPE, by GGUF's tokenizer.ggml.pre. The patterns are those of the models' own tokenizer.json.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = _QWEN2_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_PATTERNS = {"qwen2": _QWEN2_PATTERN, "deepseek-r1-qwen": _QWEN2_PATTERN, "llama-bpe": _LLAMA3_PATTERN}
_PLAIN = ("gpt-2", "default")
_DIGITS_APART = ("smollm",)
# tokenizer.ggml.token_type: control tokens are special, user-defined ones are whole words that are shown.
_CONTROL, _USER_DEFINED = 3, 4
_JSON_FILES = ("tokenizer_config.json", "tokenizer.json")
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


_READING = threading.Lock()
"""transformers imports its parts when they are first used, which two threads cannot do at once."""


@functools.cache
def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint folder or .gguf file, with its chat template; kept for the life of the process.

    Raises CheckpointError where there is no tokenizer or transformers cannot read it.
    """
    try:
        with _READING, _no_advice_about_pytorch():
            return _from_gguf(path) if path.suffix == ".gguf" and path.is_file() else _from_folder(path)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file shows as whatever its reader stumbled over: KeyError, TypeError, ...
        for file in _JSON_FILES:
            if (path / file).is_file():
                read_json(path / file)  # names the file where it is no JSON object
        raise CheckpointError(
            f"the tokenizer in {path} cannot be read ({type(error).__name__}: {error}): fetch its files again, or "
            f"install the package that the message names"
        ) from error


@contextlib.contextmanager
def _no_advice_about_pytorch() -> Iterator[None]:
    """When transformers is imported, it advises everybody without PyTorch to install it; tokenizers do not need it."""

    def wanted(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addFilter(wanted)
    try:
        yield
    finally:
        transformers_logger.removeFilter(wanted)


def _from_folder(path: Path) -> Any:
    # Without any of these files transformers 5 would build an empty tokenizer from the model type alone.
    if not any((path / file).is_file() for file in _VOCABULARY_FILES):
        raise CheckpointError(
            f"the folder {path} has no tokenizer: one of {', '.join(_VOCABULARY_FILES)} is needed, "
            f"with the tokenizer_config.json of the model"
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def known_tokens(tokenizer: Any, vocab_size: int) -> Bool[np.ndarray, "vocab"]:
    """Which of the ids 0 to `vocab_size - 1`, the rows of the embedding, the tokenizer has a token for.

    The others are padding of the embedding, or gaps between the ids. Raises CheckpointError where the tokenizer has an
    id that the embedding has no row for.
    """
    ids = np.fromiter({*tokenizer.get_vocab().values(), *getattr(tokenizer, "added_tokens_decoder", ())}, np.int64)
    beyond = int((ids >= vocab_size).sum())
    if beyond:
        raise CheckpointError(
            f"the tokenizer does not belong to the model: {beyond} of its {ids.size} tokens have ids beyond the "
            f"embedding (up to {ids.max()}; vocab_size={vocab_size} allows 0 to {vocab_size - 1}): use the tokenizer "
            f"files of this model, or the model whose embedding was extended with the added tokens"
        )
    known = np.zeros(vocab_size, bool)
    known[ids] = True
    return known


def _from_gguf(path: Path) -> Any:
    metadata = read_gguf(path).metadata
    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    pre = ggml.get("pre", "default")
    if "tokens" not in ggml:
        raise CheckpointError(
            f"{path} has no tokenizer (tokenizer.ggml.tokens): name a folder with one, or another file"
        )
    if ggml.get("model") == "gpt2" and pre in (*_PATTERNS, *_PLAIN, *_DIGITS_APART):
        tokenizer = _byte_level(ggml, pre)
    else:
        from transformers import AutoTokenizer

        logger.info("%s: tokenizer %s/%s is read by transformers", path, ggml.get("model"), pre)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if template := metadata.get("tokenizer.chat_template"):
        tokenizer.chat_template = template
    return tokenizer


def _byte_level(ggml: dict[str, Any], pre: str) -> Any:
    """A fast byte-level BPE tokenizer. transformers' own conversion takes 6 s and does not know `pre`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = ggml["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in ggml["merges"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    backend.normalizer, backend.pre_tokenizer = _cutting(pre)
    backend.decoder = decoders.ByteLevel()
    kinds = ggml.get("token_type") or [1] * len(tokens)
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == _CONTROL)
            (backend.add_special_tokens if kind == _CONTROL else backend.add_tokens)([added])

    def named(key: str) -> str | None:
        index = ggml.get(f"{key}_token_id")
        return tokens[index] if index is not None else None

    if ggml.get("add_bos_token") and (bos := named("bos")):
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, ggml["bos_token_id"])]
        )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{argument: name for argument, key in names.items() if (name := named(key)) is not None},
    )


def _cutting(pre: str) -> tuple[Any, Any]:
    """Normalizer and pre-tokenizer of a kind of byte-level BPE."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if pattern := _PATTERNS.get(pre):
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return (None if pre == "llama-bpe" else normalizers.NFC()), pre_tokenizers.Sequence([split, whole])
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGITS_APART:
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    return None, plain
