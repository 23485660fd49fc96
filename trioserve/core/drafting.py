"""Drafts the next tokens of a request from its own text: what followed the last time its latest tokens stood there.

This is prompt lookup decoding (Apoorv Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding), known as the ngram
speculator of vLLM and as prompt_lookup_num_tokens of transformers. A draft token is only ever computed beside the real
next token, which tells whether it was right; so what is drafted here changes how fast a response comes, and nothing of
it.

Others search the whole text again for every draft. Here earlier places are found as deflate finds them (RFC 1951,
section 4): every place is entered once, under a hash of the tokens before it, in a chain that starts with the latest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["Drafter"]

NGRAM_MIN = 3  # tokens that have to be equal; two are equal by chance far too often
NGRAM_MAX = 8  # beyond this, one place is as good as another
PLACES_MAX = 16  # looked at for a draft; the latest ones
ENTERED_MAX = 512  # places for a draft: a long prompt is entered in the course of its first tokens, not all at once
HEADS_MAX = 2**14
LENGTH_FIRST = 4  # tokens of a draft, before anything is known of a request
PAUSE_MAX = 32  # tokens without a draft, where drafts are wrong


class Drafter:
    """One request's. Takes four bytes a token of its text, and at most as much again for the chains' heads.

    draft_tokens_max: of one draft. tokens_max: how long the text can become.
    """

    __slots__ = ("_draft_tokens_max", "_heads", "_length", "_pause", "_pause_next", "_previous")

    def __init__(self, draft_tokens_max: int, tokens_max: int) -> None:
        head_count = min(HEADS_MAX, 1 << tokens_max.bit_length())
        self._draft_tokens_max = draft_tokens_max
        # A place is the index of the token after NGRAM_MIN others; 0, which is none, ends a chain.
        self._heads = array("i", bytes(4 * head_count))
        self._previous = array("i")  # by place, from NGRAM_MIN on: the one before it in its chain
        self._length = min(LENGTH_FIRST, draft_tokens_max)
        self._pause = 0
        self._pause_next = 1

    def draft(self, tokens: Sequence[int], count_max: int) -> tuple[int, ...]:
        """At most so many draft tokens for what follows `tokens`; often none. tokens: as in the last call, and more."""
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
        # Text that repeats itself runs on into its own repetition.
        while len(draft_tokens) < count:
            draft_tokens.append(draft_tokens[place - end])
        return tuple(draft_tokens)

    def learn(self, drafted_count: int, accepted_count: int) -> None:
        """So many of the draft tokens of the last draft were right. Right ones are followed by longer drafts, wrong
        ones by shorter ones, then by pauses, each twice as long as the one before."""
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
        """The places that something follows, as far as they are not entered yet."""
        heads, previous = self._heads, self._previous
        first = NGRAM_MIN + len(previous)
        for place in range(first, min(len(tokens), first + ENTERED_MAX)):
            head = hash(tuple(tokens[place - NGRAM_MIN : place])) % len(heads)
            previous.append(heads[head])
            heads[head] = place

    def _latest_like(self, tokens: Sequence[int]) -> int:
        """The place with the most equal tokens before it, among equals the latest; 0 if there is none."""
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
    """How many tokens before both are equal, NGRAM_MAX at most."""
    count = 0
    while count < min(NGRAM_MAX, place) and tokens[place - 1 - count] == tokens[end - 1 - count]:
        count += 1
    return count
