"""Text in and text out: prompts to token ids, chat templates, token ids to streamed text, stop strings.

Works on any transformers tokenizer; imports nothing of jaxllm.
"""

from jaxllm.text.bad_words import bad_word_tokens
from jaxllm.text.detokenizer import Detokenizer, token_text
from jaxllm.text.prompt import apply_chat, encode_prompt
from jaxllm.text.stop import StopStrings

__all__ = ["Detokenizer", "StopStrings", "apply_chat", "bad_word_tokens", "encode_prompt", "token_text"]
