"""The state of one request's drafts: by prompt lookup (`Drafter`), and by a draft model (`ModelDraft`).

A draft token is verified by the step that computes it. So drafts change the speed of a response, never its content.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["Drafter", "ACCEPTANCE_FIRST", "ModelDraft"]


NGRAM_MIN = 3  # tokens that must be equal. Two tokens are equal by chance too often.
NGRAM_MAX = 8  # with more equal tokens, a position is not better
PLACES_MAX = 16  # positions that a draft compares, the latest first
ENTERED_MAX = 512  # positions entered per draft, so that a long prompt is entered over several steps
HEADS_MAX = 2**14
LENGTH_FIRST = 4  # tokens of the first draft
PAUSE_MAX = 32  # longest pause after wrong drafts, in tokens without a draft


class Drafter:
    """Drafts for one request by prompt lookup: if the latest tokens occur earlier in the text, the tokens that followed
    them are copied.

    This is prompt lookup decoding (Apoorv Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding), known as the
    ngram speculator of vLLM and as prompt_lookup_num_tokens of transformers.

    Other implementations search the whole text for every draft. This class finds earlier positions like deflate
    (RFC 1951, section 4): each position is entered once, under a hash of the tokens before it, in a linked list with
    the latest position first. The memory is four bytes per token of the text, and at most the same again for the heads
    of the linked lists.

    Args:
        draft_tokens_max: most tokens of one draft.
        tokens_max: largest length of the request's text, in tokens.
    """

    __slots__ = ("_draft_tokens_max", "_heads", "_length", "_pause", "_pause_next", "_previous")

    def __init__(self, draft_tokens_max: int, tokens_max: int) -> None:
        head_count = min(HEADS_MAX, 1 << tokens_max.bit_length())
        self._draft_tokens_max = draft_tokens_max
        # A place is the index of a token with at least NGRAM_MIN tokens before it. 0 ends a linked list.
        self._heads = array("i", bytes(4 * head_count))
        self._previous = array("i")  # for each place from NGRAM_MIN on: the next older place in its list
        self._length = min(LENGTH_FIRST, draft_tokens_max)
        self._pause = 0
        self._pause_next = 1

    def draft(self, tokens: Sequence[int], count_max: int) -> tuple[int, ...]:
        """Return draft tokens that may follow `tokens`, or an empty tuple if the text does not repeat.

        Args:
            tokens: the request's text. It must begin with the text of the previous call.
            count_max: most draft tokens to return.
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
        # At the end of the text, continue to copy from the draft itself, so that a short repetition is repeated.
        while len(draft_tokens) < count:
            draft_tokens.append(draft_tokens[place - end])
        return tuple(draft_tokens)

    def learn(self, drafted_count: int, accepted_count: int) -> None:
        """Adapt to the result of the last draft.

        After accepted drafts, drafts become longer. After rejected drafts, drafts become shorter. If drafts are still
        rejected, drafting pauses, and each pause is twice as long as the previous pause.

        Args:
            drafted_count: tokens of the last draft.
            accepted_count: number of its tokens that were accepted.
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
        """Enter the places that have a following token, at most ENTERED_MAX new places per call."""
        heads, previous = self._heads, self._previous
        first = NGRAM_MIN + len(previous)
        for place in range(first, min(len(tokens), first + ENTERED_MAX)):
            head = hash(tuple(tokens[place - NGRAM_MIN : place])) % len(heads)
            previous.append(heads[head])
            heads[head] = place

    def _latest_like(self, tokens: Sequence[int]) -> int:
        """Return the place with the most equal tokens before it, or 0 if there is none. Of several such places, the
        latest is returned.
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
    """Return how many tokens before both places are equal, NGRAM_MAX at most."""
    count = 0
    while count < min(NGRAM_MAX, place) and tokens[place - 1 - count] == tokens[end - 1 - count]:
        count += 1
    return count


ACCEPTANCE_FIRST = 0.7  # first acceptance rate, high enough that drafts are tried
LEARNING_RATE = 0.1  # weight of one verified draft token


class ModelDraft:
    """State of one request's drafts by a draft model: how far the draft model's KV reaches, and its last proposal.

    The draft model keeps its KV in the same blocks as the model, so it needs no blocks of its own. Tokens that it has
    not computed are computed later or never. A draft costs only time.

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
