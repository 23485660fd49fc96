"""Restrains the response to a chat: the schema of its content, forced and strict calls, and the length of reasoning.

The grammars of forced calls, and of optional calls of strict tools, are made from call formats (call_format.py). A call
format is a list of pieces: fixed texts, and placeholders for JSON or other text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trioserve.contracts.arguments import to_bool
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.sampling import SamplingParams, Thinking
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
from trioserve.text.response_parsers.offered_tools import (
    OfferedTool,
    ToolChoice,
    ToolMode,
    checked_tools,
    offered_tools,
    tool_choice_of,
)
from trioserve.text.response_parsers.registry import ResponseFamilies

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["calls_or_json", "forced_calls", "restrained", "strict_calls", "with_tool_choice"]


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
        """Return the Lark expression of one piece of a call format. Expressions joined by spaces match in order.

        Args:
            piece: Fixed text, or a placeholder from call_format.py. Empty text gives "".
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
            stop: Text that ends the match.
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


def restrained(
    sampling: SamplingParams,
    families: ResponseFamilies,
    tokenizer: Tokenizer,
    *,
    tools: list[dict[str, Any]] | None,
    tool_choice: ToolChoice,
    structured: StructuredOutput | None,
    parallel_tool_calls: bool = True,
    reasoning_tokens_max: int | None = None,
) -> SamplingParams:
    """Add the restraints of a chat to sampling parameters: schema, forced or strict calls, and the limit of reasoning.

    If the model writes reasoning, schemas and calls begin after the reasoning. A call of end_reasoning can end the
    reasoning early, even if it has no limit.

    Args:
        sampling: Sampling parameters of the request.
        families: Formats in which the model writes reasoning and calls.
        tokenizer: Tokenizer of the model.
        tools: Checked tools that the model may call, or None.
        tool_choice: Calls that the request demands or forbids.
        structured: Required structure of the content, or None.
        parallel_tool_calls: True if the response may have several calls.
        reasoning_tokens_max: Token limit of the reasoning, or None for no limit.

    Raises:
        InvalidRequest: The model does not support the restraint, or the fields contradict each other.
    """
    restraint = _restraint(families, tokenizer, tools, tool_choice, structured, may_repeat=parallel_tool_calls)
    tags = families.reasoning_tags
    if restraint is not None and restraint is structured and families.content_begin is not None:
        restraint = msgspec.structs.replace(restraint, free_until=families.content_begin)
    elif restraint is not None and tags is not None and families.content_begin is None:
        restraint = msgspec.structs.replace(restraint, free_until=tags.closing[0])
    if tags is None:
        return sampling if restraint is None else msgspec.structs.replace(sampling, structured=restraint)
    thinking = sampling.thinking or Thinking(
        begin="" if tags.begins_inside else tags.opening[0],
        end=tags.closing[0],
        tokens_max=reasoning_tokens_max,
    )
    return msgspec.structs.replace(sampling, structured=restraint, thinking=thinking)


def with_tool_choice(
    prompt: Prompt,
    sampling: SamplingParams,
    families: ResponseFamilies,
    tokenizer: Tokenizer,
    tool_choice: object,
    strict: bool | None,
    *,
    parallel_tool_calls: bool = True,
) -> tuple[Prompt, SamplingParams]:
    """Apply the options for tool calls of a Python caller to a chat. Their meaning is the same as over HTTP.

    Nothing changes if both are None and no function is strict, or if the sampling parameters force calls already.

    Args:
        prompt: Any prompt. Only a ChatPrompt has tools.
        sampling: Sampling parameters of the request.
        families: Formats in which the model writes reasoning and calls.
        tokenizer: Tokenizer of the model.
        tool_choice: Value in OpenAI's format, or None.
        strict: Value for all functions, or None to use the value of each function.
        parallel_tool_calls: False if a forced or strict response may have only one call.

    Returns:
        The changed prompt and sampling parameters.

    Raises:
        InvalidRequest: The choice contradicts the prompt or its tools.
    """
    if strict is not None:
        to_bool("strict", strict)
    if not isinstance(prompt, ChatPrompt):
        if tool_choice is not None or strict is not None:
            param = "strict" if tool_choice is None else "tool_choice"
            raise InvalidRequest(f"{param} is for tools, and the prompt is not a ChatPrompt: omit it", param=param)
        return prompt, sampling
    tools, structured = prompt.tools, sampling.structured
    if structured is not None and structured.kind is SchemaKind.TOOL_CALLS:
        return prompt, sampling
    if tool_choice is None and strict is None and not any(map(_is_strict, tools or ())):
        return prompt, sampling
    checked = checked_tools(None if tools is None else list(tools))
    if checked is not None and strict is not None:
        checked = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in checked]
    choice = tool_choice_of(tool_choice, checked)
    restrained_sampling = restrained(
        sampling,
        families,
        tokenizer,
        tools=None if choice.mode is ToolMode.NONE else choice.shown(checked),
        tool_choice=choice,
        structured=structured,
        parallel_tool_calls=parallel_tool_calls,
    )
    # The template gets the unchanged tools of the caller, since some templates print all fields of a tool.
    return msgspec.structs.replace(prompt, tools=choice.shown(tools and list(tools))), restrained_sampling


