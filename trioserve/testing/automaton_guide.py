"""A small grammar guide for tests: an automaton over token ids that can force tokens, branch and end."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

__all__ = ["AutomatonGuide", "Automaton"]

Automaton = tuple[tuple[tuple[int, int], ...], ...]
"""For each state its allowed tokens, each with the next state. The first state is 0.

A state with one token forces it. A state without tokens is the end.
"""

WORD_BITS = 32


class AutomatonGuide:
    """A Guide (contracts.guide) that follows an automaton.

    Args:
        automaton: the automaton. It never changes.
        fails_after: the number of the accept() call that fails. None if no call must fail.

    Attributes:
        state: current state of the automaton.
        fault: why the guide failed. None if the guide has not failed.
    """

    def __init__(self, automaton: Automaton, *, fails_after: int | None = None) -> None:
        self.automaton = automaton
        self.state = 0
        self.fault: str | None = None
        self._moves = [dict(moves) for moves in automaton]
        self._left = fails_after

    @property
    def is_free_ahead(self) -> bool:
        return False

    def wants_mask(self, draft: Sequence[int]) -> bool:
        return True

    @property
    def is_over(self) -> bool:
        return not self._moves[self.state]

    def accept(self, token_id: int) -> bool:
        if self._left is not None:
            self._left -= 1
        if self._left == 0:
            self.fault = "the guide has failed"
        elif token_id not in self._moves[self.state]:
            self.fault = f"token {token_id} may not come in state {self.state}"
        else:
            self.state = self._moves[self.state][token_id]
        return self.fault is None

    def forced_tokens(self, count_max: int) -> tuple[int, ...]:
        forced: list[int] = []
        state = self.state
        while len(self._moves[state]) == 1 and len(forced) < count_max:
            ((token_id, state),) = self._moves[state].items()
            forced.append(token_id)
        return tuple(forced)

    def acceptable_count(self, token_ids: Sequence[int]) -> int:
        state = self.state
        for count, token_id in enumerate(token_ids):
            if token_id not in self._moves[state]:
                return count
            state = self._moves[state][token_id]
        return len(token_ids)

    def fill_masks(self, address: int, words_per_row: int, draft: Sequence[int]) -> None:
        state: int | None = self.state
        for row in range(1 + len(draft)):
            words = (ctypes.c_uint32 * words_per_row).from_address(address + 4 * words_per_row * row)
            ctypes.memset(words, 0, ctypes.sizeof(words))
            for token_id in () if state is None else self._moves[state]:
                words[token_id // WORD_BITS] |= 1 << token_id % WORD_BITS
            if row < len(draft) and state is not None:
                state = self._moves[state].get(draft[row])
