"""How the tokens of one request are chosen and when it ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxllm.checks import integer, real

MAX_SUPPRESSED_IDS = 16
"""Token ids that one row can suppress on the device (the ids that would end it before `min_tokens`)."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request, in vLLM's names and meaning.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it. Finite, >= 0.
        top_k: keep the k most likely tokens, ties with the k-th included. -1 or 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p, ties included. In (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one. In [0, 1].
        seed: draws depend on the seed and the position in the text alone. None takes one from the engine's seed.
        max_tokens: most tokens to generate, >= 1.
        min_tokens: end-of-sequence and stop tokens cannot be chosen before so many tokens, >= 0.
        ignore_eos: the model's end-of-sequence tokens do not end the request.
        stop: texts that end the request; the output ends before them.
        stop_token_ids: tokens that end the request, besides the model's own.

    Raises:
        TypeError: for an unknown field or a value of the wrong type.
        ValueError: for a value out of range. Both messages name the field, the value and the range.
    """

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

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            self._set(name, real(name, getattr(self, name)))
        for name in ("top_k", "max_tokens", "min_tokens"):
            self._set(name, integer(name, getattr(self, name)))
        if self.seed is not None:
            self._set("seed", integer("seed", self.seed))
            _require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a signed 64-bit integer, or None")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        self._set("stop", _strings("stop", self.stop))
        if isinstance(self.stop_token_ids, str | int) or not hasattr(self.stop_token_ids, "__iter__"):
            raise TypeError(f"stop_token_ids must be a list of token ids, not {self.stop_token_ids!r}")
        self._set("stop_token_ids", tuple(integer("stop_token_ids", token) for token in self.stop_token_ids))

        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "finite and >= 0 (0 is greedy)",
        )
        _require(self.top_k >= -1, "top_k", self.top_k, ">= 1, or -1 or 0 for no limit")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, ">= 1")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"in [0, max_tokens={self.max_tokens}]",
        )
        _require(all(self.stop), "stop", self.stop, "texts of at least one character")
        _require(all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "ids >= 0")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether a draw is restricted by top_k, top_p or min_p."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @classmethod
    def names(cls) -> frozenset[str]:
        """The names of all fields."""
        return frozenset(field.name for field in fields(cls))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {allowed}; got {value!r}")


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
