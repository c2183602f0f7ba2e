"""Requests in, tokens and text out: the loop over scheduler and runner."""

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jaxllm.cache.block_pool import BlockPool
from jaxllm.checkpoint.adopt import check_parameters
from jaxllm.engine.answer import Answer, Update
from jaxllm.engine.delivery import Delivery
from jaxllm.engine.interrupts import deferred_interrupts
from jaxllm.engine.prompts import Prompt
from jaxllm.engine.reported import Reported
from jaxllm.engine.request import Key, Request
from jaxllm.engine.request_maker import RequestMaker
from jaxllm.engine.runner import Runner
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.step import Masks, SchedulerStats, Step
from jaxllm.engine.step_program import StepResults
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_ASLEEP = "the engine is asleep, its KV memory given back: call wake() first"

_ENGINES: weakref.WeakSet["Engine"] = weakref.WeakSet()


@atexit.register
def _finish_steps() -> None:
    """A request can have ended with a step under way that nobody reads, and XLA aborts a process that ends in one."""
    for engine in list(_ENGINES):
        with suppress(RuntimeError):  # of a step that failed, which was told then
            engine.runner.finish()


Running = Literal["finish", "abort"]
"""What becomes of requests that run while the weights change."""


class EngineAsleep(RuntimeError):
    """Work was asked of an engine that has given its KV memory back."""


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was ready.

    Attributes:
        scheduler: steps, tokens, prefix hits, preemptions, and what waits and runs now.
        num_kvcache_blocks: size of the KV cache, over all replicas.
        compilations_after_ready: programs compiled while serving; 0 unless `enforce_eager` is set.
        seconds_compiling_after_ready: how long that took.
    """

    scheduler: SchedulerStats
    num_kvcache_blocks: int
    compilations_after_ready: int
    seconds_compiling_after_ready: float


class Engine:
    """Continuous batching of many requests over one runner.

    Several threads may use it: one at a time adds, steps or aborts. What a step adds to a request goes into the inbox
    that was given with it, or else to whoever calls `step` next.
    """

    def __init__(self, runner: Runner, tokenizer: Any | None, eos_token_ids: frozenset[int], seed: int):
        """Args: the runner; a transformers tokenizer, or None to work on ids alone; ids that end a text; a seed."""
        config, spec = runner.spec.config, runner.spec
        replicas = spec.placement.data_parallel_size
        if runner.num_blocks * replicas != runner.kv.shape[2]:
            # JAX drops writes past the end and clamps reads: the text would be wrong and nothing would say so.
            raise ValueError(
                f"num_kvcache_blocks={runner.num_blocks}, but the KV cache holds {runner.kv.shape[2]} blocks for "
                f"{replicas} replica(s)"
            )
        self.runner = runner
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            *(BlockPool(runner.num_blocks) for _ in range(replicas)),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=spec.max_model_len,
            block_size=config.kvcache_block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            iterations=runner.shapes.iterations,
        )
        self._delivery = Delivery(self.scheduler)
        self._under_way: deque[tuple[Step, StepResults]] = deque()
        self._maker = RequestMaker(spec, tokenizer, eos_token_ids, seed)
        self._lock = threading.RLock()
        self._outbox: deque[Update] = deque()
        self._awake = threading.Event()
        self._awake.set()
        self._sleeper: int | None = None
        """The thread that put the engine to sleep."""
        _ENGINES.add(self)
        self._on_step: Callable[[Step], None] | None = None
        """Called with each step once its results are in, by the thread that took them; None: nothing is."""

    @property
    def stats(self) -> EngineStats:
        """Counters as they are now."""
        programs = self.runner.programs
        return EngineStats(
            self.scheduler.stats,
            self.scheduler.num_blocks,
            programs.compilations_after_ready,
            programs.seconds_after_ready,
        )

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished()

    def prepare(self, request_id: str, prompt: Prompt, params: SamplingParams, key: Hashable | None = None) -> Request:
        """Make a request of a prompt, checked but not queued; `key` as `Request.key`.

        Raises:
            TypeError: if the prompt is neither text nor token ids, or text without a tokenizer.
            ValueError: if the prompt is empty, has ids outside the vocabulary, is too long for `max_model_len` or
                needs more KV blocks than there are, or if the parameters cannot be met.
        """
        request = self._maker.make(request_id, prompt, params, key)
        self.scheduler.check(request)
        return request

    def prepare_each(
        self, request_id: str, prompt: Prompt, params: SamplingParams, owner: object = None
    ) -> list[Request]:
        """`prepare` for each of the `n` outputs; with several their ids are `request_id` and a number.

        An `owner` has a name space of his own: neither these requests nor their ids with a number can be confused with
        another's, whatever he calls his.
        """

        def prepare(place: int, prompt: Prompt, params: SamplingParams, name: str) -> Request:
            return self.prepare(name, prompt, params, None if owner is None else Key(owner, request_id, place))

        if not isinstance(params, SamplingParams) or params.n == 1:
            return [prepare(0, prompt, params, request_id)]
        first, *others = params.each_output()
        requests = [prepare(0, prompt, first, f"{request_id}-0")]
        ids = requests[0].prompt_token_ids
        return requests + [prepare(i, ids, other, f"{request_id}-{i}") for i, other in enumerate(others, 1)]

    def submit(self, request: Request, text: str | None = None, inbox: "deque[Update] | None" = None) -> None:
        """Queue a prepared request; `text` is its prompt where that was text, `inbox` takes its updates.

        Raises:
            ValueError: if its id is that of an unfinished request; nothing is queued then.
        """
        inbox = self._outbox if inbox is None else inbox
        answer = Answer(request, inbox, text, self.tokenizer)
        with self._exclusively():
            request.arrival_time = time.perf_counter()
            self.scheduler.add(request)
            self._delivery.begin(answer)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """`prepare` and `submit` in one; raises what they raise."""
        self.submit(self.prepare(request_id, prompt, params), prompt if isinstance(prompt, str) else None)

    def abort_request(self, key: Hashable) -> RequestOutput | None:
        """End a request and free its blocks; its output so far, or None if there is no such request.

        Args:
            key: the id given to `add_request`, or the `Request.key` of another.
        """
        with self._exclusively():
            request = self.scheduler.abort(key)
            if request is None:
                return None
            return self._delivery.deliver_end(request)

    def update_weights(self, params: Any, running: Running = "finish") -> None:
        """New parameters: `check_parameters`, then finish or abort what is under way, swap, forget all KV.

        Asleep as well, where nothing has to be finished.

        Raises:
            EngineAsleep: if something has, before `wake`.
            ParameterError: if they do not fit; nothing has changed then.
        """
        if running not in ("finish", "abort"):
            raise ValueError(f"running must be 'finish' or 'abort'; got {running!r}")
        with self._exclusively():
            spec = self.runner.spec
            check_parameters(spec.model, params, spec.placement)
            if running == "abort":
                for key in list(self._delivery.answers):
                    self.abort_request(key)
            while self.scheduler.has_unfinished() and self.advance():
                pass
            self._under_way.clear()  # steps for requests that ended meanwhile
            self.runner.update_weights(params)
            self.scheduler.forget_kv()

    def sleep(self) -> None:
        """Give the KV memory back. Requests stay queued, and those that ran are computed again after `wake`."""
        with self._exclusively():
            if not self.runner.asleep:
                self._under_way.clear()
                self.scheduler.forget_steps()
                self.scheduler.forget_kv()
                self.runner.sleep()
                self._sleeper = threading.get_ident()
                self._awake.clear()

    def wake(self, min_kvcache_blocks: int | None = None) -> None:
        """Take the KV memory again; does nothing where the engine is awake. Raises what `Runner.wake` raises.

        With fewer blocks than before, requests that need more than all of them end: as those do that outgrow the pool,
        or in error, if they have no output yet.
        """
        with self._exclusively():
            if not self.runner.asleep:
                return
            before = self.runner.num_blocks
            self.runner.wake(min_kvcache_blocks)
            if self.runner.num_blocks != before:
                for request in self.scheduler.resize(self.runner.num_blocks):
                    self._end_for_lack_of_blocks(request)
            self._awake.set()

    def wait_until_awake(self) -> None:
        """Wait until another thread has called `wake`.

        Raises:
            EngineAsleep: if this thread put the engine to sleep, and would wait for itself.
        """
        if self._sleeper == threading.get_ident() and not self._awake.is_set():
            raise EngineAsleep(_ASLEEP)
        self._awake.wait()

    def follow_steps(self, on_step: Callable[[Step], None] | None) -> None:
        """Call `on_step` with each step that is complete, from whichever thread ran it; None ends that.

        Raises:
            RuntimeError: if somebody else follows the steps already.
        """
        with self._exclusively():
            if on_step is not None and self._on_step is not None:
                raise RuntimeError("the engine's steps are followed already: one log at a time")
            self._on_step = on_step

    def step(self) -> list[Update]:
        """Run one step; what it and earlier ones added to the requests that have no inbox."""
        self.advance()
        with self._lock:
            updates = list(self._outbox)
            self._outbox.clear()
        return updates

    def advance(self) -> bool:
        """Send the next step to the devices and hand out what the one before it added; False if there is nothing to do.

        One step is always under way while the host works on the results of the one before. If a step fails, its
        requests stay queued and are computed again with the next one; abort them to be rid of them.

        Raises:
            EngineAsleep: before `wake`.
        """
        with self._exclusively():
            if self.runner.asleep:
                raise EngineAsleep(_ASLEEP)
            if not self.scheduler.has_unfinished():
                self._under_way.clear()  # steps for requests that ended meanwhile
                return False
            try:
                step = self.scheduler.schedule()
                if step is not None:
                    masks, failed = self._masks(step)
                    if masks is not None:
                        step = replace(step, masks=masks)
                    self._under_way.append((step, self.runner.dispatch(step)))
                    for request, error in failed:
                        self._delivery.end_in_error(request, error)
                        self._delivery.deliver_end(request)
                if len(self._under_way) <= (step is not None):
                    return step is not None
                oldest, results = self._under_way.popleft()
                sampled = self.runner.collect(oldest, results)
                reported = Reported(oldest, results)
            except BaseException:
                self._under_way.clear()
                self.scheduler.forget_steps()
                if self.runner.restore_cache():
                    self.scheduler.forget_kv()
                raise
            self._delivery.take_in(oldest, sampled, reported)
            if self._on_step is not None:
                self._on_step(oldest)
            return True

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """One thread at a time, and whole: an interrupt waits until it is done."""
        with self._lock, deferred_interrupts():
            yield

    def _masks(self, step: Step) -> tuple[Masks | None, list[tuple[Request, str]]]:
        """Which tokens may come next in the rows that follow a grammar; the requests that cannot go on, and why."""
        rows = [row.request for row in step.rows if row.num_samples and row.request.matcher is not None]
        if not rows:
            return None, []
        masks = np.zeros((len(rows), -(-self.runner.spec.run_time.vocab_size // 32)), np.uint32)
        matchers = {i: request.matcher for i, request in enumerate(rows) if request.matcher is not None}
        errors = self._maker.grammars.fill(masks, matchers)
        for i in errors:
            masks[i] = 0xFFFFFFFF  # the step has its row already; nobody reads what comes of it
        failed = [(rows[i], f"the grammar cannot be followed any further: {error}") for i, error in errors.items()]
        return Masks([request.seat or 0 for request in rows], masks), failed

    def _end_for_lack_of_blocks(self, request: Request) -> None:
        needs = (
            f"{request.num_tokens} tokens do not fit into the {self.runner.num_blocks} KV-cache blocks that are left"
        )
        logger.warning("request %r ends at wake: its %s", request.request_id, needs)
        if request.num_output_tokens:
            self.scheduler.finish(request, "length")
        else:
            self._delivery.end_in_error(request, f"the prompt's {needs} since wake")
        self._delivery.deliver_end(request)
