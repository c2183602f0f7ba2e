"""Grammars compiled for one tokenizer, kept for the requests that share them."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from jaxllm.structured.matcher import Matcher
from jaxllm.structured.params import StructuredOutputsParams

MAX_CACHED = 256
"""Compiled grammars that are kept; the one that was not used for longest goes first."""


class GrammarCompiler:
    """Compiles the constraints of requests for one tokenizer. Threads may share it.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: size of the model's vocabulary: width of the masks in bits. Ids that the tokenizer lacks are never
            allowed.
        eos_token_ids: ids that end a text; they are allowed where the constraint is met.

    Raises:
        ValueError: if llguidance is not installed or cannot work with this tokenizer, or if there is no id that ends a
            text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]):
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = vocab_size
        if not self.eos_token_ids:
            raise ValueError("structured_outputs needs an end-of-sequence token, and this model's config names none")
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise ValueError(
                f"structured_outputs needs the package llguidance, which cannot be imported ({error}); "
                "install it with: pip install 'jaxllm[structured]'"
            ) from error
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, vocab_size, sorted(self.eos_token_ids))
        except Exception as error:  # a Rust error of whatever kind: the tokenizer's JSON is beyond it
            raise ValueError(f"structured_outputs cannot be used with this tokenizer: {error}") from error
        self._prototypes: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._executor = llguidance.LLExecutor()

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """The state of a new request.

        Compiling takes milliseconds, for large schemas up to a second; it is done once for equal constraints.

        Raises:
            ValueError: if the constraint cannot be compiled; the message says what is wrong with it.
        """
        with self._lock:
            prototype = self._prototypes.get(params)
            if prototype is None:
                prototype = self._compile(params)
                self._prototypes[params] = prototype
                if len(self._prototypes) > MAX_CACHED:
                    self._prototypes.popitem(last=False)
            else:
                self._prototypes.move_to_end(params)
            return Matcher(prototype.deep_copy(), self.eos_token_ids, self.vocab_size)

    def fill(self, masks: UInt32[np.ndarray, "rows words"], matchers: Mapping[int, Matcher]) -> dict[int, str]:
        """`Matcher.fill` of many rows at once, in several threads.

        Args:
            masks: one row for each request in the batch; only those of `matchers` are written.
            matchers: by row.

        Returns:
            What went wrong, by row: those requests cannot go on, and their masks mean nothing.

        Raises:
            ValueError: if the masks have another width or type.
        """
        words = -(-self.vocab_size // 32)
        if masks.shape[1:] != (words,) or masks.dtype != np.uint32 or not masks.flags.c_contiguous:
            raise ValueError(f"masks must be contiguous rows of {words} uint32; got {masks.dtype}{list(masks.shape)}")
        open_states = [(matcher.state, row) for row, matcher in matchers.items() if not matcher.has_ended]
        for row, matcher in matchers.items():
            if matcher.has_ended:
                matcher.fill(masks[row])
        self._executor.unsafe_compute_mask_ptr(open_states, masks.ctypes.data, 4 * words, len(masks))
        return {row: state.get_error()[:300] for state, row in open_states if state.is_error()}

    def _compile(self, params: StructuredOutputsParams) -> Any:
        from llguidance import LLMatcher

        try:
            prototype = LLMatcher(self._tokenizer, _source(params), log_level=0)
            error = prototype.get_error()
        except ValueError as failure:  # text that is no grammar at all
            error = str(failure)
        if error:
            raise ValueError(f"structured_outputs.{params.kind} cannot be compiled: {error.strip()}")
        return prototype


def _source(params: StructuredOutputsParams) -> str:
    """The constraint in llguidance's own format."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return grammar_from("grammar", params.grammar)
    if params.choice is not None:
        return LLMatcher.grammar_from_lark(_alternatives(params.choice))
    schema = {"type": "object"} if params.json_object else json.loads(str(params.json))
    if params.disable_additional_properties:
        _close_objects(schema)
    options: Any = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False), defaults=options)


def _alternatives(texts: Sequence[str]) -> str:
    """A grammar of texts. JSON's escapes are those of Lark's strings, but for those of characters beyond 16 bits."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _close_objects(schema: Any) -> None:
    """Forbid properties that the schema does not name, in place, wherever it does not speak of them."""
    if isinstance(schema, list):
        for item in schema:
            _close_objects(item)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) or schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            _close_objects(value)
