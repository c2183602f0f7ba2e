"""What a request gives back, in vLLM's shape."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text.

    Attributes:
        index: place among the outputs of its request.
        text: the text; stop strings and the tokens that ended it are not part of it.
        token_ids: every generated token, those that ended it included.
        finish_reason: "stop", "length", "abort" or, for a request that was refused, "error"; None while running.
        stop_reason: the stop string or stop token id that ended it; None otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request, in seconds on one monotonic clock, and what the cache did for it.

    Attributes:
        arrival_time: when it was added.
        first_token_time: when its first token was on the host; None before.
        finished_time: when it ended; None before.
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
        num_preemptions: how often it lost its KV and was recomputed.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """A request and what was generated for it.

    Attributes:
        request_id: unique among unfinished requests.
        prompt: its text; None where token ids were given.
        prompt_token_ids: its tokens.
        outputs: the generated texts.
        finished: whether it has ended.
        metrics: times and counts.
        error: why it was refused; None otherwise.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = asdict(self)
        if self.metrics is not None:
            data["metrics"]["time_to_first_token"] = self.metrics.time_to_first_token
        return data


@dataclass(frozen=True)
class StreamDelta:
    """What one step added to one request.

    Attributes:
        index: the prompt's place in the call.
        text: new text that is final: never half a character, never a part of a stop string.
        token_ids: the new tokens. Text can lag behind them.
        output: the whole request, in its last delta only.
    """

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    output: RequestOutput | None = None
