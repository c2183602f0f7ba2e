"""What a request gives back, in vLLM's shape."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token.

    Attributes:
        logprob: natural logarithm of the model's probability, before temperature, penalties, masks and filters.
        rank: its place among all tokens; 1 is the most likely.
        decoded_token: its text by itself; None where the engine has no tokenizer or the request asks for none.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]
"""The chosen token first, then the most likely ones in falling order."""


def token_logprobs(
    token: int,
    logprob: float,
    rank: int,
    top: Sequence[float],
    top_ids: Sequence[int],
    text: Callable[[int], str] | None = None,
) -> Logprobs:
    """Log probabilities at one position.

    Args:
        token: the chosen token, or the prompt's.
        logprob: its log probability.
        rank: how many tokens are at least as likely.
        top: of the most likely tokens, in falling order, as many as the request asks for.
        top_ids: which these are.
        text: of a token by its id; None for no text.
    """
    # Of equally likely tokens the first has the lowest rank, so a token that is among the most likely takes its place.
    entries = {token: (logprob, rank)} | {
        index: (value, place) for place, (index, value) in enumerate(zip(top_ids, top, strict=True), 1)
    }
    return {index: Logprob(value, place, text and text(index)) for index, (value, place) in entries.items()}


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text.

    Attributes:
        index: place among the outputs of its request.
        text: the text; stop strings and the tokens that ended it are not part of it.
        token_ids: every generated token, those that ended it included.
        finish_reason: "stop", "length", "abort" or, for a request that was refused, "error"; None while running.
        stop_reason: the stop string or stop token id that ended it; None otherwise.
        logprobs: for each token; None where the request asks for none.
        cumulative_logprob: sum of those of the tokens; None where the request asks for none.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None


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
        request_id: as given; or made up, for those of an LLM's own calls and where `AsyncLLM` got none.
        prompt: its text; None where token ids were given.
        prompt_token_ids: its tokens.
        outputs: the generated texts.
        finished: whether it has ended.
        metrics: times and counts.
        error: why it was refused; None otherwise.
        prompt_logprobs: for each token of the prompt, None for the first; None where the request asks for none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    error: str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = asdict(self)
        if self.metrics is not None:
            data["metrics"]["time_to_first_token"] = self.metrics.time_to_first_token
        return data


def join_outputs(request_id: str, parts: Sequence[RequestOutput]) -> RequestOutput:
    """One output of the requests that generated the outputs of one prompt, in their order.

    Times are from the first arrival and first token to the last end; prefix hits are those of the first request.
    """
    completions = [replace(part.outputs[0], index=index) for index, part in enumerate(parts)]
    metrics = [part.metrics for part in parts if part.metrics is not None]
    started = [one.first_token_time for one in metrics if one.first_token_time is not None]
    finished = [one.finished_time for one in metrics if one.finished_time is not None]
    joined = RequestMetrics(
        min(one.arrival_time for one in metrics),
        min(started, default=None),
        max(finished, default=None),
        metrics[0].num_cached_tokens,
        sum(one.num_preemptions for one in metrics),
    )
    error = next((part.error for part in parts if part.error), None)
    return replace(parts[0], request_id=request_id, outputs=completions, metrics=joined, error=error)


@dataclass(frozen=True)
class StreamDelta:
    """What one step added to one request.

    Attributes:
        index: the prompt's place in the call.
        text: new text that is final: never half a character, never a part of a stop string.
        token_ids: the new tokens. Text can lag behind them.
        output: the whole request, in its last delta only.
        output_index: which of the request's `n` outputs it belongs to.
        logprobs: of the new tokens; None where the request asks for none.
    """

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    output: RequestOutput | None = None
    output_index: int = 0
    logprobs: list[Logprobs] | None = None
