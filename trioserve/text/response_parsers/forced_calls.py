"""Makes the grammars of forced calls, and of optional calls of strict tools, from the pieces of call formats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trioserve.contracts.structured_output import SchemaKind, StructuredOutput
from trioserve.text.response_parsers.call_format import (
    AnyOf,
    CallFormat,
    JsonOf,
    Maybe,
    Piece,
    RawUntil,
    without_trigger,
)
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.response_parsers.offered_tools import OfferedTool

__all__ = ["LarkGrammar", "calls_or_json", "forced_calls", "strict_calls"]

# Schemas use the JSON style of Python's json module, which models know. If any white space were allowed, a model could
# write white space forever.
_JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LarkGrammar:
    """Collects the rules of a grammar.

    Args:
        special_token_ids: Special tokens of the vocabulary, by their text. No text in a grammar matches a special
            token. So the spelling of a special token in a text becomes the token itself.
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
            attributes: Attributes after the rule's name, such as "[lazy]".
            is_terminal: True to make the rule a terminal.
        """
        name = f"{'T' if is_terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def sequence(self, pieces: Sequence[Piece]) -> str:
        return " ".join(filter(None, map(self.piece, pieces)))

    def piece(self, piece: Piece) -> str:
        """Return an expression for a piece, or "" for an empty text. Spaces can join expressions.

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
        """Return an expression for any text up to and including the first `stop`. Any special token also ends the text.

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


_LINE_BREAKS = r"/[ \n]{0,4}/"  # White space between reasoning and calls.


def forced_calls(
    tool_family: str,
    tools: Sequence[OfferedTool],
    *,
    may_repeat: bool,
    special_token_ids: Mapping[str, int],
    reasoning_family: str | None = None,
    begins_inside: bool | None = None,
) -> StructuredOutput:
    """Return the grammar of a response that has only calls after its reasoning. The family's parser can read the calls.

    Args:
        tool_family: Family in whose format the calls are written.
        tools: Tools that may be called. For a named tool, only this tool.
        may_repeat: True if the response may have several calls.
        special_token_ids: Special tokens of the vocabulary, by their text.
        reasoning_family: Family in whose format reasoning is written, or None for a model without reasoning.
        begins_inside: True if the prompt has opened reasoning, False if the prompt has ended reasoning. None if the
            response may open reasoning.
    """
    call_format = TOOL_FAMILIES[tool_family].format_for(special_token_ids)
    lark = LarkGrammar(special_token_ids)
    start = _calls(lark, call_format, tools, may_repeat=may_repeat)
    if call_format.before:
        start = f"({lark.sequence(call_format.before)})? {start}"
    if reasoning_family is None or begins_inside is False or TOOL_FAMILIES[tool_family].whole is not None:
        return _structured(lark, start)
    tags = REASONING_FAMILIES[reasoning_family].tags
    if begins_inside or (begins_inside is None and tags.begins_inside):
        start = f"{lark.rule(_LINE_BREAKS, is_terminal=True)} {start}"
        return _structured(lark, start, free_until=tags.closing[0])
    reasoning = f"{lark.text(tags.opening[0])} {lark.raw_until(tags.closing[0])} {_LINE_BREAKS}"
    return _structured(lark, f"({reasoning})? {start}")


def strict_calls(
    tool_family: str, tools: Sequence[OfferedTool], *, may_repeat: bool, special_token_ids: Mapping[str, int]
) -> StructuredOutput | None:
    """Return the grammar of a response that may call tools. The arguments of each call follow the tool's schema.

    Args:
        tool_family: Family in whose format the calls are written.
        tools: Tools that may be called.
        may_repeat: True if the response may have several calls.
        special_token_ids: Special tokens of the vocabulary, by their text.

    Returns:
        The grammar. None if no tool is strict, or if no text of the family's format announces a call.
    """
    call_format = TOOL_FAMILIES[tool_family].format_for(special_token_ids)
    if not call_format.trigger or not any(tool.strict for tool in tools):
        return None
    lark = LarkGrammar(special_token_ids)
    before = lark.raw_until(call_format.trigger)
    calls = _calls(lark, call_format, tools, may_repeat=may_repeat, trigger=call_format.trigger)
    repeat = "*" if may_repeat else "?"
    start = f"({before} {calls}){repeat} {lark.any_text()}"
    return _structured(lark, start)


def calls_or_json(
    tool_family: str,
    tools: Sequence[OfferedTool],
    schema: JsonOf,
    *,
    may_repeat: bool,
    special_token_ids: Mapping[str, int],
) -> StructuredOutput:
    """Return the grammar of a response that is either calls or JSON that a schema accepts.

    Args:
        tool_family: Family in whose format the calls are written.
        tools: Tools that may be called.
        schema: The schema.
        may_repeat: True if the response may have several calls.
        special_token_ids: Special tokens of the vocabulary, by their text.
    """
    lark = LarkGrammar(special_token_ids)
    calls = _calls(lark, TOOL_FAMILIES[tool_family].format_for(special_token_ids), tools, may_repeat=may_repeat)
    return _structured(lark, f"({calls}) | {lark.json(schema)}")


def _structured(lark: LarkGrammar, start: str, *, free_until: str = "") -> StructuredOutput:
    return StructuredOutput(kind=SchemaKind.TOOL_CALLS, source=lark.source(start), free_until=free_until, param="tools")


def _calls(
    lark: LarkGrammar, call_format: CallFormat, tools: Sequence[OfferedTool], *, may_repeat: bool, trigger: str = ""
) -> str:
    """Return the expression for one call, or for several.

    Args:
        trigger: Text that the response has already written: the beginning of the first call, or of the text before all
            calls.
    """
    one = lark.any_of([call_format.call(tool) for tool in tools])
    more = "" if call_format.separator is None or not may_repeat else _further_calls(lark, call_format.separator, one)
    opening = call_format.opening.removeprefix(trigger)
    if trigger and not call_format.opening:
        one = lark.any_of([without_trigger(call_format.call(tool), trigger) for tool in tools])
    return " ".join(filter(None, (lark.text(opening), one, more, lark.text(call_format.closing))))


def _further_calls(lark: LarkGrammar, separator: str, one: str) -> str:
    """Return the expression for further calls. A separator need not be followed by a call.

    Models often write a line break after their last call. If only a call could follow the line break, such a model
    could never end its response. The parsers of all families ignore a separator without a call after it.
    """
    between = lark.text(separator)
    if not between:
        return f"{one}*"
    # The last separator is one of the texts between two calls, since the lexer prefers the longest text that any rule
    # allows.
    last = " | ".join(lark.text(text) for text in dict.fromkeys((separator, separator.rstrip())) if text)
    return f"({between} {one})* ({last})?"
