"""Grammar guides and token masks of a simulation.

Guides notice calls while their masks are being filled. Masks are filled as late as possible, as by a slow thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.guide import GuidedRows
from trioserve.contracts.token_masks import TokenMasks
from trioserve.engine.mask_rows import MaskBuffers, MaskRows
from trioserve.testing.automaton_guide import Automaton, AutomatonGuide

__all__ = ["LateMasks", "WatchedGuide", "forced_count", "state_behind"]


class WatchedGuide(AutomatonGuide):
    """A guide that notices forbidden calls.

    Args:
        automaton: its automaton.

    Attributes:
        being_filled: number of steps whose masks for this guide are not filled yet.
    """

    def __init__(self, automaton: Automaton) -> None:
        super().__init__(automaton)
        self.being_filled = 0

    def accept(self, token_id: int) -> bool:
        assert not self.being_filled, "a guide accepts a token while its masks are being filled"
        return super().accept(token_id)

    def forced_tokens(self, count_max: int) -> tuple[int, ...]:
        assert not self.being_filled, "a guide is queried while its masks are being filled"
        return super().forced_tokens(count_max)

    def acceptable_count(self, token_ids: Sequence[int]) -> int:
        assert not self.being_filled, "a guide is queried while its masks are being filled"
        return super().acceptable_count(token_ids)


class LateMasks:
    """A MaskMaker that fills masks late.

    Args:
        vocab_size: number of token ids.

    Attributes:
        waiting: steps whose masks are not filled yet, oldest first.
    """

    def __init__(self, vocab_size: int) -> None:
        self._buffers = MaskBuffers(vocab_size)
        self.waiting: list[tuple[MaskRows, Sequence[GuidedRows]]] = []

    def begin(self, guided: Sequence[GuidedRows], row_count: int) -> TokenMasks:
        rows = self._buffers.take(guided, row_count)
        assert all(rows is not other for other, _ in self.waiting), "masks are reused while they are being filled"
        for own in guided:
            _watched(own).being_filled += 1
        self.waiting.append((rows, guided))
        return rows

    def end(self, masks: TokenMasks) -> None:
        assert isinstance(masks, MaskRows)
        self._buffers.give_back(masks)

    def fill_until(self, masks: TokenMasks | None) -> None:
        """Fill masks in order, as for a step that waits for them.

        Args:
            masks: the last masks to fill. None: all.
        """
        while self.waiting and (masks is None or any(rows is masks for rows, _ in self.waiting)):
            rows, guided = self.waiting.pop(0)
            rows.fill()
            for own in guided:
                _watched(own).being_filled -= 1


def _watched(rows: GuidedRows) -> WatchedGuide:
    assert isinstance(rows.guide, WatchedGuide)
    return rows.guide


def state_behind(automaton: Automaton, token_ids: Sequence[int]) -> int:
    """Return the state after some tokens. The last one may be a stop token, which does not change the state.

    Args:
        automaton: the automaton.
        token_ids: the tokens.
    """
    state = 0
    for token_id in token_ids:
        state = dict(automaton[state]).get(token_id, state)
    return state


def forced_count(automaton: Automaton, response: Sequence[int], count: int) -> int:
    """Return how many tokens of a response follow at once, since each is the only allowed one.

    Args:
        automaton: the automaton.
        response: tokens of the response.
        count: number of tokens before.
    """
    forced = 0
    while count + forced < len(response) and len(automaton[state_behind(automaton, response[: count + forced])]) == 1:
        forced += 1
    return forced