def _is_strict(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def _restraint(
    families: ResponseFamilies,
    tokenizer: Tokenizer,
    offered: list[dict[str, Any]] | None,
    choice: ToolChoice,
    structured: StructuredOutput | None,
    *,
    may_repeat: bool,
) -> StructuredOutput | None:
    """Return the required structure of the response after the reasoning, or None if every text is allowed."""
    if not offered:
        return structured
    tools = offered_tools(offered)
    mode = choice.mode
    if mode is ToolMode.NAMED:
        tools = [tool for tool in tools if tool.name == choice.name]
    is_forced = mode in (ToolMode.REQUIRED, ToolMode.NAMED)
    if not tools or not (is_forced or structured is not None or any(tool.strict for tool in tools)):
        return structured
    family = families.tool_family
    if family is None:
        if not is_forced:
            return structured
        raise InvalidRequest(
            "a call cannot be forced, since this server reads no calls from responses (--tool-call-parser none): "
            'send tool_choice "auto" or "none"',
            param="tool_choice",
        )
    special_token_ids = tokenizer.special_ids()
    may_repeat = may_repeat and mode is not ToolMode.NAMED
    try:
        if is_forced:
            return forced_calls(
                family,
                tools,
                may_repeat=may_repeat,
                special_token_ids=special_token_ids,
                reasoning_family=families.reasoning_family,
                begins_inside=True,
            )
        if families.content_begin is not None:
            _check_channels(structured)
            return None
        if structured is None:
            return strict_calls(family, tools, may_repeat=may_repeat, special_token_ids=special_token_ids)
        schema = JsonOf(_schema_of(structured), structured.strict)
        return calls_or_json(family, tools, schema, may_repeat=may_repeat, special_token_ids=special_token_ids)
    except InvalidRequest as error:
        if error.param != "tools":
            raise
        raise InvalidRequest(
            f"the schemas of the tools are too long to be enforced: {error}; send fewer tools, or shorter schemas",
            param="tools",
        ) from None


def _check_channels(structured: StructuredOutput | None) -> None:
    """Refuse a schema for the content, since a model with channels itself chooses the channel of its next message."""
    if structured is not None:
        raise InvalidRequest(
            f"{structured.param} and tools are both set: this model's responses can follow a schema or have calls, not "
            'both; send tool_choice "none" or "required", or only one of the two',
            param=structured.param,
        )


def _schema_of(structured: StructuredOutput) -> dict[str, Any]:
    """Return the JSON schema of structured output.

    Raises:
        InvalidRequest: The structured output is not JSON.
    """
    if structured.kind is SchemaKind.JSON_OBJECT:
        return {"type": "object"}
    if structured.kind is not SchemaKind.JSON_SCHEMA:
        raise InvalidRequest(
            f"{structured.param} asks for a {structured.kind.value}, and there are tools: a response with tools can be "
            'unrestrained or JSON; send tool_choice "none", or only one of the two',
            param=structured.param,
        )
    schema = json.loads(structured.source)
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param=structured.param)
    return schema
