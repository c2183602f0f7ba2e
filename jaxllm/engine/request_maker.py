"""Prompts and parameters to requests: whatever can be wrong with them is found here, before anything is queued."""

import itertools
import random
from array import array
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from jaxllm.engine.prompts import Prompt, prompt_token_ids
from jaxllm.engine.request import Request
from jaxllm.engine.spec import RunnerSpec
from jaxllm.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_SUPPRESSED_IDS, SamplingParams
from jaxllm.structured.grammar import GrammarCompiler
from jaxllm.text.bad_words import bad_word_tokens
from jaxllm.text.prompt import encode_prompt


class RequestMaker:
    """Makes the requests of one engine.

    Args:
        spec: the model's vocabulary, what the tokenizer knows of it, and the logits processors.
        tokenizer: a transformers tokenizer, or None to work on ids alone.
        eos_token_ids: ids that end a text.
        seed: of the draws of requests that bring none.
    """

    def __init__(self, spec: RunnerSpec, tokenizer: Any | None, eos_token_ids: frozenset[int], seed: int):
        self.spec, self.tokenizer, self.eos_token_ids, self.seed = spec, tokenizer, eos_token_ids, seed
        self._made = itertools.count()

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Of structured outputs; made, and llguidance imported, when first used. Raises what it raises."""
        eos = [token for token in self.eos_token_ids if self._is_known(token)]
        return GrammarCompiler(self.tokenizer, self.spec.run_time.vocab_size, eos)

    def make(self, request_id: str, prompt: Prompt, params: SamplingParams, key: Hashable | None = None) -> Request:
        """A request, with what its parameters become compiled; `key` as `Request.key`.

        Raises:
            TypeError: if the prompt is neither text nor token ids, or text without a tokenizer.
            ValueError: if the prompt is empty or has ids outside the vocabulary, or if the parameters cannot be met.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        if params.n != 1:
            raise ValueError(f"n={params.n}: one request has one output; use `prepare_each`, or `LLM`")
        self._check(params)
        token_ids = self._token_ids(prompt)
        index = next(self._made)
        seed = params.seed if params.seed is not None else random.Random(f"{self.seed}/{index}").getrandbits(63)
        words = bad_word_tokens(self.tokenizer, params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        request = Request(
            request_id,
            token_ids,
            params,
            self.eos_token_ids,
            index=index,
            seed=seed,
            bad_words=words,
            processors=self._processors(params.logits_processors),
            matcher=None if params.structured_outputs is None else self.grammars.matcher(params.structured_outputs),
            key=key,
        )
        self._check_ends(request)
        return request

    def _check(self, params: SamplingParams) -> None:
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(f"{name}={getattr(params, name)!r} needs a tokenizer; leave skip_tokenizer_init off")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", [token for token, _ in params.logit_bias])  # type: ignore[misc]
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())

    def _check_ends(self, request: Request) -> None:
        """The ids that end it fit, and where only some ids are allowed one of them can be generated."""
        params, ending = request.params, request.ending_ids()
        if params.min_tokens and len(ending) > MAX_SUPPRESSED_IDS:
            raise ValueError(
                f"min_tokens={params.min_tokens} with {len(ending)} stop and end-of-sequence ids: at most "
                f"{MAX_SUPPRESSED_IDS} can be kept back; shorten stop_token_ids"
            )
        if params.allowed_token_ids is None:
            return
        known = [token for token in params.allowed_token_ids if self._is_known(token)]
        if not known:
            raise ValueError(
                f"allowed_token_ids={list(params.allowed_token_ids)!r:.200} has no id that the tokenizer knows"
            )
        if params.min_tokens and ending.issuperset(known):
            raise ValueError(
                f"allowed_token_ids={known!r:.200} all end the request, and min_tokens={params.min_tokens} keeps them "
                f"back: allow another one, or set min_tokens=0"
            )

    def _processors(self, names: Sequence[str]) -> int:
        known = list(self.spec.logits_processors)
        for name in names:
            if name not in known:
                have = ", ".join(map(repr, known)) or "none"
                raise ValueError(
                    f"logits_processors has {name!r}, which this engine was not built with; it has {have}: give it as "
                    f"LLM(..., logits_processors={{{name!r}: function}})"
                )
        return sum(1 << known.index(name) for name in set(names))

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("a text prompt needs a tokenizer; give token ids, or leave skip_tokenizer_init off")
            if not prompt:
                raise ValueError("the prompt is empty; give at least one character")
            token_ids = encode_prompt(self.tokenizer, prompt)
        else:
            token_ids = prompt_token_ids(prompt)
        if not token_ids:
            raise ValueError("the prompt is empty; give at least one token")
        self._check_ids("prompt", token_ids)
        return token_ids

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        vocabulary = self.spec.model.vocab_size
        if not _all_below(vocabulary, ids):
            wrong = [token for token in ids if not 0 <= token < vocabulary]
            raise ValueError(f"{name} has token id {wrong[0]}; the model's ids are 0 to {vocabulary - 1}")

    def _is_known(self, token: int) -> bool:
        known: np.ndarray = self.spec.known_tokens
        return token < len(known) and bool(known[token])


def _all_below(limit: int, ids: Sequence[int]) -> bool:
    """Whether all are from 0 to `limit` - 1; of thousands in half the time that `min` and `max` take."""
    if not ids:
        return True
    try:
        values = np.frombuffer(array("q", ids), np.int64)
    except OverflowError:
        return False
    return bool(values.min() >= 0 and values.max() < limit)
