"""Bad words: texts that must not be generated.

Once all tokens of such a text but the last are written, the last is barred.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from trioserve.text.mask_bits import clear_bits, keep_bits
from trioserve.text.stop_strings import PrefixAutomaton

__all__ = ["BadWords"]

SINGLE_BITS_MAX = 16  # more bits are cleared with one operation on the whole row
ROWS_KEPT_MAX = 8  # cached rows, of 16 KB each for 131,072 tokens


class BadWords:
    """Bad words of one request. Its choices share them.

    The output of a sequence so far is a state, which is a number. Each token leads to the next state. The states are
    those of one PrefixAutomaton, which sees each token as a character. So a step costs the same however many words
    begin alike.

    Each word is barred as it is and after a space. A text is barred only if it is written with the tokens that it has
    on its own.

    Args:
        words: The bad words.
        encode: Returns the token ids of a text.
    """

    def __init__(self, words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> None:
        alone: set[int] = set()
        last_ids: dict[str, set[int]] = {}  # last tokens of bad words, by the tokens before the last token
        for word in words:
            for text in {word, f" {word.lstrip()}"}:
                *before, last = encode(text) or (-1,)
                if before:
                    last_ids.setdefault("".join(map(_character, before)), set()).add(last)
                elif last >= 0:
                    alone.add(last)
        self._alone = frozenset(alone)
        self._automaton = PrefixAutomaton(tuple(last_ids)) if last_ids else None
        stops = () if self._automaton is None else self._automaton.stops
        self._last_ids = [frozenset(last_ids[stop]) for stop in stops]
        self._rows: OrderedDict[int, tuple[tuple[int, ...], bytes | None]] = OrderedDict()

    def after(self, state: int, token_id: int) -> int:
        """Return the state after one more token.

        Args:
            state: The state before the token. The first state is 0.
            token_id: The token.
        """
        return 0 if self._automaton is None else self._automaton.advance(state, _character(token_id))

    def bars_any(self, state: int) -> bool:
        """Return True if any token is barred next.

        Args:
            state: State of the sequence.
        """
        return bool(self._alone) or self._stop_index(state) >= 0

    def is_barred(self, state: int, token_id: int) -> bool:
        if token_id in self._alone:
            return True
        index = self._stop_index(state)
        while index >= 0:
            if token_id in self._last_ids[index]:
                return True
            assert self._automaton is not None
            index = self._automaton.shorter_stops[index]
        return False

    def barred(self, state: int) -> set[int]:
        """Return all tokens that are barred next.

        Args:
            state: State of the sequence.
        """
        barred = set(self._alone)
        index = self._stop_index(state)
        while index >= 0:
            barred |= self._last_ids[index]
            assert self._automaton is not None
            index = self._automaton.shorter_stops[index]
        return barred

    def clear(self, address: int, words_per_row: int, state: int) -> None:
        """Clear the bits of the barred tokens in one row of a token mask. Only the thread that fills masks calls this.

        Args:
            address: Memory address of the row.
            words_per_row: Number of uint32 words in the row.
            state: State of the sequence before the row's token.
        """
        index = self._stop_index(state)
        found = self._rows.get(index)
        if found is None:
            found = self._rows[index] = self._row(state, words_per_row)
            if len(self._rows) > ROWS_KEPT_MAX:
                self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(index)
        token_ids, row = found
        if row is None:
            clear_bits(address, token_ids)
        else:
            keep_bits(address, row)

    def _row(self, state: int, words_per_row: int) -> tuple[tuple[int, ...], bytes | None]:
        """Return the bits to clear.

        Returns:
            Token ids and None if the bits are few. Otherwise an empty tuple, and a row that has all other bits.
        """
        token_ids = tuple(token_id for token_id in self.barred(state) if token_id < 32 * words_per_row)
        if len(token_ids) <= SINGLE_BITS_MAX:
            return token_ids, None
        row = bytearray(b"\xff" * (4 * words_per_row))
        for token_id in token_ids:
            row[token_id // 8] &= ~(1 << token_id % 8)
        return (), bytes(row)

    def _stop_index(self, state: int) -> int:
        return -1 if self._automaton is None else self._automaton.stop_indices[state]


def _character(token_id: int) -> str:
    return chr(token_id + 1)  # +1, since PrefixAutomaton uses the character 0 for "no character"
