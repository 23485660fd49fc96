"""The grammars that force calls: of any tool, of one, or, where a call is free, that those of strict tools fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trioserve.contracts.structured_output import FormKind, StructuredOutput
from trioserve.text.response_parsers.call_forms import CallForm, JsonOf, without_trigger
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.response_parsers.lark_grammar import LarkGrammar
from trioserve.text.response_parsers.offered_tools import OfferedTool

__all__ = ["calls_or_json", "forced_calls", "strict_calls"]

_LINE_BREAKS = r"/[ \n]{0,4}/"  # behind a thought


def forced_calls(
    tool_family: str,
    tools: Sequence[OfferedTool],
    *,
    may_repeat: bool,
    special_token_ids: Mapping[str, int],
    reasoning_family: str | None = None,
    begins_inside: bool | None = None,
) -> StructuredOutput:
    """The form of a response that calls one of the tools, or, if may_repeat, one or more of them, and says nothing
    else but its thoughts. The family's parser reads the calls from it.

    tools: those that may be called; for a named one it alone. special_token_ids: the vocabulary's special tokens.
    begins_inside: whether the prompt has opened a thought (PromptReasoning); None: the response may open one.
    """
    form = TOOL_FAMILIES[tool_family].form_in(special_token_ids)
    lark = LarkGrammar(special_token_ids)
    start = _calls(lark, form, tools, may_repeat=may_repeat)
    if form.before:
        start = f"({lark.sequence(form.before)})? {start}"
    if reasoning_family is None or begins_inside is False or TOOL_FAMILIES[tool_family].whole is not None:
        return _form(lark, start)
    tags = REASONING_FAMILIES[reasoning_family].tags
    if begins_inside or (begins_inside is None and tags.begins_inside):
        start = f"{lark.rule(_LINE_BREAKS, is_terminal=True)} {start}"
        return _form(lark, start, free_until=tags.closing[0])
    thought = f"{lark.text(tags.opening[0])} {lark.raw_until(tags.closing[0])} {_LINE_BREAKS}"
    return _form(lark, f"({thought})? {start}")


def strict_calls(
    tool_family: str, tools: Sequence[OfferedTool], *, may_repeat: bool, special_token_ids: Mapping[str, int]
) -> StructuredOutput | None:
    """The form of a response that is free to call or not: where it begins a call, that is one of a tool, with
    arguments that its schema accepts. None if no tool is strict, or if nothing in the family's text tells that a call
    begins."""
    form = TOOL_FAMILIES[tool_family].form_in(special_token_ids)
    if not form.trigger or not any(tool.strict for tool in tools):
        return None
    lark = LarkGrammar(special_token_ids)
    before = lark.raw_until(form.trigger)
    calls = _calls(lark, form, tools, may_repeat=may_repeat, trigger=form.trigger)
    repeat = "*" if may_repeat else "?"
    start = f"({before} {calls}){repeat} {lark.any_text()}"
    return _form(lark, start)


def calls_or_json(
    tool_family: str,
    tools: Sequence[OfferedTool],
    schema: JsonOf,
    *,
    may_repeat: bool,
    special_token_ids: Mapping[str, int],
) -> StructuredOutput:
    """The form of a response that either calls tools or is JSON that the schema accepts."""
    lark = LarkGrammar(special_token_ids)
    calls = _calls(lark, TOOL_FAMILIES[tool_family].form_in(special_token_ids), tools, may_repeat=may_repeat)
    return _form(lark, f"({calls}) | {lark.json(schema)}")


def _form(lark: LarkGrammar, start: str, *, free_until: str = "") -> StructuredOutput:
    return StructuredOutput(kind=FormKind.TOOL_CALLS, source=lark.source(start), free_until=free_until, param="tools")


def _calls(
    lark: LarkGrammar, form: CallForm, tools: Sequence[OfferedTool], *, may_repeat: bool, trigger: str = ""
) -> str:
    """Write the rule for one call, or for several.

    Args:
        trigger: the text that the response has already written: the beginning of all calls, or of the first call.
    """
    one = lark.any_of([form.call(tool) for tool in tools])
    more = "" if form.separator is None or not may_repeat else _further_calls(lark, form.separator, one)
    opening = form.opening.removeprefix(trigger)
    if trigger and not form.opening:
        one = lark.any_of([without_trigger(form.call(tool), trigger) for tool in tools])
    return " ".join(filter(None, (lark.text(opening), one, more, lark.text(form.closing))))


def _further_calls(lark: LarkGrammar, separator: str, one: str) -> str:
    """Write the rule for further calls. A separator does not commit the model to another call.

    Models often write a line break after their last call. If only a call could follow the line break, such a model
    could never end its response. The parsers of all families ignore a separator that no call follows.
    """
    between = lark.text(separator)
    if not between:
        return f"{one}*"
    # The same texts as between two calls: the lexer takes the longest text that any rule allows.
    last = " | ".join(lark.text(text) for text in dict.fromkeys((separator, separator.rstrip())) if text)
    return f"({between} {one})* ({last})?"
