"""Where a request stands in its grammar."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32


class Matcher:
    """What was generated, as seen by a grammar: which tokens may follow, and whether the text may end here.

    Made by `GrammarCompiler.matcher`. One thread at a time.
    """

    def __init__(self, state: Any, eos_token_ids: frozenset[int], vocab_size: int):
        self._state = state
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._accepted = 0  # tokens of the text
        self._ends = 0  # end-of-sequence tokens behind it: not the grammar's business

    @property
    def num_accepted(self) -> int:
        """Tokens accepted and not taken back."""
        return self._accepted + self._ends

    @property
    def state(self) -> Any:
        """The library's own object, for `GrammarCompiler.fill`."""
        return self._state

    @property
    def has_ended(self) -> bool:
        """Whether an end-of-sequence token was accepted."""
        return self._ends > 0

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far meets the constraint, so that it may end."""
        return self._state.is_accepting()

    @property
    def is_terminated(self) -> bool:
        """Whether the text is over: an end-of-sequence token was accepted, or nothing but one can follow."""
        return self._ends > 0 or self._state.is_stopped()

    def fill(self, mask: UInt32[np.ndarray, "words"]) -> None:
        """Write which tokens may come next: bit i of word w is token 32 w + i. Once terminated, those that end a text.

        Where only one text can follow, it may be only the token with which that text usually begins.

        Args:
            mask: a row of `ceil(vocab_size / 32)` words, contiguous.

        Raises:
            ValueError: if the row has another width or type.
            RuntimeError: if the grammar is too complex for the library's limits here; end this request with it.
        """
        words = -(-self._vocab_size // 32)
        if mask.shape != (words,) or mask.dtype != np.uint32 or not mask.flags.c_contiguous:
            raise ValueError(f"the mask must be a contiguous row of {words} uint32; got {mask.dtype}{list(mask.shape)}")
        if self._ends:
            mask[:] = 0
            for token in self._eos_token_ids:
                mask[token // 32] |= np.uint32(1 << token % 32)
            return
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def accept(self, token_ids: Sequence[int]) -> int:
        """Take what was generated, up to the first token that the grammar does not allow; how many were taken.

        Raises:
            RuntimeError: if the grammar is too complex for the library's limits here.
        """
        for count, token in enumerate(token_ids):
            if token in self._eos_token_ids:
                if not self.is_accepting:
                    return count
                self._ends += 1
                continue
            if self._ends or self._state.try_consume_tokens([token]) != 1:
                self._check()
                return count
            self._accepted += 1
        return len(token_ids)

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens.

        Raises:
            ValueError: if fewer were accepted.
        """
        if not 0 <= count <= self.num_accepted:
            raise ValueError(f"count={count} tokens cannot be taken back: {self.num_accepted} were accepted")
        ends = min(count, self._ends)
        self._ends -= ends
        self._accepted -= count - ends
        if count > ends:
            self._state.rollback(count - ends)
            self._check()

    def _check(self) -> None:
        if self._state.is_error():
            raise RuntimeError(f"the grammar cannot be followed any further: {self._state.get_error()[:300]}")
