"""Texts that must not be written: their last token is barred where the tokens before it stand already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

__all__ = ["BadWords"]


class BadWords:
    """Of one request; its choices share it."""

    def __init__(self, words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> None:
        """Each word is barred as it is and behind a space, with the tokens that it has by itself."""
        self._alone: set[int] = set()
        self._behind: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # by the token before the last one
        self.history_max = 0  # so many of the latest tokens decide
        for word in words:
            for text in {word, f" {word.lstrip()}"}:
                self._bar(tuple(encode(text)))

    def _bar(self, token_ids: tuple[int, ...]) -> None:
        if len(token_ids) == 1:
            self._alone.add(token_ids[0])
        elif token_ids:
            *before, last = token_ids
            self._behind.setdefault(before[-1], []).append((tuple(before), last))
            self.history_max = max(self.history_max, len(before))

    def barred(self, history: Sequence[int]) -> set[int]:
        """The tokens that may not come behind these."""
        if not history or history[-1] not in self._behind:
            return self._alone
        barred = set(self._alone)
        for before, last in self._behind[history[-1]]:
            if tuple(history[-len(before) :]) == before:
                barred.add(last)
        return barred
