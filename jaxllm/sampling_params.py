"""How the tokens of one request are chosen and when it ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxllm.checks import integer, real
from jaxllm.sampling.variant import MAX_LOGPROBS, SMALL_TOP_K, Filters, LogitsProcessor, SamplerVariant
from jaxllm.structured.params import StructuredOutputsParams

UNLIMITED = 2**31 - 1
"""Of `max_tokens`."""
MAX_OUTPUTS = 16_384
"""Outputs of one request: vLLM's limit."""
MAX_SUPPRESSED_IDS = 16
"""Token ids that one row can suppress on the device (the ids that would end it before `min_tokens`)."""
MAX_LOGIT_BIAS = 300
"""Tokens that one request's `logit_bias` can name: OpenAI's limit."""
REPETITION_PENALTIES = 1e-18, 1e18
"""The least and the most `repetition_penalty`: with it, a logit of up to 1e20 stays within float32."""
MAX_BAD_WORDS = 64
"""Token sequences that one request's `bad_words` can become; most words become two, with and without a space."""
MAX_BAD_WORD_TOKENS = 8
"""Tokens of each of them."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request, in vLLM's names and meaning.

    Attributes:
        n: outputs to generate for the prompt, 1 to 16,384; 1 where the most likely token is taken.
        presence_penalty: subtracted from the logits of tokens that the output has. In [-2, 2].
        frequency_penalty: subtracted from them once for each time. In [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or output have. In
            [1e-18, 1e18].
        temperature: 0 takes the most likely token; otherwise logits are divided by it. Finite, >= 0.
        top_k: keep the k most likely tokens, ties with the k-th included. -1 or 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p, ties included. In (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one. In [0, 1].
        seed: draws depend on the seed and the position in the text alone. None takes one from the engine's seed, and so
            does -1, which is kept as None.
        max_tokens: most tokens to generate, >= 1. None is as many as the engine has room for, and kept as 2^31 - 1.
        min_tokens: end-of-sequence and stop tokens cannot be chosen before so many tokens, >= 0.
        ignore_eos: the model's end-of-sequence tokens do not end the request.
        stop: texts that end the request; the output ends before them.
        stop_token_ids: tokens that end the request, besides the model's own.
        include_stop_str_in_output: the output ends behind the stop text, or with the text of the stop token.
        bad_words: texts that are not generated, at the start of a word or within it.
        logit_bias: added to the logits of tokens, by id; each in [-100, 100]. Kept as pairs, in order of id.
        allowed_token_ids: the only tokens that may be generated.
        logprobs: log probabilities of so many most likely tokens, and of the chosen one, for each token of the output.
        prompt_logprobs: the same for the prompt.
        detokenize: False gives token ids without text.
        skip_special_tokens: special tokens are not part of the text.
        logits_processors: names of the engine's logits processors to use.
        structured_outputs: what the output has to follow.

    Raises:
        TypeError: for an unknown field or a value of the wrong type.
        ValueError: for a value out of range. Both messages name the field, the value and the range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    bad_words: str | Sequence[str] = ()
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logits_processors: str | Sequence[str] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            self._set("max_tokens", UNLIMITED)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            self._set(name, real(name, getattr(self, name)))
        for name in ("n", "top_k", "max_tokens", "min_tokens"):
            self._set(name, integer(name, getattr(self, name)))
        for name in ("seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, integer(name, getattr(self, name)))
        if self.seed == -1:
            self._set("seed", None)
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in ("stop", "bad_words", "logits_processors"):
            self._set(name, _strings(name, getattr(self, name)))
        self._set(
            "stop_token_ids", _token_ids("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids)
        )
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", tuple(sorted(set(_token_ids("allowed_token_ids", self.allowed_token_ids)))))
        self._set("logit_bias", _biases(self.logit_bias))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise TypeError(f"structured_outputs must be StructuredOutputsParams, not {self.structured_outputs!r:.80}")
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        least, most = REPETITION_PENALTIES
        seed, biases = self.seed, [bias for _, bias in self.logit_bias]  # type: ignore[misc]
        infinite = "-1 or 0 for no limit"
        checks: list[tuple[str, str, bool]] = [
            ("seed", "a signed 64-bit integer, or None", seed is None or -(2**63) <= seed < 2**63),
            ("temperature", "finite and >= 0 (0 is greedy)", 0 <= self.temperature < math.inf),
            ("top_k", f">= 1, or {infinite}", self.top_k >= -1),
            ("top_p", "in (0, 1]", 0 < self.top_p <= 1),
            ("min_p", "in [0, 1]", 0 <= self.min_p <= 1),
            ("presence_penalty", "in [-2, 2]", -2 <= self.presence_penalty <= 2),
            ("frequency_penalty", "in [-2, 2]", -2 <= self.frequency_penalty <= 2),
            (
                "repetition_penalty",
                f"in [{least}, {most}] (1 is none, 1.1 is usual)",
                least <= self.repetition_penalty <= most,
            ),
            ("n", f"in [1, {MAX_OUTPUTS}]", 1 <= self.n <= MAX_OUTPUTS),
            ("max_tokens", ">= 1", self.max_tokens >= 1),
            ("min_tokens", f"in [0, max_tokens={self.max_tokens}]", 0 <= self.min_tokens <= self.max_tokens),
            ("logprobs", f"in [0, {MAX_LOGPROBS}], or None", _in_range(self.logprobs)),
            ("prompt_logprobs", f"in [0, {MAX_LOGPROBS}], or None", _in_range(self.prompt_logprobs)),
            ("stop", "texts of at least one character", all(self.stop)),
            ("bad_words", "texts of at least one character other than spaces", all(map(str.strip, self.bad_words))),
            ("stop_token_ids", "ids >= 0", all(token >= 0 for token in self.stop_token_ids)),
            (
                "allowed_token_ids",
                "ids >= 0, at least one",
                self.allowed_token_ids is None or _some(self.allowed_token_ids),
            ),
            ("logit_bias", f"for at most {MAX_LOGIT_BIAS} tokens", len(biases) <= MAX_LOGIT_BIAS),
            ("logit_bias", "in [-100, 100]", all(-100 <= bias <= 100 for bias in biases)),
            ("logit_bias", "for ids >= 0", all(token >= 0 for token, _ in self.logit_bias)),  # type: ignore[misc]
        ]
        for name, allowed, holds in checks:
            if not holds:
                raise ValueError(f"{name} must be {allowed}; got {getattr(self, name)!r:.200}")

    def _check_combinations(self) -> None:
        if self.greedy and self.n > 1:
            raise ValueError(f"n must be 1 where temperature is 0, since all outputs would be equal; got {self.n}")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop must be empty where detokenize is False; got {self.stop!r}: use stop_token_ids")
        if self.structured_outputs is not None:
            # Each of these could forbid the only token that the structure allows.
            for name, free in (("ignore_eos", False), ("min_tokens", 0), ("allowed_token_ids", None)):
                if getattr(self, name) != free:
                    raise ValueError(f"{name} must be {free} with structured_outputs; got {getattr(self, name)!r:.80}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether a draw is restricted by top_k, top_p or min_p."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalized(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def needs_history(self) -> bool:
        """Whether the device needs the tokens before the sampled one."""
        return self.penalized or bool(self.bad_words) or bool(self.logits_processors)

    def variant(self, processors: tuple[LogitsProcessor, ...] = ()) -> SamplerVariant:
        """What the sampler must have to serve this request; `processors` are all those of the engine, in order."""
        if not self.filtered:
            filters = Filters.NONE
        elif self.top_k > SMALL_TOP_K:
            filters = Filters.ALL
        else:
            filters = Filters.TOP_P if self.top_k < 1 and self.top_p < 1 else Filters.SMALL_TOP_K
        return SamplerVariant(
            draws=not self.greedy,
            filters=filters,
            suppress=self.min_tokens > 0,
            edits=bool(self.logit_bias) or bool(self.bad_words),
            penalties=self.penalized,
            mask=self.allowed_token_ids is not None or self.structured_outputs is not None,
            processors=processors if self.logits_processors else (),
            logprobs=max((count for count in (self.logprobs, self.prompt_logprobs) if count is not None), default=None),
        )

    def each_output(self) -> "list[SamplingParams]":
        """Parameters of the `n` outputs, each a request of its own; with a seed, the i-th takes seed + i."""
        outputs = [replace(self, n=1) for _ in range(self.n)]
        for i, output in enumerate(outputs):
            if self.seed is not None:  # not through the constructor, where -1 is none
                output._set("seed", (self.seed + i + 2**63) % 2**64 - 2**63)
        return outputs

    @classmethod
    def names(cls) -> frozenset[str]:
        """The names of all fields."""
        return frozenset(field.name for field in fields(cls))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _in_range(count: int | None) -> bool:
    return count is None or 0 <= count <= MAX_LOGPROBS


def _some(ids: Sequence[int]) -> bool:
    return bool(ids) and all(token >= 0 for token in ids)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | int) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be a list of token ids, not {value!r:.80}")
    tokens = tuple(value)
    try:
        return tuple(integer(name, token) for token in tokens)
    except TypeError:
        raise TypeError(f"{name} must be a list of token ids, whole numbers; got {tokens!r:.80}") from None


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    try:
        pairs = dict(value)
        return tuple(sorted((integer("logit_bias", token), real("logit_bias", bias)) for token, bias in pairs.items()))
    except (TypeError, ValueError):
        raise TypeError(f"logit_bias must be a dict of token ids to numbers, not {value!r:.80}") from None


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    try:
        strings = tuple(value)
    except TypeError:
        strings = (value,)
    if not all(isinstance(item, str) for item in strings):
        raise TypeError(f"{name} must be a text or a list of texts, not {value!r}")
    return strings
