"""Prompts to token ids: plain text and chat messages."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

# What `apply_chat` decides itself: token ids of one conversation come out, whole and unpadded.
_RESERVED = (
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer",
    "tokenizer_kwargs",
    "truncation",
)
# What transformers itself acts on, whether the template mentions it or not.
_NOT_FOR_THE_TEMPLATE = ("chat_template", "continue_final_message")


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`, with the special tokens that the tokenizer adds (a BOS, for most).

    A text that already begins with the BOS token is taken to be in template form: nothing is added to it, so that a BOS
    is never doubled. Raises ValueError where the text has a lone surrogate, which is no character.
    """
    _check_characters("the prompt", text)
    bos = tokenizer.bos_token
    in_template_form = bool(bos) and text.startswith(bos)
    return list(tokenizer.encode(text, add_special_tokens=not in_template_form))


def apply_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **template_args: Any) -> list[int]:
    """Token ids of a conversation in the tokenizer's chat template, up to where the assistant's answer begins.

    `template_args` go to the template as they are: `enable_thinking=False`, `tools=[...]`, `chat_template=...`,
    `continue_final_message=True` (then no new turn is opened), `add_generation_prompt=False`.
    Raises ValueError where there is no template, no message, a message is not one of text, or the template refuses the
    messages; TypeError where `messages` is no list or an argument is one that this function sets itself.
    """
    for name in _RESERVED:
        if name in template_args:
            raise TypeError(f"{name}={template_args[name]!r:.80} is set by apply_chat itself: leave it out")
    template = template_args.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError(
            "this tokenizer has no chat template (base models have none): pass one as chat_template=, on the command "
            "line --chat-template FILE, or give the prompt as plain text"
        )
    _check_messages(messages)
    _warn_of_unused(template_args, str(template))
    continues = bool(template_args.get("continue_final_message"))
    if template_args.setdefault("add_generation_prompt", not continues) and continues:
        raise ValueError(
            "add_generation_prompt=True opens a new message, continue_final_message=True continues the last: give one"
        )
    try:
        tokens = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **template_args)
    except Exception as error:  # a template is a program: TemplateError where it refuses, any other where it stumbles
        raise ValueError(f"the chat template refuses these messages: {error} ({type(error).__name__})") from error
    return list(tokens)


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages={messages!r:.80}: a list of {{'role': ..., 'content': ...}} is needed")
    if not messages:
        raise ValueError("messages is empty: at least one message, {'role': ..., 'content': ...}, is needed")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}={message!r:.200}: a mapping with 'role' and 'content', both text, is needed")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        texts = [_text_of_part(part) for part in content] if isinstance(content, list | tuple) else [content]
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(
                    f"{where} has the content {content!r:.200}: text is needed, or a list of "
                    f"{{'type': 'text', 'text': ...}} (images and other media are not supported)"
                )
            _check_characters(f"the content of {where}", text)


def _text_of_part(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None


def _check_characters(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}, which is no "
            f"character: remove it, or decode the text's bytes as UTF-8 with errors='replace'"
        ) from error


def _warn_of_unused(template_args: Mapping[str, Any], template: str) -> None:
    for name, value in template_args.items():
        if value is None or name in _NOT_FOR_THE_TEMPLATE:
            continue
        if not re.search(rf"\b{re.escape(name)}\b", template):
            logger.warning("%s has no effect: the chat template of this model does not mention it", name)
