"""Makes the parser of a response for two families, which options name or the chat template shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trioserve.contracts.errors import InvalidRequest
from trioserve.text.response_parsers.content_script import ContentScript
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES, ToolFamily
from trioserve.text.response_parsers.offered_tools import OfferedTool, tools_by_name
from trioserve.text.response_parsers.part_sink import PartSink
from trioserve.text.response_parsers.reasoning_script import ReasoningScript
from trioserve.text.response_parsers.scripted_parser import RunningScript, ScriptedParser
from trioserve.text.response_parsers.template_signs import families_of_template
from trioserve.text.response_parsers.text_source import TextSource
from trioserve.text.response_parts import ResponseParser

__all__ = [
    "AUTO",
    "NONE",
    "make_response_parser",
    "named_families",
]

AUTO: Final = "auto"
NONE: Final = "none"


def make_response_parser(
    tool_family: str | None,
    reasoning_family: str | None,
    *,
    tools: Iterable[OfferedTool] = (),
    begins_inside: bool | None = None,
    is_lenient: bool = False,
) -> ResponseParser:
    """Make the parser for one choice.

    Args:
        tool_family: Name in TOOL_FAMILIES, or None to find no calls.
        reasoning_family: Name in REASONING_FAMILIES, or None to find no reasoning.
        tools: Tools that the model may call. Without tools, nothing is a call.
        begins_inside: True if the prompt has opened reasoning, False if it has ended it, as PromptReasoning returns.
            None to use the default of the family.
        is_lenient: True to accept JSON calls without marks, if the response consists of calls alone. Formats with
            channels ignore this.
    """
    offered = tools_by_name(tools)
    reasoning = REASONING_FAMILIES[reasoning_family] if reasoning_family is not None else None
    if reasoning is not None and reasoning.channels is not None:
        tool_family = reasoning.channels
    family = TOOL_FAMILIES[tool_family] if tool_family is not None else None
    sink = PartSink()
    if family is not None and family.whole is not None:
        source = TextSource()
        whole = RunningScript(source, family.whole(source, sink, offered, begins_inside))
        return ScriptedParser(sink, [whole], pass_on=whole.push)
    scripts: list[RunningScript] = []
    push, may_begin = sink.content, _always
    if family is not None and (offered or (reasoning is not None and reasoning.channels is not None)):
        content, running = _content_script(family, sink, offered, is_lenient=is_lenient)
        scripts.append(running)
        push = running.push

        def may_begin() -> bool:
            running.flush()
            return content.is_in_content

    if reasoning is not None:
        source = TextSource()
        begins = True if begins_inside is None and reasoning.tags.begins_inside else begins_inside
        script = ReasoningScript(
            source,
            sink,
            reasoning.tags,
            begins_inside=begins,
            ended_by=family.ends_reasoning if family is not None and offered else (),
            push=push,
            may_begin=may_begin,
        )
        scripts.insert(0, RunningScript(source, script.run()))
        push = scripts[0].push
    return ScriptedParser(sink, scripts, pass_on=push)


def _content_script(
    family: ToolFamily, sink: PartSink, offered: dict[str, OfferedTool], *, is_lenient: bool
) -> tuple[ContentScript, RunningScript]:
    source = TextSource()
    content = ContentScript(
        source,
        sink,
        offered,
        family.readers,
        line_readers=family.line_readers if offered else None,
        first_readers=family.first_readers if offered else None,
        drops_space=family.drops_space,
        has_channels=family.has_channels,
        is_lenient=is_lenient,
    )
    return content, RunningScript(source, content.run())


def _always() -> bool:
    return True


def named_families(tool_family: str, reasoning_family: str, template: str | None) -> tuple[str | None, str | None]:
    """Return the families of tool calls and reasoning that two options mean.

    Args:
        tool_family: A name in TOOL_FAMILIES, "auto" or "none".
        reasoning_family: A name in REASONING_FAMILIES, "auto" or "none".
        template: Text of the chat template, which determines the family for "auto". None if there is no template.

    Returns:
        Both names. None for "none", or if "auto" detects no family.

    Raises:
        InvalidRequest: A name is not known. The message lists the known names.
    """
    detected = families_of_template(template or "")
    settings = (
        ("tool_call_parser", tool_family, detected[0], TOOL_FAMILIES),
        ("reasoning_parser", reasoning_family, detected[1], REASONING_FAMILIES),
    )
    chosen: list[str | None] = []
    for setting, name, of_template, known in settings:
        if name == AUTO:
            chosen.append(of_template)
        elif name == NONE:
            chosen.append(None)
        elif name in known:
            chosen.append(name)
        else:
            names = ", ".join(sorted(known))
            raise InvalidRequest(f"{setting} is {name!r}, known are auto, none, {names}", param=setting)
    return chosen[0], chosen[1]
