"""Log probabilities of a step, on the host."""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxllm.engine.request import Request
from jaxllm.engine.step import ScheduledRow, Step
from jaxllm.engine.step_program import StepResults
from jaxllm.outputs import Logprobs, token_logprobs
from jaxllm.sampling.logprobs import TokenLogprobs

Text = Callable[[int], str] | None


class Reported:
    """What a step reports beside its tokens. Waits for it.

    Args:
        step: which was computed.
        results: its results; log probabilities that nobody asks for are None.
    """

    def __init__(self, step: Step, results: StepResults):
        self._step = step
        self._sampled: TokenLogprobs | None = jax.tree.map(np.asarray, results.logprobs)
        self._prompt: TokenLogprobs | None = jax.tree.map(np.asarray, results.prompt)
        self._place = {}
        if self._sampled is not None:
            places = step.places(self._sampled.rank.shape[1] // max(1, len(step.shares))).tolist()
            self._place = {row.request.key: place for row, place in zip(step.rows, places, strict=True)}
        self._first = {}
        if self._prompt is not None:  # such a step has one iteration
            tokens = self._prompt.rank.shape[0] // max(1, len(step.shares))
            for replica, rows in enumerate(step.parts):
                end = replica * tokens
                for row in rows:
                    self._first[row] = end
                    end += row.num_tokens

    def prompts(self) -> Iterator[tuple[ScheduledRow, Request]]:
        """Rows with log probabilities of prompt tokens."""
        if self._prompt is not None:
            for row in self._step.rows:
                if row.request.wants_prompt_logprobs(row.start):
                    yield row, row.request

    def of_output(self, request: Request, token_ids: list[int], text: Text) -> list[Logprobs]:
        """Of the tokens that `request` got from this step."""
        row, count = self._place[request.key], request.params.logprobs or 0
        assert self._sampled is not None
        return [_at(self._sampled, (i, row), token, count, text) for i, token in enumerate(token_ids)]

    def of_prompt(self, row: ScheduledRow, text: Text) -> list[Logprobs]:
        """Of the prompt tokens behind each token of `row`, from `Request.num_prompt_logprobs` on."""
        request, first = row.request, self._first[row]
        assert self._prompt is not None
        begin = max(row.start, request.num_prompt_logprobs)
        end = min(row.start + row.num_tokens, request.num_prompt_tokens - 1)
        count = request.params.prompt_logprobs or 0
        return [
            _at(self._prompt, (first + at - row.start,), request.token_ids[at + 1], count, text)
            for at in range(begin, end)
        ]


def _at(reported: TokenLogprobs, where: tuple[int, ...], token: int, count: int, text: Text) -> Logprobs:
    chosen, rank, top, ids = (part[where] for part in reported)
    return token_logprobs(token, float(chosen), int(rank), top[:count].tolist(), ids[:count].tolist(), text)
