"""What a batch asks of the sampler, chosen on the host: each variant is a program of its own. Imports no JAX."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import reduce
from typing import Any

LogitsProcessor = Callable[[Any, Any], Any]
"""A user's rule, written in jnp: `(logits float32 [rows, vocab], SamplingInputs) -> logits`, row by row independent.

It sees each row's token history in `inputs.history` and must not mix rows. It is traced into the program, so it is
given when the engine is built; a request asks for it by name.
"""

SMALL_TOP_K = 64
"""Largest top_k for which the filters need no search over the vocabulary."""
MAX_LOGPROBS = 20
"""Most likely tokens whose log probabilities one request can ask for, as in vLLM by default."""


class Filters(IntEnum):
    """How much of the vocabulary the filters have to search; each does what those before it do."""

    NONE = 0
    SMALL_TOP_K = 1
    """Every filtered row has a top_k of at most 64, or min_p alone; top_p and min_p may come with top_k."""
    TOP_P = 2
    """Some row has top_p without such a top_k."""
    ALL = 3
    """Some row has a larger top_k."""


@dataclass(frozen=True, kw_only=True)
class SamplerVariant:
    """What exists in one compiled sampler. The default draws and takes the most likely token, by row, and nothing else.

    A row that asks for less than a variant has gets the same token from it: any variant that `covers` the rows serves.

    Attributes:
        draws: False if every row takes the most likely token: no noise is computed.
        filters: top_k, top_p, min_p.
        suppress: ids that end the request, before its min_tokens.
        edits: logit_bias, bad_words; and `suppress`.
        penalties: repetition, presence and frequency penalty.
        mask: bit masks: allowed_token_ids and structured output.
        processors: rules of the user, by place; row i of a batch uses those whose bit is set in its inputs.
        logprobs: None, or how many most likely tokens are reported beside the chosen one.
        kernel: whether tokens are drawn by the Pallas kernel, in which each row costs what it asks for, so that it
            needs no variants for `filters` and `suppress`. On one Hopper GPU; no row needs it.
    """

    draws: bool = True
    filters: Filters = Filters.NONE
    suppress: bool = False
    edits: bool = False
    penalties: bool = False
    mask: bool = False
    processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None
    kernel: bool = False

    def __or__(self, other: "SamplerVariant") -> "SamplerVariant":
        """The smallest variant that covers both."""
        if self == other:
            return self
        counts = [count for count in (self.logprobs, other.logprobs) if count is not None]
        longest = max(self.processors, other.processors, key=len)
        if longest[: len(self.processors)] != self.processors or longest[: len(other.processors)] != other.processors:
            raise ValueError(
                "two variants have different logits processors: give all of them to every variant of an engine"
            )
        return SamplerVariant(
            draws=self.draws or other.draws,
            filters=max(self.filters, other.filters),
            suppress=self.suppress or other.suppress,
            edits=self.edits or other.edits,
            penalties=self.penalties or other.penalties,
            mask=self.mask or other.mask,
            processors=longest,
            logprobs=max(counts, default=None),
            kernel=self.kernel or other.kernel,
        )

    def covers(self, other: "SamplerVariant") -> bool:
        """Whether rows that need `other` are served right."""
        return self | other == self

    @property
    def name(self) -> str:
        """`greedy`, `plain` for draws, and what it has beyond that, joined by `+`."""
        parts = ["plain" if self.draws else "greedy"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "draws" or value == field.default:
                continue
            parts.append(
                value.name.lower()
                if isinstance(value, Filters)
                else field.name
                if value is True
                else f"{field.name}{value if isinstance(value, int) else len(value)}"
            )
        return "+".join(parts)


MAX_PROCESSORS = 32
"""Logits processors of an engine: a request's choice is 32 bits."""


def checked_processors(processors: Any) -> dict[str, LogitsProcessor]:
    """Logits processors by name, in their order; None is none.

    Raises:
        TypeError: if they are not functions by name.
        ValueError: if there are too many.
    """
    if processors is None:
        return {}
    if not isinstance(processors, Mapping) or not all(
        isinstance(name, str) and callable(function) for name, function in processors.items()
    ):
        raise TypeError(f"logits_processors must be a dict of functions by name, not {processors!r:.80}")
    if len(processors) > MAX_PROCESSORS:
        raise ValueError(f"logits_processors must be at most {MAX_PROCESSORS}; got {len(processors)}")
    return dict(processors)


GREEDY = SamplerVariant(draws=False)
PLAIN = SamplerVariant()
KERNEL = SamplerVariant(filters=Filters.ALL, suppress=True, kernel=True)


def everything(processors: tuple[LogitsProcessor, ...] = ()) -> SamplerVariant:
    """All there is, with the engine's `processors`: covers every request."""
    return SamplerVariant(
        filters=Filters.ALL,
        suppress=True,
        edits=True,
        penalties=True,
        mask=True,
        processors=processors,
        logprobs=MAX_LOGPROBS,
    )


def join(variants: Iterable[SamplerVariant]) -> SamplerVariant:
    """The smallest variant that covers all of them."""
    return reduce(SamplerVariant.__or__, variants, GREEDY)


def covering(needed: SamplerVariant, compiled: Iterable[SamplerVariant]) -> SamplerVariant | None:
    """The first of `compiled`, given in order of cost, that serves rows which need `needed`; None if there is none."""
    return next((variant for variant in compiled if variant.covers(needed)), None)
