"""Guides of a simulation: automata that notice when they are asked while their masks are being filled, and masks that
are filled as late as may be, as by a thread that comes last."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.guide import GuidedRows
from trioserve.contracts.token_masks import TokenMasks
from trioserve.engine.mask_rows import MaskBuffers, MaskRows
from trioserve.testing.automaton_guide import Automaton, AutomatonGuide

__all__ = ["LateMasks", "WatchedGuide", "forced_count", "state_behind"]


class WatchedGuide(AutomatonGuide):
    """being_filled: how many steps' masks of it are."""

    def __init__(self, automaton: Automaton) -> None:
        super().__init__(automaton)
        self.being_filled = 0

    def accept(self, token_id: int) -> bool:
        assert not self.being_filled, "a guide goes on while its masks are being filled"
        return super().accept(token_id)

    def forced_tokens(self, count_max: int) -> tuple[int, ...]:
        assert not self.being_filled, "a guide is asked while its masks are being filled"
        return super().forced_tokens(count_max)

    def acceptable_count(self, token_ids: Sequence[int]) -> int:
        assert not self.being_filled, "a guide is asked while its masks are being filled"
        return super().acceptable_count(token_ids)


class LateMasks:
    """A MaskMaker. waiting: steps whose masks are not filled yet, oldest first."""

    def __init__(self, vocab_size: int) -> None:
        self._buffers = MaskBuffers(vocab_size)
        self.waiting: list[tuple[MaskRows, Sequence[GuidedRows]]] = []

    def begin(self, guided: Sequence[GuidedRows], row_count: int) -> TokenMasks:
        rows = self._buffers.take(guided, row_count)
        assert all(rows is not other for other, _ in self.waiting), "masks are used again while they are being filled"
        for own in guided:
            _watched(own).being_filled += 1
        self.waiting.append((rows, guided))
        return rows

    def end(self, masks: TokenMasks) -> None:
        assert isinstance(masks, MaskRows)
        self._buffers.give_back(masks)

    def fill_until(self, masks: TokenMasks | None) -> None:
        """As whoever waits for these masks; None: for all."""
        while self.waiting and (masks is None or any(rows is masks for rows, _ in self.waiting)):
            rows, guided = self.waiting.pop(0)
            rows.fill()
            for own in guided:
                _watched(own).being_filled -= 1


def _watched(rows: GuidedRows) -> WatchedGuide:
    assert isinstance(rows.guide, WatchedGuide)
    return rows.guide


def state_behind(automaton: Automaton, token_ids: Sequence[int]) -> int:
    """Where these tokens lead, the last of which may be a stop token that leads nowhere."""
    state = 0
    for token_id in token_ids:
        state = dict(automaton[state]).get(token_id, state)
    return state


def forced_count(automaton: Automaton, response: Sequence[int], count: int) -> int:
    """How many tokens of the response come at once behind its first `count`: those that are the only ones that may."""
    forced = 0
    while count + forced < len(response) and len(automaton[state_behind(automaton, response[: count + forced])]) == 1:
        forced += 1
    return forced
