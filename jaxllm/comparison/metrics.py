"""How far two forward passes differ: hidden states, logits, greedy continuations. NumPy alone.

A figure that is not a number stays one when figures are put together, so that it cannot hide behind a smaller one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

_ROWS = 64
"""Positions whose probabilities are computed at once: float64 over a vocabulary of 150,000 is 1.2 MB a position."""


@dataclass(frozen=True)
class Trace:
    """What the reference computed for one prompt.

    Attributes:
        tokens: the prompt.
        outputs: `[tokens, size]` of every part in float32: embedding, each layer (before the final norm), final norm,
            logits.
        continuation: greedy tokens after the prompt.
        gaps: the distance of the two largest logits where each of them was chosen.
    """

    tokens: Int[np.ndarray, "tokens"]
    outputs: list[Float[np.ndarray, "tokens _"]]
    continuation: list[int]
    gaps: list[float]


def part_names(num_layers: int) -> list[str]:
    """The parts of a decoder, in the order of `Trace.outputs`."""
    return ["embedding", *(f"layer {index}" for index in range(num_layers)), "final norm", "output layer"]


@dataclass(frozen=True)
class Difference:
    """Of two arrays `[tokens, size]`.

    Attributes:
        max_abs: the largest absolute difference of two elements.
        relative: the largest over tokens of |ours - reference| / |reference|, 2-norms over the size. By token, because
            some tokens of trained models (the first, often) have norms a thousand times those of the others.
    """

    max_abs: float = 0.0
    relative: float = 0.0

    @classmethod
    def of(cls, ours: Float[np.ndarray, "tokens size"], reference: Float[np.ndarray, "tokens size"]) -> "Difference":
        """Computed in float64."""
        wide = reference.astype(np.float64)
        difference = ours.astype(np.float64) - wide
        norms = np.maximum(np.linalg.norm(wide, axis=-1), np.finfo(np.float32).tiny)
        relative = np.linalg.norm(difference, axis=-1) / norms
        return cls(float(np.abs(difference).max()), float(relative.max()))

    def __or__(self, other: "Difference") -> "Difference":
        """The larger of both."""
        return Difference(
            float(np.maximum(self.max_abs, other.max_abs)), float(np.maximum(self.relative, other.relative))
        )


@dataclass(frozen=True)
class PartDifference:
    """One part of the model over all prompts.

    Attributes:
        part: its name.
        cumulative: each side having run on its own output of the part before.
        local: our part having run on the reference's output of the part before: the error of this part alone.
    """

    part: str
    cumulative: Difference
    local: Difference

    def __or__(self, other: "PartDifference") -> "PartDifference":
        """The larger of both."""
        return PartDifference(self.part, self.cumulative | other.cumulative, self.local | other.local)


@dataclass(frozen=True)
class LogitsDifference:
    """Logits and next-token probabilities over all positions of all prompts.

    Attributes:
        positions: how many were compared.
        max_abs: the largest absolute difference of two logits.
        largest: the largest |logit| of the reference.
        kl_sum: sum over positions of KL(reference || ours) in nats, over the ids that the tokenizer knows.
        kl_max: the largest of them.
        agreeing: positions where both have the same most likely token.
    """

    positions: int = 0
    max_abs: float = 0.0
    largest: float = 0.0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    agreeing: int = 0

    @classmethod
    def of(
        cls, ours: Float[np.ndarray, "tokens vocab"], reference: Float[np.ndarray, "tokens vocab"], num_valid: int
    ) -> "LogitsDifference":
        """Of one prompt; ids from `num_valid` on have logits but can never be chosen."""
        valid, expected = ours[:, :num_valid], reference[:, :num_valid]
        kl = _divergence(expected, valid)
        return cls(
            positions=len(ours),
            max_abs=Difference.of(ours, reference).max_abs,
            largest=float(np.abs(reference).max()),
            kl_sum=float(kl.sum()),
            kl_max=float(kl.max()),
            agreeing=int((valid.argmax(-1) == expected.argmax(-1)).sum()),
        )

    def __or__(self, other: "LogitsDifference") -> "LogitsDifference":
        """Both sets of positions together."""
        return LogitsDifference(
            self.positions + other.positions,
            float(np.maximum(self.max_abs, other.max_abs)),
            float(np.maximum(self.largest, other.largest)),
            self.kl_sum + other.kl_sum,
            float(np.maximum(self.kl_max, other.kl_max)),
            self.agreeing + other.agreeing,
        )

    @property
    def relative(self) -> float:
        """The largest difference, in units of the largest |logit|."""
        return self.max_abs / max(self.largest, float(np.finfo(np.float32).tiny))

    @property
    def kl_mean(self) -> float:
        """KL divergence per position, in nats."""
        return self.kl_sum / self.positions

    @property
    def top1(self) -> float:
        """Share of positions where both have the same most likely token."""
        return self.agreeing / self.positions


def _divergence(
    reference: Float[np.ndarray, "tokens vocab"], ours: Float[np.ndarray, "tokens vocab"]
) -> Float[np.ndarray, "tokens"]:
    """KL(reference || ours) of each position, in nats. Not below 0, which rounding could make of an exact 0."""
    kl = []
    for start in range(0, len(ours), _ROWS):
        p, q = (_log_softmax(logits[start : start + _ROWS].astype(np.float64)) for logits in (reference, ours))
        kl.append((np.exp(p) * (p - q)).sum(axis=-1))
    return np.maximum(np.concatenate(kl), 0.0)


def _log_softmax(logits: Float[np.ndarray, "tokens vocab"]) -> Float[np.ndarray, "tokens vocab"]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Continuation:
    """How far two greedy continuations of a prompt agree.

    Attributes:
        tokens: how many the reference generated.
        agreed: how many were equal before the first that was not.
        reference_token: the reference's token there; None where all are equal. So are the following.
        our_token: ours.
        gap: the distance of the reference's two largest logits there; a small one is a tie that rounding decides.
    """

    tokens: int
    agreed: int
    reference_token: int | None = None
    our_token: int | None = None
    gap: float | None = None

    @classmethod
    def of(cls, ours: Sequence[int], trace: Trace) -> "Continuation":
        """Compare token by token.

        Raises:
            ValueError: if ours is shorter without being different: it ended before it was told to.
        """
        count = len(trace.continuation)
        for index, (mine, theirs) in enumerate(zip(ours, trace.continuation, strict=False)):
            if mine != theirs:
                return cls(count, index, theirs, mine, trace.gaps[index])
        if len(ours) != count:
            raise ValueError(f"the engine generated {len(ours)} tokens where {count} were asked for")
        return cls(count, count)
