"""Prompts to token ids: plain text and chat messages."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`, with the special tokens that the tokenizer adds (a BOS, for most).

    A text that already begins with the BOS token is taken to be in template form: nothing is added to it, so that a BOS
    is never doubled.
    """
    bos = tokenizer.bos_token
    in_template_form = bool(bos) and text.startswith(bos)
    return list(tokenizer.encode(text, add_special_tokens=not in_template_form))


def apply_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template_args: Any) -> list[int]:
    """Token ids of a conversation in the tokenizer's chat template, up to where the assistant's answer begins.

    `template_args` go to the template as they are: `enable_thinking=False`, `tools=[...]`, `chat_template=...`,
    `continue_final_message=True` (then no new turn is opened), `add_generation_prompt=False`.
    Raises ValueError where there is no template, no message, or where the template refuses the messages.
    """
    from jinja2 import TemplateError

    template = template_args.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError(
            "this tokenizer has no chat template: pass one as chat_template=, or give the prompt as plain text "
            "(base models have none)"
        )
    if not messages:
        raise ValueError("messages is empty: at least one message, {'role': ..., 'content': ...}, is needed")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"messages[{index}]={message!r}: a mapping with 'role' and 'content' is needed")
    template_args.setdefault("add_generation_prompt", not template_args.get("continue_final_message", False))
    if "enable_thinking" in template_args and "enable_thinking" not in str(template):
        logger.warning("enable_thinking has no effect: the chat template of this model does not mention it")
    try:
        tokens = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **template_args)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    return list(tokens)
