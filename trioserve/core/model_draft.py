"""State of one request's drafts by a draft model: how far the draft model's KV reaches, and its last proposal.

The draft model keeps its KV in the same blocks as the model, so it needs no blocks of its own. Tokens that it has not
computed are computed later or never. A draft costs only time.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ACCEPTANCE_FIRST", "ModelDraft"]

ACCEPTANCE_FIRST = 0.7  # first acceptance rate, high enough that drafts are tried
LEARNING_RATE = 0.1  # weight of one verified draft token
PAUSE_MAX = 32  # longest pause after wrong drafts, in tokens without a draft


class ModelDraft:
    """Draft state of one request.

    Args:
        acceptance: the first estimate of the acceptance rate.

    Attributes:
        drafted_count: number of tokens from the start of the sequence whose KV the draft model has computed.
        acceptance: estimated probability that a draft token is right if all draft tokens before it are right. Recent
            draft tokens have more weight.
    """

    __slots__ = ("_pause", "_pause_next", "_proposed", "_proposed_for", "acceptance", "drafted_count")

    def __init__(self, acceptance: float = ACCEPTANCE_FIRST) -> None:
        self.drafted_count = 0
        self._proposed: tuple[int, ...] = ()
        self._proposed_for = 0
        self.acceptance = acceptance
        self._pause = 0
        self._pause_next = 1

    @property
    def is_paused(self) -> bool:
        return self._pause > 0

    def take_proposed(self, proposed: tuple[int, ...], known_count: int) -> None:
        """Store a proposal of the draft model.

        Args:
            proposed: proposed tokens.
            known_count: number of known tokens when the proposal was made.
        """
        self._proposed, self._proposed_for = proposed, known_count

    def draft(self, tokens: Sequence[int], count_max: int) -> tuple[int, ...]:
        """Return the stored proposal if it was made for `tokens`, and discard it.

        Args:
            tokens: known tokens of the request.
            count_max: most draft tokens to return.
        """
        if self._pause > 0:
            self._pause -= 1
        draft, self._proposed = self._proposed[:count_max], ()
        return draft if self._proposed_for == len(tokens) else ()

    def learn(self, drafted_count: int, accepted_count: int) -> None:
        """Adapt to the result of the last draft. Wrong drafts lead to pauses, each twice as long as the previous pause.

        Args:
            drafted_count: tokens of the last draft.
            accepted_count: number of its tokens that were accepted.
        """
        for _ in range(accepted_count):
            self.acceptance += LEARNING_RATE * (1.0 - self.acceptance)
        if accepted_count < drafted_count:
            self.acceptance -= LEARNING_RATE * self.acceptance
        if accepted_count > 0:
            self._pause_next = 1
        else:
            self._pause, self._pause_next = self._pause_next, min(2 * self._pause_next, PAUSE_MAX)
