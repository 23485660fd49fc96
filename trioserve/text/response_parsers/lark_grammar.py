"""Makes a grammar in llguidance's Lark dialect from the pieces of call formats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trioserve.text.response_parsers.call_format import AnyOf, JsonOf, Maybe, Piece, RawUntil

__all__ = ["LarkGrammar"]

# JSON in the style of Python's json module, which models know. If any white space were allowed, a model could write it
# forever.
_JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LarkGrammar:
    """Collects the rules of a grammar.

    Args:
        special_token_ids: Special tokens of the vocabulary, by their text. No text in a grammar matches them, so their
            spelling in a text becomes the token.
    """

    def __init__(self, special_token_ids: Mapping[str, int]) -> None:
        self._special = dict(special_token_ids)
        names = sorted(filter(None, self._special), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._rules: list[str] = []
        self._schemas: dict[str, str] = {}

    def source(self, start: str) -> str:
        """Return the whole grammar.

        Args:
            start: Expression of the start rule.
        """
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def rule(self, expression: str, *, attributes: str = "", is_terminal: bool = False) -> str:
        """Add a rule and return its name.

        Args:
            expression: Right side of the rule.
            attributes: Attributes after its name, such as "[lazy]".
            is_terminal: True to make it a terminal.
        """
        name = f"{'T' if is_terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def sequence(self, pieces: Sequence[Piece]) -> str:
        return " ".join(filter(None, map(self.piece, pieces)))

    def piece(self, piece: Piece) -> str:
        """Return an expression for a piece, which can be joined to others by spaces. Empty for an empty text.

        Args:
            piece: The piece.
        """
        if isinstance(piece, str):
            return self.text(piece)
        if isinstance(piece, JsonOf):
            return self.json(piece)
        if isinstance(piece, RawUntil):
            return self.raw_until(piece.stop)
        if isinstance(piece, Maybe):
            return f"({self.sequence(piece.pieces)})?"
        assert isinstance(piece, AnyOf)
        return self.any_of(piece.choices)

    def any_of(self, choices: Sequence[Sequence[Piece]]) -> str:
        return self.rule(" | ".join(self.sequence(choice) or '""' for choice in choices))

    def text(self, text: str) -> str:
        parts = self._split.split(text) if self._split is not None else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def json(self, piece: JsonOf) -> str:
        schema: dict[str, Any] = {**piece.schema, "x-guidance": {**_JSON_STYLE, "lenient": not piece.is_strict}}
        text = json.dumps(schema)
        if text not in self._schemas:
            self._schemas[text] = self.rule(f"%json {text}")
        return self._schemas[text]

    def raw_until(self, stop: str) -> str:
        """Return an expression for any text up to and including the first `stop`. The text ends at any special token.

        Args:
            stop: The text.
        """
        before, token, after = self._at_special(stop)
        if not token:
            return self.rule(f"{self.any_text()} {self.text(stop)}", attributes="[lazy]")
        text = self.rule(rf"/(.|\n)*/ {self.text(before)}", is_terminal=True) if before else self.any_text()
        return " ".join(filter(None, (text, self.text(token), self.text(after))))

    def _at_special(self, text: str) -> tuple[str, str, str]:
        """Split a text at its first special token.

        Return the text before the token, the token, and the text after it.
        """
        parts = self._split.split(text, maxsplit=1) if self._split is not None else [text]
        return (parts[0], parts[1], parts[2]) if len(parts) == 3 else (text, "", "")

    def any_text(self) -> str:
        return self.rule(r"/(.|\n)*/", is_terminal=True)
