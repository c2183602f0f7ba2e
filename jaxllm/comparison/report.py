"""A comparison as text and as plain data."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jaxllm.comparison.metrics import Continuation, LogitsDifference, PartDifference
from jaxllm.comparison.verdict import Excess, Tolerances


@dataclass(frozen=True)
class Report:
    """What was compared, the figures, and the verdict.

    Attributes:
        model: our side's checkpoint.
        reference: the PyTorch side's.
        dtype: of both.
        kv_cache_dtype: the option, of our side.
        devices: where each ran, by side.
        prompt_tokens: length of every prompt.
        parts: by part of the model.
        logits: over all positions.
        through_cache: the same where attention sees keys and values as the quantized cache holds them; None where it
            is not quantized.
        continuations: by prompt; empty where none was asked for.
        tolerances: what was allowed.
        excesses: what was too large.
    """

    model: str
    reference: str
    dtype: str
    kv_cache_dtype: str
    devices: dict[str, str]
    prompt_tokens: list[int]
    parts: list[PartDifference]
    logits: LogitsDifference
    through_cache: LogitsDifference | None
    continuations: list[Continuation]
    tolerances: Tolerances
    excesses: list[Excess]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; a figure that is not finite is None."""
        through_cache = None if self.through_cache is None else _figures(self.through_cache)
        data = {
            **asdict(self),
            "logits": _figures(self.logits),
            "through_cache": through_cache,
            "passed": not self.excesses,
        }
        return _finite(data)

    def text(self) -> str:
        """For a terminal."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"ours      {self.model}, {self.dtype}, {self.devices['ours']}"
        yield f"reference {self.reference}, {self.dtype}, {self.devices['reference']}"
        yield f"prompts   {len(self.prompt_tokens)}, {sum(self.prompt_tokens)} tokens"
        yield ""
        yield "            local: on the reference's input     cumulative: each on its own"
        yield f"{'':<14}{'max abs':>10}{'relative':>11}{'':13}{'max abs':>10}{'relative':>11}"
        for part in self.parts:
            local, own = part.local, part.cumulative
            mark = "  <-- exceeds" if self._is_wrong(part.part) else ""
            yield (
                f"{part.part:<14}{local.max_abs:>10.2e}{local.relative:>11.2e}{'':13}"
                f"{own.max_abs:>10.2e}{own.relative:>11.2e}{mark}"
            )
        yield ""
        yield self._standing_out()
        yield from _logits_lines(self.logits)
        if self.through_cache is not None:
            yield f"with keys and values as the KV cache holds them ({self.kv_cache_dtype}):"
            yield from (f"  {line}" for line in _logits_lines(self.through_cache))
        for index, continuation in enumerate(self.continuations):
            yield f"greedy, prompt {index}: {_agreement(continuation)}"
        yield ""
        for excess in self.excesses:
            yield f"EXCEEDED {excess}"
        allowed = ", ".join(f"{name} {value:g}" for name, value in asdict(self.tolerances).items())
        yield f"{'FAILED' if self.excesses else 'passed'} (tolerances: {allowed})"

    def _is_wrong(self, part: str) -> bool:
        return any(excess.figure == "local" and excess.where == part for excess in self.excesses)

    def _standing_out(self) -> str:
        """The largest local difference of a layer beside the median one: a wrong weight shows before it exceeds."""
        layers = [part for part in self.parts if part.part.startswith("layer")]
        worst = max(layers, key=lambda part: (math.isnan(part.local.relative), part.local.relative))
        median = statistics.median(part.local.relative for part in layers)
        times = f", {worst.local.relative / median:.1f} times the median layer's" if median > 0 else ""
        return f"largest local difference of a layer: {worst.local.relative:.2e} in {worst.part}{times}"


def _figures(logits: LogitsDifference) -> dict[str, float]:
    names = ("positions", "max_abs", "largest", "relative", "kl_mean", "kl_max", "top1")
    return {name: getattr(logits, name) for name in names}


def _logits_lines(logits: LogitsDifference) -> Iterator[str]:
    yield f"logits: max abs {logits.max_abs:.2e}, {logits.relative:.2e} of the largest |logit| {logits.largest:.3g}"
    yield f"KL divergence: mean {logits.kl_mean:.2e}, max {logits.kl_max:.2e} nats"
    yield f"top-1 agreement: {logits.agreeing} of {logits.positions} positions ({logits.top1:.1%})"


def _agreement(continuation: Continuation) -> str:
    if continuation.gap is None:
        return f"all {continuation.tokens} tokens agree"
    return (
        f"{continuation.agreed} of {continuation.tokens} tokens agree; then the reference has "
        f"{continuation.reference_token}, ours {continuation.our_token}, where the reference's top two logits are "
        f"{continuation.gap:.2e} apart"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
