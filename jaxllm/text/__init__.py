"""Text in and text out: prompts to token ids, chat templates, token ids to streamed text, stop strings.

Works on any transformers tokenizer; imports nothing of jaxllm.
"""

from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.prompt import apply_chat, encode_prompt
from jaxllm.text.stop import StopStrings

__all__ = ["Detokenizer", "StopStrings", "apply_chat", "encode_prompt"]
