"""Incremental detokenization: text as soon as it is final, at a cost linear in the number of tokens.

The joined pieces equal `tokenizer.decode(ids, clean_up_tokenization_spaces=False)`. The clean-up (which removes the
space in " ." and " 're") is off on purpose: it changes text that was already streamed, and code and tables lose by it.

Two ways, by the tokenizer's decoder:
- Byte-level BPE (Qwen, Llama 3, SmolLM): every token is some bytes; an incremental UTF-8 decoder holds back the bytes
  of an unfinished character.
- All others (SentencePiece-like: Llama 2, Mistral): a token's text depends on what stands before it (the first space of
  a text is dropped) but not on more than one token, so new tokens are decoded after one token of context. A run
  of byte tokens `<0xE4>` is held back until it ends, since the decoder replaces every byte of a run that is not valid
  UTF-8 as a whole.
"""

import codecs
import re
import weakref
from collections.abc import Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}


BYTE_OF_CHARACTER = _alphabet()


class _Vocabulary:
    """What the detokenizers of one tokenizer share: special ids, and tokens by id as they are met."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = frozenset(index for index, token in added.items() if token.special)
        self.byte_level = _is_byte_level(tokenizer)
        self._lookup = tokenizer.convert_ids_to_tokens
        self._tokens: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}

    def token(self, index: int) -> str | None:
        """The token as the vocabulary writes it; None for an id beyond the tokenizer, which decodes to nothing."""
        if index not in self._tokens:
            self._tokens[index] = self._lookup(index)
        return self._tokens[index]

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a byte-level token stands for; a token outside the alphabet (an added one) is its own text."""
        if index not in self._bytes:
            token = self.token(index) or ""
            if all(character in BYTE_OF_CHARACTER for character in token):
                self._bytes[index] = bytes(BYTE_OF_CHARACTER[character] for character in token)
            else:
                self._bytes[index] = token.encode()
        return self._bytes[index]


_VOCABULARIES: weakref.WeakKeyDictionary[Any, _Vocabulary] = weakref.WeakKeyDictionary()


def _is_byte_level(tokenizer: Any) -> bool:
    from tokenizers.decoders import ByteLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(backend, "decoder", None), ByteLevel)


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    if tokenizer not in _VOCABULARIES:
        _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
    return _VOCABULARIES[tokenizer]


def token_text(tokenizer: Any, index: int) -> str:
    """The text of one token by itself, as it stands within a text: with its space, special tokens as they are written.

    Half a character is U+FFFD. Kept for each token, so that repeated calls are a look-up.
    """
    vocabulary = _vocabulary(tokenizer)
    if index not in vocabulary.texts:
        if vocabulary.byte_level:
            text = vocabulary.token_bytes(index).decode(errors="replace")
        elif vocabulary.token(index) is None:
            text = ""
        else:  # the second of two shows the space that the first one of a text loses
            once, twice = (
                tokenizer.decode([index] * times, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                for times in (1, 2)
            )
            text = twice[len(once) :]
        vocabulary.texts[index] = text
    return vocabulary.texts[index]


class Detokenizer:
    """Turns the tokens of one sequence into text, piece by piece.

    `add` returns the text that became final, never half a character; `finish` returns what is still held back, an
    unfinished character as U+FFFD. Special tokens are left out unless `skip_special_tokens` is False.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._vocabulary = _vocabulary(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # the last token whose text is out, if any
        self._pending: list[int] = []  # tokens after it

    def add(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text, possibly empty, that no later token can change."""
        vocabulary = self._vocabulary
        kept = [int(index) for index in token_ids if not (self._skip_special_tokens and index in vocabulary.special)]
        if vocabulary.byte_level:
            return self._utf8.decode(b"".join(vocabulary.token_bytes(index) for index in kept))
        known = [index for index in kept if vocabulary.token(index) is not None]
        self._pending += known
        for position in reversed(range(len(self._pending) - len(known), len(self._pending))):
            if not _BYTE_TOKEN.fullmatch(vocabulary.token(self._pending[position]) or ""):
                return self._emit(position + 1)
        return ""

    def finish(self) -> str:
        """The rest of the text, once no token follows."""
        if self._vocabulary.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._emit(len(self._pending))

    def _emit(self, count: int) -> str:
        """Text of the first `count` pending tokens; the last of them becomes the context of what follows."""
        if not count:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending[:count])
        self._context, self._pending = self._pending[count - 1 : count], self._pending[count:]
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
