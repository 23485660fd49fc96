"""A thought while it is written: where it begins and ends in the text, and from when on its end is forced."""

from __future__ import annotations

import enum

from trioserve.contracts.thinking import Thinking

__all__ = ["TextFinder", "Thought", "ThoughtPhase"]


class TextFinder:
    """Looks for one text in a text that comes in pieces. Frozen: `after` gives another one.

    is_found: it was there. rest: what came behind it, in the piece that completed it.
    """

    __slots__ = ("_tail", "_wanted", "is_found", "rest")

    def __init__(self, wanted: bytes, tail: bytes = b"", *, is_found: bool = False, rest: bytes = b"") -> None:
        self._wanted = wanted
        self._tail = tail
        self.is_found = is_found
        self.rest = rest

    def after(self, piece: bytes) -> TextFinder:
        """Not to be asked when it was found."""
        text = self._tail + piece
        place = text.find(self._wanted)
        if place >= 0:
            return TextFinder(self._wanted, is_found=True, rest=text[place + len(self._wanted) :])
        kept = len(self._wanted) - 1
        return TextFinder(self._wanted, text[-kept:] if kept else b"")

    @property
    def is_begun(self) -> bool:
        """Whether the text so far ends with a beginning of it."""
        return any(self._tail.endswith(self._wanted[:count]) for count in range(1, len(self._wanted)))


class ThoughtPhase(enum.Enum):
    BEFORE = "before"  # nothing but white space and a part of the beginning has come
    INSIDE = "inside"
    ENDING = "ending"  # its end is forced
    OVER = "over"  # or there was none


class Thought:
    """Frozen: `after` gives the thought behind one more token. end_token_ids: the end, as it is forced. token_count:
    tokens inside so far. ending_count: tokens of the end that have come."""

    __slots__ = ("_begin", "_end", "_limits", "_start", "end_token_ids", "ending_count", "phase", "token_count")

    def __init__(
        self,
        limits: Thinking,
        end_token_ids: tuple[int, ...],
        *,
        phase: ThoughtPhase,
        start: bytes = b"",
        end: TextFinder | None = None,
        token_count: int = 0,
        ending_count: int = 0,
    ) -> None:
        self._limits = limits
        self._begin = limits.begin.strip().encode()
        self._end = TextFinder(limits.end.strip().encode() or limits.end.encode()) if end is None else end
        self._start = start
        self.end_token_ids = end_token_ids
        self.token_count = token_count
        self.ending_count = ending_count
        self.phase = phase

    @classmethod
    def behind_prompt(cls, limits: Thinking, end_token_ids: tuple[int, ...], *, begins_inside: bool | None) -> Thought:
        """Make the state at the beginning of a response.

        Args:
            begins_inside: what the prompt says (PromptReasoning.begins_inside).
        """
        if begins_inside is False:
            phase = ThoughtPhase.OVER
        elif limits.begin.strip() and not begins_inside:
            phase = ThoughtPhase.BEFORE
        else:
            phase = ThoughtPhase.ENDING if limits.tokens_max == 0 else ThoughtPhase.INSIDE
        return cls(limits, end_token_ids, phase=phase)

    @property
    def end_text(self) -> str:
        """As it was given."""
        return self._limits.end

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that must come now."""
        return self.end_token_ids[self.ending_count :] if self.phase is ThoughtPhase.ENDING else ()

    def may_end_within(self, count: int) -> bool:
        """Whether its end may have to be forced behind so many more tokens."""
        if self.phase is ThoughtPhase.OVER:
            return False
        tokens_max = self._limits.tokens_max
        return self.phase is ThoughtPhase.ENDING or (tokens_max is not None and self.token_count + count >= tokens_max)

    def after(self, token_id: int, piece: bytes, *, is_hurried: bool) -> Thought:
        """piece: the token's bytes. is_hurried: the thought is to be over now, whatever its budget."""
        if self.phase is ThoughtPhase.OVER:
            return self
        if self.phase is ThoughtPhase.ENDING:
            end = self._end.after(piece)
            if end.is_found:
                return self._with(phase=ThoughtPhase.OVER)
            # A token that was sampled ahead, before the end was forced, is one more of the thought.
            ending_count = self.ending_count + 1 if token_id == self.end_token_ids[self.ending_count] else 0
            if ending_count == len(self.end_token_ids):
                return self._with(phase=ThoughtPhase.OVER)
            return self._with(phase=ThoughtPhase.ENDING, end=end, ending_count=ending_count)
        if self.phase is ThoughtPhase.BEFORE:
            start = (self._start + piece).lstrip()
            if start.startswith(self._begin):
                return self._with(phase=self._inside_or_ending(is_hurried=is_hurried))
            is_possible = self._begin.startswith(start)
            return self._with(phase=ThoughtPhase.BEFORE if is_possible else ThoughtPhase.OVER, start=start)
        end = self._end.after(piece)
        if end.is_found:
            return self._with(phase=ThoughtPhase.OVER)
        token_count = self.token_count + 1
        phase = ThoughtPhase.INSIDE
        if not end.is_begun:  # otherwise it is about to end by itself
            phase = self._inside_or_ending(is_hurried=is_hurried, token_count=token_count)
        return self._with(phase=phase, end=end, token_count=token_count)

    def _inside_or_ending(self, *, is_hurried: bool, token_count: int = 0) -> ThoughtPhase:
        tokens_max = self._limits.tokens_max
        is_spent = tokens_max is not None and token_count >= tokens_max
        return ThoughtPhase.ENDING if is_spent or is_hurried else ThoughtPhase.INSIDE

    def _with(
        self,
        *,
        phase: ThoughtPhase,
        start: bytes = b"",
        end: TextFinder | None = None,
        token_count: int | None = None,
        ending_count: int = 0,
    ) -> Thought:
        return Thought(
            self._limits,
            self.end_token_ids,
            phase=phase,
            start=start,
            end=end or self._end,
            token_count=self.token_count if token_count is None else token_count,
            ending_count=ending_count,
        )
