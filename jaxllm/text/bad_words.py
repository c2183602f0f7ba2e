"""Forbidden texts as token sequences."""

from collections.abc import Sequence
from typing import Any


def bad_word_tokens(tokenizer: Any, words: Sequence[str], most: int, longest: int) -> list[list[int]]:
    """The token sequences that write `words`, each without and with a space before it, as vLLM chooses them.

    The form with a space counts where it is as long and begins with another token. A word can still be written by
    other tokens than the tokenizer's own.

    Args:
        tokenizer: a transformers tokenizer.
        words: texts; spaces before them make no difference.
        most: sequences that may be returned.
        longest: tokens that each may have.

    Raises:
        ValueError: if a word is no token or has a lone surrogate, or there are more or longer sequences than allowed.
    """
    sequences: list[list[int]] = []
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"bad_words must be texts of characters; got {word!r:.80}: {error.reason}") from error
        plain, spaced = (
            list(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
        )
        if not plain:
            raise ValueError(f"bad_words must be texts that the tokenizer knows; got {word!r}, which has no tokens")
        forms = [plain]
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            forms.append(spaced)
        for form in forms:
            if len(form) > longest:
                raise ValueError(
                    f"bad_words must have at most {longest} tokens each; got {word!r}, which has {len(form)}"
                )
            if form not in sequences:
                sequences.append(form)
    if len(sequences) > most:
        raise ValueError(
            f"bad_words must be at most {most} token sequences, most words being two; got {len(sequences)} of "
            f"{len(words)} words"
        )
    return sequences
