"""Texts that must not be written: the last token of each is barred where the tokens before it stand already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from trioserve.text.mask_bits import clear_bits, keep_bits
from trioserve.text.stop_strings import PrefixAutomaton

__all__ = ["BadWords"]

SINGLE_BITS_MAX = 16  # more are cleared with one operation on the whole row
ROWS_KEPT_MAX = 8  # of 16 KB for 131,072 tokens


class BadWords:
    """The bad words of one request. Its choices share them.

    What a sequence has written is a state, a number, which each token moves on. The states are those of one automaton
    (PrefixAutomaton), for which a token is a character: so a step costs the same however many words begin alike.
    """

    def __init__(self, words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> None:
        """Bar each word as it is and behind a space, with the tokens that it has by itself."""
        alone: set[int] = set()
        last_ids: dict[str, set[int]] = {}  # by the tokens before the last one
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
        """The state behind one more token. The first one is 0."""
        return 0 if self._automaton is None else self._automaton.advance(state, _character(token_id))

    def bars_any(self, state: int) -> bool:
        """Whether any token is barred in this state."""
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
        """All tokens that may not come next."""
        barred = set(self._alone)
        index = self._stop_index(state)
        while index >= 0:
            barred |= self._last_ids[index]
            assert self._automaton is not None
            index = self._automaton.shorter_stops[index]
        return barred

    def clear(self, address: int, words_per_row: int, state: int) -> None:
        """Clear the bits of the barred tokens in a row of masks. In the thread that fills masks alone.

        Args:
            address: of the row.
            words_per_row: uint32 words that the row has.
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
        """What to clear: a few bits, or all but the bits of a row."""
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
    return chr(token_id + 1)  # no token is the character that stands for none
