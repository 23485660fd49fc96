"""Which parser a request gets: the families by name, chosen by hand or from the chat template's text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trioserve.contracts.errors import InvalidRequest
from trioserve.text.response_parsers.content_script import ContentScript
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES, ToolFamily
from trioserve.text.response_parsers.offered_tools import OfferedTool, tools_by_name
from trioserve.text.response_parsers.part_sink import PartSink
from trioserve.text.response_parsers.scripted_parser import RunningScript, ScriptedParser
from trioserve.text.response_parsers.template_signs import families_of_template
from trioserve.text.response_parsers.text_source import TextSource
from trioserve.text.response_parsers.thought_script import ThoughtScript
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
        tool_family: a name in TOOL_FAMILIES. None: the text is not searched for calls.
        reasoning_family: a name in REASONING_FAMILIES. None: the text is not searched for reasoning.
        tools: those that the model may call. Without any, nothing is a call.
        begins_inside: whether the prompt has opened reasoning (PromptReasoning). None: as is usual in the family.
        is_lenient: bare and fenced JSON are calls, too, if the response has nothing but calls. Formats with channels
            ignore it.
    """
    offered = tools_by_name(tools)
    thoughts = REASONING_FAMILIES[reasoning_family] if reasoning_family is not None else None
    if thoughts is not None and thoughts.channels is not None:
        tool_family = thoughts.channels
    family = TOOL_FAMILIES[tool_family] if tool_family is not None else None
    sink = PartSink()
    if family is not None and family.whole is not None:
        source = TextSource()
        whole = RunningScript(source, family.whole(source, sink, offered, begins_inside))
        return ScriptedParser(sink, [whole], pass_on=whole.push)
    scripts: list[RunningScript] = []
    push, may_begin = sink.content, _always
    if family is not None and (offered or (thoughts is not None and thoughts.channels is not None)):
        content, running = _content_script(family, sink, offered, is_lenient=is_lenient)
        scripts.append(running)
        push = running.push

        def may_begin() -> bool:
            running.flush()
            return content.is_in_content

    if thoughts is not None:
        source = TextSource()
        begins = True if begins_inside is None and thoughts.tags.begins_inside else begins_inside
        script = ThoughtScript(
            source,
            sink,
            thoughts.tags,
            begins_inside=begins,
            ended_by=family.ends_thoughts if family is not None and offered else (),
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
    """The families that two settings mean: a name, "auto" or "none". Raises InvalidRequest for an unknown name, with
    those that are known."""
    told = families_of_template(template or "")
    settings = (
        ("tool_call_parser", tool_family, told[0], TOOL_FAMILIES),
        ("reasoning_parser", reasoning_family, told[1], REASONING_FAMILIES),
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
