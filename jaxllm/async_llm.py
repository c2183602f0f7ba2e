"""`AsyncLLM`: an engine for servers, over asyncio. One background thread steps it."""

import asyncio
import itertools
import re
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import jax

from jaxllm.checks import integer
from jaxllm.engine.answer import Update
from jaxllm.engine.engine import Engine, EngineAsleep
from jaxllm.engine.prompts import Prompt
from jaxllm.engine.request import Request
from jaxllm.llm import LLM
from jaxllm.outputs import RequestOutput, StreamDelta, join_outputs
from jaxllm.sampling_params import SamplingParams

_ASLEEP_SECONDS = 0.05
"""Between two looks at an engine that is asleep."""


class QueueFull(RuntimeError):
    """There are as many unfinished requests as are allowed: try again when one has ended."""


class AsyncRequest:
    """One request under way: an asynchronous iterator over what each step adds to it.

    It holds what was not read yet, at most the request's whole output. Iterate once.

    Attributes:
        request_id: for `AsyncLLM.abort`.
    """

    def __init__(self, request_id: str, parts: int, on_end: Callable[[str], Any]):
        self.request_id = request_id
        self.ended = asyncio.Event()
        self._loop, self._on_end = asyncio.get_running_loop(), on_end
        self._deltas: asyncio.Queue[StreamDelta | Exception] = asyncio.Queue()
        self._outputs: list[RequestOutput | None] = [None] * parts

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self._iterate()

    async def output(self) -> RequestOutput:
        """The whole output, once it is there; instead of iterating."""
        async for delta in self:
            if delta.output is not None:
                return delta.output
        raise RuntimeError(f"request {self.request_id!r} was read before: iterate over it, or await its output")

    async def _iterate(self) -> AsyncIterator[StreamDelta]:
        while not (self.ended.is_set() and self._deltas.empty()):
            delta = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            yield delta

    def _put(self, place: int, update: Update) -> None:
        """Called by the engine's thread."""
        output = None
        if update.output is not None:
            self._outputs[place] = update.output
            done = [one for one in self._outputs if one is not None]
            if len(done) == len(self._outputs):
                output = done[0] if len(done) == 1 else join_outputs(self.request_id, done)
        self._deliver(StreamDelta(0, update.text, update.token_ids, output, place, update.logprobs), output is not None)

    def _fail(self, error: Exception) -> None:
        """Called by the engine's thread."""
        self._deliver(error, True)

    def _deliver(self, delta: StreamDelta | Exception, last: bool) -> None:
        def put() -> None:
            self._deltas.put_nowait(delta)
            if last:
                self.ended.set()
                self._on_end(self.request_id)

        with suppress(RuntimeError):  # where the loop is closed, nobody is left to read it
            self._loop.call_soon_threadsafe(put)


