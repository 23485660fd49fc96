"""Makes the grammars of forced calls, and of optional calls of strict tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trioserve.contracts.structured_output import FormKind, StructuredOutput
from trioserve.text.response_parsers.call_format import CallFormat, JsonOf, without_trigger
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.response_parsers.lark_grammar import LarkGrammar
from trioserve.text.response_parsers.offered_tools import OfferedTool

__all__ = ["calls_or_json", "forced_calls", "strict_calls"]

_LINE_BREAKS = r"/[ \n]{0,4}/"  # after reasoning


def forced_calls(
    tool_family: str,
    tools: Sequence[OfferedTool],
    *,
    may_repeat: bool,
    special_token_ids: Mapping[str, int],
    reasoning_family: str | None = None,
    begins_inside: bool | None = None,
) -> StructuredOutput:
    """Return the grammar of a response that only calls tools, after its reasoning. The family's parser reads the calls.

    Args:
        tool_family: Family in whose format the calls are written.
        tools: Tools that may be called. For a named tool, only this tool.
        may_repeat: True if the response may have several calls.
        special_token_ids: Special tokens of the vocabulary, by their text.
        reasoning_family: Family in whose format reasoning is written, or None for a model without reasoning.
        begins_inside: True if the prompt has opened reasoning, False if it has ended it. None if the response may open
            it.
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
    return StructuredOutput(kind=FormKind.TOOL_CALLS, source=lark.source(start), free_until=free_until, param="tools")


def _calls(
    lark: LarkGrammar, call_format: CallFormat, tools: Sequence[OfferedTool], *, may_repeat: bool, trigger: str = ""
) -> str:
    """Return the expression for one call, or for several.

    Args:
        trigger: Text that the response has already written: the beginning of all calls, or of the first call.
    """
    one = lark.any_of([call_format.call(tool) for tool in tools])
    more = "" if call_format.separator is None or not may_repeat else _further_calls(lark, call_format.separator, one)
    opening = call_format.opening.removeprefix(trigger)
    if trigger and not call_format.opening:
        one = lark.any_of([without_trigger(call_format.call(tool), trigger) for tool in tools])
    return " ".join(filter(None, (lark.text(opening), one, more, lark.text(call_format.closing))))


def _further_calls(lark: LarkGrammar, separator: str, one: str) -> str:
    """Return the expression for further calls. A separator does not commit the model to another call.

    Models often write a line break after their last call. If only a call could follow the line break, such a model
    could never end its response. The parsers of all families ignore a separator without a call after it.
    """
    between = lark.text(separator)
    if not between:
        return f"{one}*"
    # Use the same texts as between two calls, since the lexer takes the longest text that any rule allows.
    last = " | ".join(lark.text(text) for text in dict.fromkeys((separator, separator.rstrip())) if text)
    return f"({between} {one})* ({last})?"
