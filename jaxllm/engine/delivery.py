"""What steps computed, taken in request by request and handed out as updates."""

import logging
import time
from collections.abc import Hashable, Sequence

from jaxllm.engine.answer import Answer, Update
from jaxllm.engine.reported import Reported
from jaxllm.engine.request import Request
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.step import Step
from jaxllm.outputs import RequestOutput

logger = logging.getLogger(__name__)


class Delivery:
    """Brings the results of steps to the requests' answers, and what these make of them to the inboxes.

    A request whose tokens cannot be taken in ends in an error; the others are not affected.

    Attributes:
        answers: of unfinished requests, by key.
    """

    def __init__(self, scheduler: Scheduler):
        """Args: the scheduler that holds the requests."""
        self._scheduler = scheduler
        self.answers: dict[Hashable, Answer] = {}

    def begin(self, answer: Answer) -> None:
        """Deliver to `answer` from now on, until its request has ended."""
        self.answers[answer.request.key] = answer

    def take_in(self, step: Step, sampled: Sequence[Sequence[int]], reported: Reported) -> None:
        """Complete a step, and hand out what it adds.

        Args:
            step: the oldest under way.
            sampled: the tokens of each of its rows.
            reported: its log probabilities.
        """
        now = time.perf_counter()
        for row, request in reported.prompts():
            if self._scheduler.is_live(row):
                try:
                    self.answers[request.key].add_prompt_logprobs(reported, row)
                except Exception as error:
                    self._fail(request, request.num_tokens, error)
        for request, count in self._scheduler.complete(step, sampled):
            before = request.num_tokens - count
            try:
                self._update(request, before, now, reported)
            except Exception as error:
                self._fail(request, before, error)

    def end_in_error(self, request: Request, error: str) -> None:
        """End a request for the reason given, also where its tokens have ended it already; nothing is handed out."""
        self.answers[request.key].error = error
        if request.is_finished:
            request.finish_reason = "error"
        else:
            self._scheduler.finish(request, "error")

    def deliver_end(self, request: Request) -> RequestOutput:
        """Hand out the end of a request that no token brings."""
        answer, text = self.answers.pop(request.key), ""
        try:
            text = answer.break_off()
        except Exception:  # the tokenizer's: it ends all the same, without the text that was held back
            logger.exception("request %r: the end of its text is missing", request.request_id)
        answer.finished_time = time.perf_counter()
        output = answer.output()
        answer.inbox.append(Update(request.key, request.request_id, text, [], output))
        return output

    def _update(self, request: Request, before: int, now: float, reported: Reported) -> None:
        """Take in the tokens of a request behind the first `before`, and hand out what they add."""
        answer = self.answers[request.key]
        if answer.first_token_time is None:
            answer.first_token_time = now
        error = answer.what_is_wrong(before)
        if error is not None:
            self.end_in_error(request, error)
        text = answer.add(before, self._scheduler.cut)
        token_ids = request.token_ids[before:]
        logprobs = answer.add_logprobs(reported, token_ids)
        output = None
        if request.is_finished:
            answer.finished_time = now
            output = answer.output()
            del self.answers[request.key]
        answer.inbox.append(Update(request.key, request.request_id, text, token_ids, output, logprobs))

    def _fail(self, request: Request, num_tokens: int, error: Exception) -> None:
        """End a request whose tokens cannot be taken in, a tokenizer failing or the like; others are not affected."""
        logger.error("request %r ends in an error", request.request_id, exc_info=error)
        del request.token_ids[num_tokens:]
        self.end_in_error(request, f"its tokens could not be taken in: {error} ({type(error).__name__})")
        self.deliver_end(request)
