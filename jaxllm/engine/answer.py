"""What becomes of a request's tokens on the host: text, stop strings, log probabilities, the output."""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxllm.engine.reported import Reported
from jaxllm.engine.request import Request
from jaxllm.engine.step import ScheduledRow
from jaxllm.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput
from jaxllm.text.detokenizer import Detokenizer, token_text
from jaxllm.text.stop import StopStrings

Cut = Callable[[Request, int, str], None]
"""`Scheduler.cut`."""


_NOTHING_TO_CHOOSE = (
    "no token can be chosen: the request's fields exclude all that the tokenizer knows (allowed_token_ids, "
    "structured_outputs, bad_words, min_tokens, logits_processors), or the model's logits are not finite numbers"
)


@dataclass(frozen=True)
class Update:
    """What one step added to one request; `key` tells it from all others in the engine."""

    key: Hashable
    request_id: str
    text: str
    token_ids: list[int]
    output: RequestOutput | None
    logprobs: list[Logprobs] | None = None


@dataclass(eq=False)
class Answer:
    """The text side of one request, and where its updates go.

    Attributes:
        request: whose it is.
        inbox: takes its updates.
        prompt: its text; None where token ids were given.
        tokenizer: None for ids alone.
    """

    request: Request
    inbox: "deque[Update]"
    prompt: str | None
    tokenizer: Any | None
    first_token_time: float | None = None
    finished_time: float | None = None
    error: str | None = None
    """Why it ended with `finish_reason` "error"."""
    _pieces: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        params = self.request.params
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        has_text = self.tokenizer is not None and params.detokenize
        self._detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens) if has_text else None
        self._token_text = partial(token_text, self.tokenizer) if has_text else None
        self._logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[Logprobs | None] | None = None if params.prompt_logprobs is None else [None]

    def what_is_wrong(self, before: int) -> str | None:
        """Follow the tokens behind the first `before` in the request's grammar, if it has one; why it cannot go on."""
        request = self.request
        if request.matcher is not None:
            token_ids = request.token_ids[before:]
            try:
                accepted = request.matcher.accept(token_ids)
            except RuntimeError as error:
                return str(error)
            if accepted < len(token_ids):
                return f"token {token_ids[accepted]} is not allowed by structured_outputs"
        return _NOTHING_TO_CHOOSE if request.finish_reason == "error" else None

    def add(self, before: int, cut: Cut) -> str:
        """Text that the tokens behind the first `before` make final; `cut` ends the request at a stop string."""
        text = self._text(before, cut)
        if text:
            self._pieces.append(text)
        return text

    def _text(self, before: int, cut: Cut) -> str:
        """With stop strings, token by token: those behind the one that completes a string do not count."""
        request, detokenizer = self.request, self._detokenizer
        if detokenizer is None:
            return ""
        params, tokens = request.params, request.token_ids[before:]
        groups = [[token] for token in tokens] if params.stop and tokens else [tokens]
        text, end = "", before
        for group in groups:
            end += len(group)
            last = end == len(request.token_ids) and request.is_finished
            # The token that ends a text is no part of it.
            hidden = last and request.finish_reason == "stop" and not params.include_stop_str_in_output
            raw = detokenizer.add(group[:-1] if hidden else group)
            if last:
                raw += detokenizer.finish()
            if end - request.num_prompt_tokens < params.min_tokens:
                text += self._stops.pass_by(raw)
                continue
            piece, matched = self._stops.feed(raw)
            text += piece
            if matched is not None:
                cut(request, end, matched)
                return text
        return text + self._stops.flush() if request.is_finished else text

    def add_logprobs(self, reported: Reported, token_ids: list[int]) -> list[Logprobs] | None:
        """Log probabilities of new tokens; None where the request asks for none."""
        if self._logprobs is None:
            return None
        new = reported.of_output(self.request, token_ids, self._token_text)
        self._logprobs += new
        return new

    def add_prompt_logprobs(self, reported: Reported, row: ScheduledRow) -> None:
        """Take in those of the prompt tokens behind the tokens of `row`."""
        assert self._prompt_logprobs is not None
        new = reported.of_prompt(row, self._token_text)
        self._prompt_logprobs += new
        self.request.num_prompt_logprobs += len(new)

    def break_off(self) -> str:
        """What was held back of the text, once nothing follows."""
        text = "" if self._detokenizer is None else self._stops.feed(self._detokenizer.finish())[0]
        text += self._stops.flush()
        self._pieces.append(text)
        return text

    def output(self) -> RequestOutput:
        """The whole request."""
        request = self.request
        metrics = RequestMetrics(
            request.arrival_time,
            self.first_token_time,
            self.finished_time,
            request.num_cached_tokens or 0,
            request.num_preemptions,
        )
        text, tokens = "".join(self._pieces), request.output_token_ids
        logprobs, total = self._logprobs, None
        if logprobs is not None:
            total = sum(one[token].logprob for one, token in zip(logprobs, tokens, strict=True))
        completion = CompletionOutput(0, text, tokens, request.finish_reason, request.stop_reason, logprobs, total)
        ids = list(request.prompt_token_ids)
        return RequestOutput(
            request.request_id, self.prompt, ids, [completion], True, metrics, self.error, self._prompt_logprobs
        )
