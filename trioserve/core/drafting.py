"""State of one request's draft tokens, from prompt lookup (`Drafter`) or from a draft model (`ModelDraft`).

The step that computes a draft token also verifies it. So drafts change the speed of a response, but never its content.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["Drafter", "ACCEPTANCE_FIRST", "ModelDraft"]


NGRAM_MIN = 3  # A draft needs an earlier occurrence of this many last tokens. Two are too often a coincidence.
NGRAM_MAX = 8  # Longest n-gram that is compared. A longer match does not improve a draft.
PLACES_MAX = 16  # Number of earlier positions that a draft compares, starting with the latest position.
ENTERED_MAX = 512  # Number of positions entered per draft. A long prompt is entered over several steps.
HEADS_MAX = 2**14
LENGTH_FIRST = 4  # Number of tokens in the first draft.
PAUSE_MAX = 32  # Longest pause after wrong drafts, as a number of tokens that are computed without a draft.


class Drafter:
    """Drafts tokens for one request by prompt lookup. If the latest tokens occur earlier in the text, the tokens that
    followed the earlier occurrence become the draft.

    This is prompt lookup decoding (Apoorv Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding), known as the
    ngram speculator of vLLM and as prompt_lookup_num_tokens of transformers.

    Other implementations search the whole text for every draft. This class finds earlier positions like deflate (RFC
    1951, section 4). Each position is entered once into a linked list, under a hash of the tokens before it. The latest
    position comes first in the list. The memory is four bytes per token of the text for the lists, and at most the same
    amount for the heads of the lists.

    Args:
        draft_tokens_max: highest number of tokens in one draft.
        tokens_max: highest number of tokens in the request's text.
    """

    __slots__ = ("_draft_tokens_max", "_heads", "_length", "_pause", "_pause_next", "_previous")

    def __init__(self, draft_tokens_max: int, tokens_max: int) -> None:
        head_count = min(HEADS_MAX, 1 << tokens_max.bit_length())
        self._draft_tokens_max = draft_tokens_max
        # A place is the index of a token that has at least NGRAM_MIN tokens before it. The value 0 ends a linked list.
        self._heads = array("i", bytes(4 * head_count))
        self._previous = array("i")  # For each place from NGRAM_MIN on: the next older place in the same linked list.
        self._length = min(LENGTH_FIRST, draft_tokens_max)
        self._pause = 0
        self._pause_next = 1

    def draft(self, tokens: Sequence[int], count_max: int) -> tuple[int, ...]:
        """Return draft tokens that may follow `tokens`, or an empty tuple if the text does not repeat.

        Args:
            tokens: the request's text. It must begin with the text of the previous call.
            count_max: highest number of draft tokens to return.
        """
        if self._pause > 0:
            self._pause -= 1
            return ()
        count = min(count_max, self._length)
        end = len(tokens)
        self._enter(tokens)
        place = self._latest_like(tokens)
        if place == 0:
            return ()
        draft_tokens = list(tokens[place : place + count])
        # At the end of the text, continue to copy from the draft itself. So a short pattern is repeated several times.
        while len(draft_tokens) < count:
            draft_tokens.append(draft_tokens[place - end])
        return tuple(draft_tokens)

    def learn(self, drafted_count: int, accepted_count: int) -> None:
        """Adapt to the result of the last draft.

        After accepted drafts, the next drafts are longer. After rejected drafts, the next drafts are shorter. If short
        drafts are rejected, too, drafting pauses. Each pause is twice as long as the previous pause.

        Args:
            drafted_count: number of tokens in the last draft.
            accepted_count: number of these tokens that were accepted.
        """
        if accepted_count == drafted_count:
            self._length = min(2 * max(self._length, drafted_count), self._draft_tokens_max)
        elif accepted_count > 0:
            self._length = accepted_count
        else:
            self._length //= 2
        if accepted_count > 0:
            self._pause_next = 1
        elif self._length == 0:
            self._length = 1
            self._pause, self._pause_next = self._pause_next, min(2 * self._pause_next, PAUSE_MAX)

    def _enter(self, tokens: Sequence[int]) -> None:
        """Add the positions that have a following token to the linked lists. One call adds at most ENTERED_MAX
        places.
        """
        heads, previous = self._heads, self._previous
        first = NGRAM_MIN + len(previous)
        for place in range(first, min(len(tokens), first + ENTERED_MAX)):
            head = hash(tuple(tokens[place - NGRAM_MIN : place])) % len(heads)
            previous.append(heads[head])
            heads[head] = place

    def _latest_like(self, tokens: Sequence[int]) -> int:
        """Return the place that has the most tokens before it in common with the end of the text. If several places are
        equally good, return the latest. Return 0 if there is no such place.
        """
        end = len(tokens)
        if end <= NGRAM_MIN:
            return 0
        place = self._heads[hash(tuple(tokens[end - NGRAM_MIN :])) % len(self._heads)]
        best, best_count = 0, NGRAM_MIN - 1
        for _ in range(PLACES_MAX):
            if place == 0:
                break
            count = _equal_count(tokens, place, end)
            if count > best_count:
                best, best_count = place, count
                if count == NGRAM_MAX:
                    break
            place = self._previous[place - NGRAM_MIN]
        return best


def _equal_count(tokens: Sequence[int], place: int, end: int) -> int:
    """Return how many tokens before `place` equal the tokens before `end`, at most NGRAM_MAX."""
    count = 0
    while count < min(NGRAM_MAX, place) and tokens[place - 1 - count] == tokens[end - 1 - count]:
        count += 1
    return count


ACCEPTANCE_FIRST = 0.7  # First estimate of the acceptance rate. It is high enough that drafts are tried.
LEARNING_RATE = 0.1  # Weight of one verified draft token in the acceptance rate.


class ModelDraft:
    """Drafts of one request by a draft model: how far the draft model's KV reaches, and its latest proposal.

    The draft model stores its KV in the same blocks as the model, so it needs no other blocks. If the draft model has
    missed tokens, it computes them later or never, because missing KV only reduces the quality of drafts.

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

    def store_proposal(self, proposed: tuple[int, ...], known_count: int) -> None:
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
            count_max: highest number of draft tokens to return.
        """
        if self._pause > 0:
            self._pause -= 1
        draft, self._proposed = self._proposed[:count_max], ()
        return draft if self._proposed_for == len(tokens) else ()

    def learn(self, drafted_count: int, accepted_count: int) -> None:
        """Adapt to the result of the last draft. Wrong drafts lead to pauses, and each pause is twice as long as the
        previous one.

        Args:
            drafted_count: number of tokens in the last draft.
            accepted_count: number of these tokens that were accepted.
        """
        for _ in range(accepted_count):
            self.acceptance += LEARNING_RATE * (1.0 - self.acceptance)
        if accepted_count < drafted_count:
            self.acceptance -= LEARNING_RATE * self.acceptance
        if accepted_count > 0:
            self._pause_next = 1
        else:
            self._pause, self._pause_next = self._pause_next, min(2 * self._pause_next, PAUSE_MAX)
