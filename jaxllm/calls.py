"""Calls of `generate`, `stream` and `chat`: the requests of each, through an engine that all of them share."""

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from jaxllm.engine.answer import Update
from jaxllm.engine.engine import Engine, EngineAsleep
from jaxllm.engine.prompts import prompt_token_ids
from jaxllm.engine.request import Request
from jaxllm.outputs import CompletionOutput, RequestOutput, StreamDelta, join_outputs
from jaxllm.sampling_params import SamplingParams

OnError = Literal["raise", "return"]


class Calls:
    """The calls of one LLM, from several threads or between each other's deltas: they share the engine's steps."""

    def __init__(self, engine: Engine):
        """Args: the engine that serves."""
        self._engine = engine
        self._count = 0
        self._lock = threading.Lock()

    def run(self, requests: list[tuple[Any, SamplingParams]], on_error: OnError) -> Iterator[StreamDelta]:
        """Generate, and yield what each step adds to each prompt's text.

        Requests are checked before this returns. Closing the generator ends what is unfinished.

        Args:
            requests: prompts with their parameters; an exception in place of a prompt says why there is none.
            on_error: what a prompt that cannot be served does, as in `LLM.generate`.

        Raises:
            TypeError, ValueError: as said there; nothing is queued then.
        """
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return'; got {on_error!r}")
        with self._lock:
            prefix = f"call{self._count}-"
            self._count += 1
            prepared = [self._prepare(f"{prefix}{i}", prompt, params) for i, (prompt, params) in enumerate(requests)]
        refused = {index: item for index, item in enumerate(prepared) if isinstance(item, Exception)}
        if refused and on_error == "raise":
            kind = TypeError if all(isinstance(error, TypeError) for error in refused.values()) else ValueError
            raise kind("\n".join(f"prompt {index}: {error}" for index, error in refused.items()))
        return self._serve([prompt for prompt, _ in requests], prepared)

    def _prepare(self, request_id: str, prompt: Any, params: SamplingParams) -> list[Request] | Exception:
        """A request for each output, or why there is none."""
        if isinstance(prompt, Exception):
            return prompt
        try:
            return self._engine.prepare_each(request_id, prompt, params, owner=self)
        except (TypeError, ValueError) as error:
            return error

    def _serve(self, prompts: list[Any], prepared: list[list[Request] | Exception]) -> Iterator[StreamDelta]:
        inbox: deque[Update] = deque()
        finished: dict[int, dict[int, RequestOutput]] = {}  # outputs by prompt and place
        with self._aborting() as unfinished:
            for index, (prompt, item) in enumerate(zip(prompts, prepared, strict=True)):
                if isinstance(item, Exception):
                    yield StreamDelta(index, "", output=_refusal(str(index), prompt, item))
                    continue
                for place, request in enumerate(item):
                    unfinished[request.key] = (index, place)
                    self._engine.submit(request, prompt if isinstance(prompt, str) else None, inbox)
            while unfinished:
                # Calls from other threads, or between two deltas of this one, run steps for all.
                try:
                    if not inbox and not self._engine.advance() and not inbox:
                        prompts_left = sorted({index for index, _ in unfinished.values()})
                        raise RuntimeError(f"the engine has nothing to do, but prompts {prompts_left} have not ended")
                except EngineAsleep:
                    self._engine.wait_until_awake()
                while inbox:
                    update = inbox.popleft()
                    index, place = unfinished[update.key]
                    output = None
                    if update.output is not None:
                        del unfinished[update.key]
                        done = finished.setdefault(index, {})
                        done[place] = update.output
                        if len(done) == len(prepared[index]):  # type: ignore[arg-type]
                            output = _joined(finished.pop(index))
                    yield StreamDelta(index, update.text, update.token_ids, output, place, update.logprobs)

    @contextmanager
    def _aborting(self) -> Iterator[dict[Hashable, tuple[int, int]]]:
        """Requests in flight; those still there at the end, after an error or a closed generator, are aborted."""
        unfinished: dict[Hashable, tuple[int, int]] = {}
        try:
            yield unfinished
        finally:
            for key in list(unfinished):
                self._engine.abort_request(key)


def _joined(outputs: dict[int, RequestOutput]) -> RequestOutput:
    """The output of a prompt from those of its requests, by place."""
    if len(outputs) == 1:
        return outputs[0]
    return join_outputs(outputs[0].request_id.rpartition("-")[0], [outputs[place] for place in sorted(outputs)])


def _refusal(request_id: str, prompt: Any, error: Exception) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    try:
        ids = [] if isinstance(prompt, str | Exception) else prompt_token_ids(prompt)
    except TypeError:
        ids = []
    completion = CompletionOutput(0, "", [], finish_reason="error")
    return RequestOutput(request_id, text, ids, [completion], finished=True, error=str(error))
