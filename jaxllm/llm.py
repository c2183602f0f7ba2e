"""`LLM`: a model, ready to generate."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxllm.checkpoint.checkpoint import Checkpoint
from jaxllm.checkpoint.resolve import resolve
from jaxllm.checkpoint.tokenizer import known_tokens
from jaxllm.config import EngineConfig
from jaxllm.engine import compilation_cache
from jaxllm.engine.engine import Engine, EngineStats, Update
from jaxllm.engine.prompts import Params, Prompt, pair_params, prompt_token_ids, split_prompts
from jaxllm.engine.request import Request
from jaxllm.engine.runner import Runner, RunnerSpec
from jaxllm.memory.pool import start_backend
from jaxllm.memory.report import MemoryReport
from jaxllm.outputs import CompletionOutput, RequestOutput, StreamDelta
from jaxllm.parallel.mesh import make_mesh
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.prompt import apply_chat

logger = logging.getLogger(__name__)

OnError = Literal["raise", "return"]


class LLM:
    """A checkpoint loaded onto devices, with its tokenizer, KV cache and compiled programs.

    Calls from several threads, and streams that are read in turns, share the engine: their requests run together.

    Args:
        model: a folder as Hugging Face writes it, a `.gguf` file, a hub id, or `smollm2` for the demo model; or a
            `Checkpoint`, whose tensors are read from wherever it says.
        **options: as `EngineConfig`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an option out of range, a checkpoint that does not fit, or sizes that do not divide.
    """

    def __init__(self, model: str | Path | Checkpoint, **options: Any):
        unknown = sorted(set(options) - set(EngineConfig.names()))
        if unknown:
            raise TypeError(f"unknown option(s) {', '.join(unknown)}; known: {', '.join(EngineConfig.names())}")
        self.config = EngineConfig(**options)
        checkpoint = model if isinstance(model, Checkpoint) else resolve(str(model))
        self.model_config = checkpoint.config
        compilation_cache.enable()
        start_backend(self.config.gpu_memory_utilization)
        mesh = make_mesh(self.config.tensor_parallel_size)
        self.tokenizer = None if self.config.skip_tokenizer_init else checkpoint.tokenizer()
        vocabulary = self.model_config.vocab_size
        known = np.ones(vocabulary, bool) if self.tokenizer is None else known_tokens(self.tokenizer, vocabulary)
        never = [token for token in self.model_config.eos_token_ids if not known[token]]
        if never:
            logger.warning("end-of-sequence ids %s are unknown to the tokenizer and will never be generated", never)
        platform = jax.devices()[0].platform
        spec = RunnerSpec(
            config=self.config,
            model=self.model_config,
            mesh=mesh,
            dtype=jnp.dtype(self.config.dtype_name(self.model_config, platform)),
            max_model_len=self.config.model_len(self.model_config),
            known_tokens=known,
        )
        self.engine = Engine(
            Runner(spec, checkpoint), self.tokenizer, frozenset(self.model_config.eos_token_ids), self.config.seed
        )
        self._calls = 0
        self._lock = threading.Lock()

    @property
    def stats(self) -> EngineStats:
        """Counters: steps, prefix hits, preemptions, compilations after ready."""
        return self.engine.stats

    @property
    def memory_report(self) -> MemoryReport:
        """How the KV cache got its size: budget, measurements, what limits it. `text()`, `to_dict()`, `save(path)`."""
        return self.engine.runner.memory_report

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate for all prompts; results in the order given.

        Args:
            prompts: text, token ids, or a list of either.
            sampling_params: for all prompts, or a list with one for each.
            use_tqdm: show a progress bar.
            on_error: what a prompt that cannot be served does. "raise": nothing runs, and the error names every such
                prompt. "return": its output has `finish_reason` "error" and the reason in `error`; the others run.

        Raises:
            TypeError, ValueError: as said under `on_error`; nothing stays queued, and the engine is as before.
        """
        return self._collect(pair_params(split_prompts(prompts), sampling_params), use_tqdm, on_error)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, on_error: OnError = "raise"
    ) -> Iterator[StreamDelta]:
        """Generate, and yield what each step adds to each prompt's text; arguments and errors as `generate`.

        Requests are checked before this returns. Closing the generator ends what is unfinished.
        """
        requests = pair_params(split_prompts(prompts), sampling_params)
        return self._run(requests, on_error)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each in a list, through the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`, or a list of such lists.
            sampling_params: as `generate`.
            use_tqdm: as `generate`.
            on_error: as `generate`.
            chat_template_kwargs: passed to the template, such as `{"enable_thinking": False}`.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise TypeError("messages must be a list of {'role': ..., 'content': ...}, or a list of such lists")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts: list[Any] = []
        for conversation in conversations:
            try:
                prompts.append(self.chat_prompt(conversation, **(chat_template_kwargs or {})))
            except (
                TypeError,
                ValueError,
            ) as error:  # refused with its index, like any other
                prompts.append(error)
        return self._collect(pair_params(prompts, sampling_params), use_tqdm, on_error)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_args: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's answer."""
        if self.tokenizer is None:
            raise TypeError("a chat needs a tokenizer; leave skip_tokenizer_init off")
        return apply_chat(self.tokenizer, messages, **template_args)

    def _collect(
        self, requests: list[tuple[Any, SamplingParams]], use_tqdm: bool, on_error: OnError
    ) -> list[RequestOutput]:
        results: list[RequestOutput | None] = [None] * len(requests)
        bar = tqdm(total=len(requests), desc="requests", disable=not use_tqdm, dynamic_ncols=True)
        tokens = 0
        with bar:
            for delta in self._run(requests, on_error):
                tokens += len(delta.token_ids)
                if delta.output is not None:
                    results[delta.index] = delta.output
                    elapsed = bar.format_dict["elapsed"]
                    if elapsed:
                        bar.set_postfix_str(f"{tokens / elapsed:.0f} tokens/s", refresh=False)
                    bar.update()
        return [result for result in results if result is not None]

    def _run(self, requests: list[tuple[Any, SamplingParams]], on_error: OnError) -> Iterator[StreamDelta]:
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return'; got {on_error!r}")
        with self._lock:
            prefix = f"call{self._calls}-"
            self._calls += 1
            prepared = [self._prepare(f"{prefix}{i}", prompt, params) for i, (prompt, params) in enumerate(requests)]
        refused = {index: item for index, item in enumerate(prepared) if isinstance(item, Exception)}
        if refused and on_error == "raise":
            kind = TypeError if all(isinstance(error, TypeError) for error in refused.values()) else ValueError
            raise kind("\n".join(f"prompt {index}: {error}" for index, error in refused.items()))
        return self._serve([prompt for prompt, _ in requests], prepared)

    def _prepare(self, request_id: str, prompt: Any, params: SamplingParams) -> Request | Exception:
        """A request, or why there is none."""
        if isinstance(prompt, Exception):
            return prompt
        try:
            return self.engine.prepare(request_id, prompt, params)
        except (TypeError, ValueError) as error:
            return error

    def _serve(self, prompts: list[Any], prepared: list[Request | Exception]) -> Iterator[StreamDelta]:
        inbox: deque[Update] = deque()
        with self._aborting() as unfinished:
            for index, (prompt, item) in enumerate(zip(prompts, prepared, strict=True)):
                if isinstance(item, Exception):
                    yield StreamDelta(index, "", output=_refusal(str(index), prompt, item))
                else:
                    unfinished[item.request_id] = index
                    self.engine.submit(item, prompt if isinstance(prompt, str) else None, inbox)
            while unfinished:
                # Calls from other threads, or between two deltas of this one, run steps for all.
                if not inbox and not self.engine.advance() and not inbox:
                    raise RuntimeError(f"the engine has nothing to do, but {sorted(unfinished)} have not ended")
                while inbox:
                    update = inbox.popleft()
                    index = unfinished[update.request_id]
                    if update.output is not None:
                        del unfinished[update.request_id]
                    yield StreamDelta(index, update.text, update.token_ids, update.output)

    @contextmanager
    def _aborting(self) -> Iterator[dict[str, int]]:
        """Requests in flight; those still there at the end, after an error or a closed generator, are aborted."""
        unfinished: dict[str, int] = {}
        try:
            yield unfinished
        finally:
            for request_id in list(unfinished):
                self.engine.abort_request(request_id)


def _refusal(request_id: str, prompt: Any, error: Exception) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    try:
        ids = [] if isinstance(prompt, str | Exception) else prompt_token_ids(prompt)
    except TypeError:
        ids = []
    completion = CompletionOutput(0, "", [], finish_reason="error")
    return RequestOutput(request_id, text, ids, [completion], finished=True, error=str(error))
