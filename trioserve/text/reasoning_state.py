"""State of a response's reasoning: whether the prompt opens it, where it ends, and when its end is forced."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trioserve.contracts.sampling import Thinking

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["PromptReasoning", "TextFinder", "ReasoningState", "ReasoningPhase"]

# Number of last tokens to read of a prompt without control tokens. A marker with white space is shorter.
_END_TOKENS = 64


class PromptReasoning:
    """Finds the last reasoning marker in the last turn of a prompt.

    If a marker consists of control tokens in the vocabulary, the marker is compared by token ids. So the same
    characters in a message are not a marker. If another control token follows a marker, the marker belongs to an
    earlier turn.

    In other vocabularies, a marker is ordinary text. Such a marker counts only in the text after the last control
    token, either at the end of this text or at its beginning, where only the name of a role may precede the marker.

    Args:
        tokenizer: Tokenizer of the model.
        opening: Texts that begin reasoning in the model's family.
        closing: Texts that end reasoning in the model's family.

    Cost: begins_inside reads only the tokens after the last control token, usually a handful. A prompt that ends inside
        of a message has more.
    """

    def __init__(self, tokenizer: Tokenizer, *, opening: Sequence[str], closing: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._control_markers: list[tuple[tuple[int, ...], int, bool]] = []
        control_ids = set(tokenizer.special_token_ids)
        texts: dict[bool, list[str]] = {True: [], False: []}
        for opens, markers in ((True, opening), (False, closing)):
            for marker in markers:
                token_ids = tuple(tokenizer.encode(marker.strip() or marker, add_special_tokens=False))
                added = [place for place, token_id in enumerate(token_ids) if tokenizer.is_added(token_id)]
                if added:
                    self._control_markers.append((token_ids, added[-1], opens))
                    control_ids.update(token_ids[place] for place in added)
                else:
                    texts[opens].append(marker.strip() or marker)
        self._control_ids = frozenset(control_ids)
        self._openings, self._closings = tuple(texts[True]), tuple(texts[False])
        markers = "|".join(map(re.escape, (*self._openings, *self._closings)))
        self._begins_turn = re.compile(rf"\s*+\w*\s*(?:{markers})") if markers else None

    def begins_inside(self, prompt_token_ids: Sequence[int]) -> bool | None:
        """Find out whether reasoning is open at the end of a prompt.

        Returns:
            True if reasoning is open, False if it has ended. None if the last turn of the prompt has no marker.
        """
        control_ids = self._control_ids
        for place in range(len(prompt_token_ids) - 1, -1, -1):
            if prompt_token_ids[place] in control_ids:
                break
        else:
            return self._at_text_end(self._text(prompt_token_ids[-_END_TOKENS:]))
        for marker, last_added, opens in self._control_markers:
            start = place - last_added
            if start >= 0 and tuple(prompt_token_ids[start : start + len(marker)]) == marker:
                return opens
        return self._in_turn_text(self._text(prompt_token_ids[place + 1 :]))

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._begins_turn is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _in_turn_text(self, text: str) -> bool | None:
        if self._begins_turn is None or self._begins_turn.match(text) is None:
            return self._at_text_end(text)
        return not any(closing in text for closing in self._closings)

    def _at_text_end(self, text: str) -> bool | None:
        text = text.rstrip()
        if self._openings and text.endswith(self._openings):
            return True
        return False if self._closings and text.endswith(self._closings) else None


class TextFinder:
    """Searches a text that arrives in pieces for a wanted text. Immutable: `after` returns a new finder.

    Args:
        wanted: The text to find.
        tail: End of the text so far that may contain the beginning of `wanted`.
        is_found: True if the text was found.
        rest: Text after `wanted` in the piece that completed `wanted`.
    """

    __slots__ = ("_tail", "_wanted", "is_found", "rest")

    def __init__(self, wanted: bytes, tail: bytes = b"", *, is_found: bool = False, rest: bytes = b"") -> None:
        self._wanted = wanted
        self._tail = tail
        self.is_found = is_found
        self.rest = rest

    def after(self, piece: bytes) -> TextFinder:
        """Return the finder after one more piece. Do not call this method after the text was found."""
        text = self._tail + piece
        place = text.find(self._wanted)
        if place >= 0:
            return TextFinder(self._wanted, is_found=True, rest=text[place + len(self._wanted) :])
        kept = len(self._wanted) - 1
        return TextFinder(self._wanted, text[-kept:] if kept else b"")

    @property
    def is_begun(self) -> bool:
        """True if the text so far ends with a proper prefix of the wanted text."""
        return any(self._tail.endswith(self._wanted[:count]) for count in range(1, len(self._wanted)))


class ReasoningPhase(enum.Enum):
    BEFORE = "before"  # The text so far consists of white space and possibly a part of the opening tag.
    INSIDE = "inside"
    ENDING = "ending"  # The tokens of the closing tag are forced now.
    OVER = "over"  # Reasoning has ended, or the response has none.


class ReasoningState:
    """State of the reasoning of one response. Immutable: `after` returns the state after one more token.

    Attributes:
        phase: Current phase of the response.
        end_token_ids: Tokens that are forced to end reasoning.
        token_count: Tokens of reasoning so far.
        ending_count: Number of forced tokens of `end_token_ids` so far.
    """

    __slots__ = ("_begin", "_end", "_limits", "_start", "end_token_ids", "ending_count", "phase", "token_count")

    def __init__(
        self,
        limits: Thinking,
        end_token_ids: tuple[int, ...],
        *,
        phase: ReasoningPhase,
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
    def after_prompt(
        cls, limits: Thinking, end_token_ids: tuple[int, ...], *, begins_inside: bool | None
    ) -> ReasoningState:
        """Make the state for the beginning of a response.

        Args:
            limits: Opening and closing tag, and the token limit of the reasoning.
            end_token_ids: Tokens of the closing tag.
            begins_inside: True if the prompt has opened reasoning, False if the prompt has ended reasoning, None if the
                prompt has no marker. PromptReasoning.begins_inside returns this value.
        """
        if begins_inside is False:
            phase = ReasoningPhase.OVER
        elif limits.begin.strip() and not begins_inside:
            phase = ReasoningPhase.BEFORE
        else:
            phase = ReasoningPhase.ENDING if limits.tokens_max == 0 else ReasoningPhase.INSIDE
        return cls(limits, end_token_ids, phase=phase)

    @property
    def end_text(self) -> str:
        """The request's text that ends reasoning."""
        return self._limits.end

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens that must follow now, empty if the end is not forced."""
        return self.end_token_ids[self.ending_count :] if self.phase is ReasoningPhase.ENDING else ()

    def may_end_within(self, count: int) -> bool:
        """Return True if the end of reasoning may have to be forced within the next tokens.

        Args:
            count: Number of the next tokens.
        """
        if self.phase is ReasoningPhase.OVER:
            return False
        tokens_max = self._limits.tokens_max
        return self.phase is ReasoningPhase.ENDING or (
            tokens_max is not None and self.token_count + count >= tokens_max
        )

    def after(self, token_id: int, piece: bytes, *, is_end_due: bool) -> ReasoningState:
        """Return the state after one more token.

        Args:
            piece: Bytes of the token.
            is_end_due: True to end reasoning now, even if its token limit is not reached.
        """
        if self.phase is ReasoningPhase.OVER:
            return self
        if self.phase is ReasoningPhase.ENDING:
            end = self._end.after(piece)
            if end.is_found:
                return self._with(phase=ReasoningPhase.OVER)
            # A token that was sampled before the end was forced still belongs to the reasoning.
            ending_count = self.ending_count + 1 if token_id == self.end_token_ids[self.ending_count] else 0
            if ending_count == len(self.end_token_ids):
                return self._with(phase=ReasoningPhase.OVER)
            return self._with(phase=ReasoningPhase.ENDING, end=end, ending_count=ending_count)
        if self.phase is ReasoningPhase.BEFORE:
            start = (self._start + piece).lstrip()
            if start.startswith(self._begin):
                return self._with(phase=self._inside_or_ending(is_end_due=is_end_due))
            is_possible = self._begin.startswith(start)
            return self._with(phase=ReasoningPhase.BEFORE if is_possible else ReasoningPhase.OVER, start=start)
        end = self._end.after(piece)
        if end.is_found:
            return self._with(phase=ReasoningPhase.OVER)
        token_count = self.token_count + 1
        phase = ReasoningPhase.INSIDE
        if not end.is_begun:  # Force nothing while the model writes the closing tag itself.
            phase = self._inside_or_ending(is_end_due=is_end_due, token_count=token_count)
        return self._with(phase=phase, end=end, token_count=token_count)

    def _inside_or_ending(self, *, is_end_due: bool, token_count: int = 0) -> ReasoningPhase:
        tokens_max = self._limits.tokens_max
        is_spent = tokens_max is not None and token_count >= tokens_max
        return ReasoningPhase.ENDING if is_spent or is_end_due else ReasoningPhase.INSIDE

    def _with(
        self,
        *,
        phase: ReasoningPhase,
        start: bytes = b"",
        end: TextFinder | None = None,
        token_count: int | None = None,
        ending_count: int = 0,
    ) -> ReasoningState:
        return ReasoningState(
            self._limits,
            self.end_token_ids,
            phase=phase,
            start=start,
            end=end or self._end,
            token_count=self.token_count if token_count is None else token_count,
            ending_count=ending_count,
        )
