"""Tolerances, and what exceeds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from jaxllm.comparison.metrics import Continuation, LogitsDifference, PartDifference


@dataclass(frozen=True)
class Tolerances:
    """The largest figures that count as rounding.

    Attributes:
        local: relative difference of one part on the reference's input.
        hidden: relative difference of hidden states, each side on its own.
        logits: largest difference of logits, in units of the largest |logit|.
        kl: largest KL divergence of a position, in nats.
        gap: largest distance of the reference's two largest logits where a greedy continuation may part from it.
        cache_kl: largest KL divergence of a position, in nats, that a quantized KV cache may cause.
    """

    local: float
    hidden: float
    logits: float
    kl: float
    gap: float
    cache_kl: float

    @classmethod
    def of(cls, dtype: str, changes: Mapping[str, float] | None = None, *, quantized: bool = False) -> "Tolerances":
        """Those of `dtype`, with `changes` by name; continuations part early where the KV cache is `quantized`."""
        defaults = DEFAULTS[dtype]
        if quantized:
            defaults = {**defaults, "gap": max(defaults["gap"], QUANTIZED_GAP)}
        return cls(**{**defaults, **(changes or {})})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all tolerances."""
        return tuple(field.name for field in fields(cls))


DEFAULTS: dict[str, dict[str, float]] = {
    "float32": {"local": 1e-5, "hidden": 1e-4, "logits": 1e-4, "kl": 1e-6, "gap": 1e-3, "cache_kl": 0.5},
    "float16": {"local": 5e-3, "hidden": 2e-2, "logits": 2e-2, "kl": 1e-2, "gap": 0.1, "cache_kl": 0.51},
    "bfloat16": {"local": 4e-2, "hidden": 0.15, "logits": 0.1, "kl": 0.1, "gap": 0.75, "cache_kl": 0.6},
}
"""By dtype: several times what unchanged checkpoints show, whose figures grow with depth and width."""

QUANTIZED_GAP = 0.75
"""The least `gap` where the KV cache is float8."""


@dataclass(frozen=True)
class Excess:
    """A figure above its tolerance.

    Attributes:
        figure: its name in `Tolerances`.
        where: the part, position or prompt.
        value: the figure.
        tolerance: what was allowed.
    """

    figure: str
    where: str
    value: float
    tolerance: float

    def __str__(self) -> str:
        return f"{self.figure}: {self.value:.2e} at {self.where} exceeds the tolerance {self.tolerance:.2e}"


def find_excesses(
    parts: Sequence[PartDifference],
    logits: LogitsDifference,
    continuations: Sequence[Continuation],
    tolerances: Tolerances,
    through_cache: LogitsDifference | None = None,
) -> list[Excess]:
    """Every part whose own error is too large; of what follows from it, the first hidden state and the totals."""
    found = [
        Excess("local", part.part, part.local.relative, tolerances.local)
        for part in parts
        if _exceeds(part.local.relative, tolerances.local)
    ]
    drifted = [part for part in parts[:-1] if _exceeds(part.cumulative.relative, tolerances.hidden)]
    found += [
        Excess("hidden", f"{part.part} (the first of {len(drifted)})", part.cumulative.relative, tolerances.hidden)
        for part in drifted[:1]
    ]
    totals = [("logits", logits.relative), ("kl", logits.kl_max)]
    if through_cache is not None:
        totals.append(("cache_kl", through_cache.kl_max))
    for name, value in totals:
        limit = getattr(tolerances, name)
        if _exceeds(value, limit):
            found.append(Excess(name, "the output", value, limit))
    found += [
        Excess("gap", f"prompt {index}, token {continuation.agreed}", continuation.gap, tolerances.gap)
        for index, continuation in enumerate(continuations)
        if continuation.gap is not None and _exceeds(continuation.gap, tolerances.gap)
    ]
    return found


def _exceeds(value: float, tolerance: float) -> bool:
    return not value <= tolerance  # so that a figure that is not a number does
