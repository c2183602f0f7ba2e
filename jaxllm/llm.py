"""`LLM`: a model, ready to generate."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.assemble import assemble, place, read_options
from jaxllm.calls import Calls, OnError
from jaxllm.checkpoint.adopt import adopt_parameters
from jaxllm.checkpoint.checkpoint import Checkpoint
from jaxllm.checkpoint.resolve import resolve
from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine, EngineStats, Running
from jaxllm.engine.prompts import Params, Prompt, pair_params, split_prompts
from jaxllm.engine.step_log import StepLog
from jaxllm.memory.report import MemoryReport
from jaxllm.models.config import ModelConfig
from jaxllm.outputs import RequestOutput, StreamDelta
from jaxllm.parallel import distributed
from jaxllm.parallel.mesh import TENSOR
from jaxllm.parallel.placement import AxisNames
from jaxllm.progress import Progress
from jaxllm.sampling.variant import LogitsProcessor
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.prompt import apply_chat


class LLM:
    """A checkpoint loaded onto devices, with its tokenizer, KV cache and compiled programs.

    Calls from several threads, and streams that are read in turns, share the engine: their requests run together.

    With several processes (`jaxllm.parallel.distributed.start`), every process makes the LLM and makes the same calls;
    the prompts of process 0 count, and all processes get all results.

    Args:
        model: a folder as Hugging Face writes it or `python -m jaxllm.convert` does, a `.gguf` file, a hub id, or
            `smollm2` for the demo model; or a `Checkpoint`, whose tensors are read from wherever it says.
        mesh: a mesh of yours to run on; default: one of the first `data_parallel_size` x `tensor_parallel_size`
            devices.
        tensor_axis: axis of `mesh`, or several, that layers are divided among; None for none.
        data_axis: axis of `mesh`, or several, that requests are divided among: the devices along it are replicas of the
            model. None for none. Devices along axes that play neither part hold the same and do the same.
        logits_processors: rules of yours by name, which requests then ask for: `(logits, inputs) -> logits`, written in
            jnp, on float32 `[rows, vocab]` and `jaxllm.sampling.inputs.SamplingInputs`, each row by itself. At most 32.
        **options: as `EngineConfig`.

    Raises:
        TypeError: for an unknown option.
        ValueError: for an option out of range, a checkpoint that does not fit, or sizes that do not divide.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        mesh: Mesh | None = None,
        tensor_axis: AxisNames = TENSOR,
        data_axis: AxisNames = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        **options: Any,
    ):
        config = read_options(options)
        checkpoint = model if isinstance(model, Checkpoint) else resolve(str(model))
        config, placement = place(config, mesh, tensor_axis, data_axis)
        tokenizer = None if config.skip_tokenizer_init else checkpoint.tokenizer()
        platform = placement.mesh.devices.flat[0].platform
        dtype = jnp.dtype(config.dtype_name(checkpoint.config, platform))
        engine = assemble(config, checkpoint.config, checkpoint, tokenizer, placement, dtype, logits_processors)
        self._hold(config, checkpoint.config, tokenizer, engine)

    @classmethod
    def from_params(
        cls,
        config: ModelConfig,
        params: Any,
        tokenizer: Any | None = None,
        *,
        mesh: Mesh | None = None,
        tensor_axis: AxisNames = TENSOR,
        data_axis: AxisNames = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        **options: Any,
    ) -> "LLM":
        """An LLM on parameters that live in this program already, such as those being trained.

        Arrays that lie as the engine needs them are used in place; the log names those that were copied, and why. A
        training step that takes its parameters by donation deletes them: call `update_weights` with its results before
        you generate again.

        Args:
            config: the model's shapes (`ModelConfig.from_hf` reads a config.json).
            params: an `nnx.Module` such as `Decoder`, an `nnx.State`, or a dict of arrays, nested or flat, by module
                path or Hugging Face name.
            tokenizer: a transformers tokenizer; None to work on token ids alone, those that only pad the vocabulary
                included.
            mesh: as `LLM`.
            tensor_axis: as `LLM`.
            data_axis: as `LLM`.
            logits_processors: as `LLM`.
            **options: as `EngineConfig`; `dtype` "auto" is that of the parameters.

        Raises:
            ParameterError: a ValueError that lists all parameters that do not fit.
            TypeError, ValueError: as `LLM`.
        """
        made = cls.__new__(cls)
        engine_config, placement = place(read_options(options), mesh, tensor_axis, data_axis)
        dtype = None if engine_config.dtype == "auto" else engine_config.dtype
        weights = adopt_parameters(config, params, placement, dtype)
        dtype = weights.leaves[0].dtype
        engine = assemble(engine_config, config, weights, tokenizer, placement, dtype, logits_processors)
        made._hold(engine_config, config, tokenizer, engine)
        return made

    def _hold(self, config: EngineConfig, model: ModelConfig, tokenizer: Any | None, engine: Engine) -> None:
        self.config, self.model_config, self.tokenizer, self.engine = config, model, tokenizer, engine
        self._calls = Calls(engine)

    def update_weights(self, params: Any, running: Running = "finish") -> None:
        """Generate with `params` from now on; nothing is compiled, and the prefix cache is emptied.

        Arrays that lie as the engine needs them are used in place, others copied, as `from_params` does. An engine that
        sleeps takes them too, if no request has to be finished.

        Args:
            params: new parameters of the same model, in any form that `from_params` takes.
            running: whether requests under way, of other threads or open streams, are finished with the old parameters
                or aborted.

        Raises:
            ParameterError: a ValueError that lists all parameters that do not fit; nothing has changed then.
            RuntimeError: if the engine sleeps and requests are to be finished: wake it, or abort them.
        """
        self.engine.update_weights(params, running)

    def sleep(self) -> None:
        """Give the KV cache's memory back to the program, until `wake`; weights and compiled programs stay.

        Open streams continue after `wake`, as if nothing had happened: what they had computed is computed again. Calls
        of other threads wait until then; in the thread that called `sleep`, generating raises a RuntimeError.
        """
        self.engine.sleep()

    def wake(self, min_kvcache_blocks: int | None = None) -> None:
        """Take the KV cache's memory again, as much as before; the devices are looked at first.

        With several processes, all call it, and have the blocks that fit on every one.

        Args:
            min_kvcache_blocks: take as many blocks as fit now, if there are at least so many, and at most those that
                the engine was made with. For another number than before, all programs are compiled again. A request
                that needs more than all of them ends, with `finish_reason` "length", or "error" without output.

        Raises:
            RuntimeError: if too little fits; says how much is missing, and has the blocks that fit as
                `fitting_blocks`. The engine sleeps on.
            TypeError, ValueError: if `min_kvcache_blocks` is no positive integer.
        """
        self.engine.wake(min_kvcache_blocks)

    @property
    def stats(self) -> EngineStats:
        """Counters: steps, prefix hits, preemptions, compilations after ready."""
        return self.engine.stats

    @contextmanager
    def log_steps(self, path: str | Path) -> Iterator[None]:
        """Write a line of JSON for each step that ends within the block; `jaxllm.engine.step_log` lists the fields.

        Raises:
            OSError: if the file cannot be written.
            RuntimeError: if somebody else follows the engine's steps already.
        """
        with open(path, "w", encoding="utf-8", buffering=1) as file:
            self.engine.follow_steps(StepLog(self.engine.scheduler, file))
            try:
                yield
            finally:
                self.engine.follow_steps(None)

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
        requests = distributed.broadcast(pair_params(split_prompts(prompts), sampling_params))
        return self._collect(requests, use_tqdm, on_error)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, on_error: OnError = "raise"
    ) -> Iterator[StreamDelta]:
        """Generate, and yield what each step adds to each prompt's text; arguments and errors as `generate`.

        Requests are checked before this returns. Closing the generator ends what is unfinished.
        """
        requests = distributed.broadcast(pair_params(split_prompts(prompts), sampling_params))
        return self._calls.run(requests, on_error)

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
        return self._collect(distributed.broadcast(pair_params(prompts, sampling_params)), use_tqdm, on_error)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_args: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's answer."""
        if self.tokenizer is None:
            raise TypeError("a chat needs a tokenizer; leave skip_tokenizer_init off")
        return apply_chat(self.tokenizer, messages, **template_args)

    def _collect(
        self, requests: list[tuple[Any, SamplingParams]], use_tqdm: bool, on_error: OnError
    ) -> list[RequestOutput]:
        results: list[RequestOutput | None] = [None] * len(requests)
        with Progress(self.engine, len(requests), use_tqdm) as progress:
            for delta in self._calls.run(requests, on_error):
                progress.add(len(delta.token_ids), delta.output is not None)
                if delta.output is not None:
                    results[delta.index] = delta.output
        return [result for result in results if result is not None]