class AsyncLLM:
    """Requests of one event loop, served by one engine.

    Streams are for `async for`; prompts are read and grammars compiled in threads beside the loop. Use it as `async
    with AsyncLLM(llm) as served:`, or call `close` at the end. While the LLM sleeps, requests are taken and aborted;
    they continue when it wakes.

    Args:
        llm: whose engine serves; calls of its own methods run together with these requests.
        max_pending: requests that may be unfinished, waiting or running.

    Raises:
        TypeError: if `max_pending` is no integer.
        ValueError: if it is not positive, or several processes run the engine: all of them would have to
            make the same calls in the same order.
    """

    def __init__(self, llm: LLM, *, max_pending: int = 4096):
        if integer("max_pending", max_pending) < 1:
            raise ValueError(f"max_pending must be at least 1; got {max_pending!r}")
        if jax.process_count() > 1:
            raise ValueError(f"AsyncLLM runs in one process, not in {jax.process_count()}: use LLM, on every process")
        self.llm = llm
        self.max_pending = max_pending
        self._requests: dict[str, AsyncRequest] = {}
        self._numbers = itertools.count()
        self._preparing = 0
        self._refusal: str | None = None
        self._worker = _Worker(llm.engine)
        # Also where nobody calls `close`: a thread inside JAX must not outlive the interpreter.
        self._finalizer = weakref.finalize(self, self._worker.stop)

    async def add(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> AsyncRequest:
        """Queue a request.

        Args:
            prompt: text or token ids.
            params: how to generate.
            request_id: a name of yours, unique among the unfinished requests of this AsyncLLM; not "async" and a
                number, as those are called that bring no name.

        Raises:
            TypeError, ValueError: if it cannot be served; others are not affected.
            QueueFull: if `max_pending` requests are unfinished.
            RuntimeError: after `drain` or `close`.
        """
        request_id = f"async{next(self._numbers)}" if request_id is None else _own_name(request_id)
        self._check_open(request_id)
        self._preparing += 1
        try:
            parts = await asyncio.to_thread(self.llm.engine.prepare_each, request_id, prompt, params, self._worker)
        finally:
            self._preparing -= 1
        self._check_open(request_id, 0)
        request = AsyncRequest(request_id, len(parts), self._requests.pop)
        self._requests[request_id] = request
        self._worker.submit(request, parts, prompt if isinstance(prompt, str) else None)
        return request

    async def stream(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[StreamDelta]:
        """`add`, and what each step adds to the text. A request whose reader goes away is aborted."""
        request = await self.add(prompt, params, request_id)
        try:
            async for delta in request:
                yield delta
        finally:
            if not request.ended.is_set():
                self.abort(request.request_id)

    def abort(self, request_id: str) -> bool:
        """End a request: its last delta comes soon, with `finish_reason` "abort". False if there is none such."""
        if request_id not in self._requests:
            return False
        self._worker.abort(self._requests[request_id])
        return True

    async def drain(self) -> None:
        """Take no more requests, and wait until those under way have ended; of an LLM that sleeps, until it wakes."""
        self._refusal = "it is being drained"
        while self._preparing or self._requests:
            await asyncio.gather(*(request.ended.wait() for request in self._requests.values()))
            await asyncio.sleep(0.001 if self._preparing else 0)

    async def close(self) -> None:
        """Take no more requests, abort those under way, and end the thread. May be called twice."""
        self._refusal = "it is closed"
        await asyncio.to_thread(self._finalizer)
        await self.drain()
        self._refusal = "it is closed"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_open(self, request_id: str, preparing: int | None = None) -> None:
        if self._refusal is not None:
            raise RuntimeError(f"request {request_id!r}: this AsyncLLM takes no more requests: {self._refusal}")
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is still being processed; use another id, or abort the first one")
        pending = len(self._requests) + (self._preparing if preparing is None else preparing)
        if pending >= self.max_pending:
            raise QueueFull(
                f"request {request_id!r}: {pending} requests are unfinished, max_pending={self.max_pending}: try again "
                f"later, or raise max_pending"
            )


def _own_name(request_id: str) -> str:
    """A name that a user has given."""
    if not isinstance(request_id, str):
        raise TypeError(f"request_id must be text, or None for a name that is made up; got {request_id!r:.80}")
    if re.fullmatch("async[0-9]+", request_id):
        raise ValueError(
            f"request_id must not be 'async' and a number, as requests without a name are called; got {request_id!r}: "
            "use another name, or None"
        )
    return request_id


@dataclass(eq=False)
class _Worker:
    """The thread that steps the engine, and what it is told."""

    engine: Engine
    _commands: deque[Callable[[], None]] = field(default_factory=deque)
    _parts: dict[Hashable, tuple[AsyncRequest, int]] = field(default_factory=dict)
    _inbox: deque[Update] = field(default_factory=deque)
    _stopping: bool = False

    def __post_init__(self) -> None:
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="jaxllm engine", daemon=True)
        self._thread.start()

    def submit(self, request: AsyncRequest, parts: list[Request], text: str | None) -> None:
        """Have the requests of all outputs queued."""
        self._tell(lambda: self._submit(request, parts, text))

    def abort(self, request: AsyncRequest) -> None:
        """Have a request ended."""
        self._tell(lambda: self._abort(request))

    def stop(self) -> None:
        """Abort what is under way and end the thread; waits for it."""
        self._stopping = True
        self._awake.set()
        if threading.current_thread() is not self._thread:  # which collects garbage too
            self._thread.join()

    def _tell(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._awake.set()

    def _serve(self) -> None:
        while not self._stopping:
            if not self._parts:
                self._awake.wait()
            self._awake.clear()
            self._obey()
            if self._parts:
                self._step()
            self._hand_out()
        self._obey()
        for request in {request for request, _ in self._parts.values()}:
            self._abort(request)
        self._hand_out()

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _step(self) -> None:
        try:
            # Other threads step the engine as well: then there is something in the inbox.
            if not self.engine.advance() and not self._inbox:
                left = sorted({request.request_id for request, _ in self._parts.values()})
                raise RuntimeError(f"the engine has nothing to do, but {left} have not ended")
        except EngineAsleep:
            self._awake.wait(_ASLEEP_SECONDS)
        except Exception as error:  # of the device, not of a request: all that were in the step end, new ones are taken
            for request in {request for request, _ in self._parts.values()}:
                self._end(request, error)

    def _hand_out(self) -> None:
        while self._inbox:
            update = self._inbox.popleft()
            if update.key not in self._parts:
                continue  # ended in an error before
            request, place = self._parts[update.key]
            if update.output is not None:
                del self._parts[update.key]
            request._put(place, update)

    def _submit(self, request: AsyncRequest, parts: list[Request], text: str | None) -> None:
        try:
            for place, part in enumerate(parts):
                self.engine.submit(part, text, self._inbox)
                self._parts[part.key] = (request, place)
        except ValueError as error:  # the KV cache has become smaller since it was prepared
            self._end(request, error)

    def _abort(self, request: AsyncRequest) -> None:
        for key, (owner, _) in list(self._parts.items()):
            if owner is request:
                self.engine.abort_request(key)

    def _end(self, request: AsyncRequest, error: Exception) -> None:
        self._abort(request)
        for key, (owner, _) in list(self._parts.items()):
            if owner is request:
                del self._parts[key]
        request._fail(error)


__all__: list[Any] = ["AsyncLLM", "AsyncRequest", "QueueFull"]
