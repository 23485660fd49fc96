"""Finds out from a prompt's tokens whether reasoning is open where the response begins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["PromptReasoning"]

_END_TOKENS = 64  # tokens to read of a prompt without control tokens; a marker and white space are shorter


class PromptReasoning:
    """Finds the last reasoning marker in the last turn of a prompt.

    If the vocabulary writes a marker with control tokens, the marker is compared by token ids. So the same characters
    in a message are not a marker. If another control token follows a marker, the marker belongs to an earlier turn.

    Some vocabularies write a marker as text. Such a marker counts only in two places in the text after the last control
    token: at its beginning, at most after the name of a role, or at its end.

    Args:
        tokenizer: Tokenizer of the model.
        opening: Texts that begin reasoning in the model's family.
        closing: Texts that end reasoning in the model's family.

    Cost: begins_inside reads the tokens after the last control token. These are a handful unless the prompt ends inside
    of a message.
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

        Args:
            prompt_token_ids: Tokens of the prompt.

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
