"""What the core knows of a request's drafts by a draft model: how far its KV comes, and what it proposed last.

The draft model keeps its KV in the same blocks as the model, so that nobody has to give anything back for it. What it
has not computed it computes later, or never: a draft only costs time.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ACCEPTANCE_FIRST", "ModelDraft"]

ACCEPTANCE_FIRST = 0.7  # before anything is known; high enough to try
LEARNING_RATE = 0.1  # of one draft token that was verified
PAUSE_MAX = 32  # tokens without a draft, where drafts are wrong


class ModelDraft:
    """One request's. drafted_count: the draft model has its KV of so many tokens from the first one on."""

    __slots__ = ("_pause", "_pause_next", "_proposed", "_proposed_for", "acceptance", "drafted_count")

    def __init__(self, acceptance: float = ACCEPTANCE_FIRST) -> None:
        """acceptance: to begin with."""
        self.drafted_count = 0
        self._proposed: tuple[int, ...] = ()
        self._proposed_for = 0
        self.acceptance = acceptance
        """Of 100 draft tokens behind right ones so many hundredths were right, the latest ones above all."""
        self._pause = 0
        self._pause_next = 1

    @property
    def is_paused(self) -> bool:
        return self._pause > 0

    def take_proposed(self, proposed: tuple[int, ...], known_count: int) -> None:
        """The draft model says what may follow so many known tokens."""
        self._proposed, self._proposed_for = proposed, known_count

    def draft(self, tokens: Sequence[int], count_max: int) -> tuple[int, ...]:
        """What was proposed for what follows `tokens`, at most so many; it counts once."""
        if self._pause > 0:
            self._pause -= 1
        draft, self._proposed = self._proposed[:count_max], ()
        return draft if self._proposed_for == len(tokens) else ()

    def learn(self, drafted_count: int, accepted_count: int) -> None:
        """So many of the draft tokens of the last draft were right. Wrong ones are followed by pauses, each twice as
        long as the one before."""
        for _ in range(accepted_count):
            self.acceptance += LEARNING_RATE * (1.0 - self.acceptance)
        if accepted_count < drafted_count:
            self.acceptance -= LEARNING_RATE * self.acceptance
        if accepted_count > 0:
            self._pause_next = 1
        else:
            self._pause, self._pause_next = self._pause_next, min(2 * self._pause_next, PAUSE_MAX)
