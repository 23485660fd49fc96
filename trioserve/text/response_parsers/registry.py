"""Makes response parsers for a family of calls and a family of reasoning. Options or the chat template select both.

The parser runs two scripts. The first script separates reasoning, the second script separates calls from content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal

from trioserve.contracts.errors import InvalidRequest
from trioserve.text.reasoning_state import PromptReasoning
from trioserve.text.response_parsers.content_script import ContentScript, ReasoningScript, ReasoningTags
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES, ToolFamily
from trioserve.text.response_parsers.offered_tools import OfferedTool, tools_by_name
from trioserve.text.response_parsers.scripts import PartSink, Script, TextSource
from trioserve.text.response_parts import ResponseParser, ResponsePart

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = [
    "families_of_template",
    "RunningScript",
    "ScriptedParser",
    "AUTO",
    "NONE",
    "make_response_parser",
    "named_families",
    "COMMON_TOOL_FAMILY",
    "Leniency",
    "ResponseFamilies",
]

# Each line has texts to search for in a template, and the family that they show. The first line whose texts all occur
# in the template determines the family.
_TOOL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|start|>"), "openai"),
    (("<|tool_call>", "call:"), "gemma4"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("\uff5cDSML\uff5c ",), "deepseek_v41"),
    (("\uff5cDSML\uff5c", "tool_calls>"), "deepseek_v4"),
    (("\uff5cDSML\uff5c",), "deepseek_v32"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json"), "deepseek_v3"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>",), "deepseek_v31"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [",), "lfm2"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<tool_calls>[",), "jamba"),
    (("<arg_key>", "\\n<arg_key>"), "glm45"),
    (("<arg_key>", "\n<arg_key>"), "glm45"),
    (("<arg_key>",), "glm47"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>",), "jamba"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<|tool_call|>", "functools"), "phi4_mini_json"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("[func_name1(",), "pythonic"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name and its value',), "llama3_json"),
)
_REASONING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|start|>"), "openai_gptoss"),
    (("<|channel>thought",), "gemma4"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("</think>", "<|tool_calls_section_begin|>"), "kimi_k2"),
    (("</think>", "<minimax:tool_call>"), "minimax_m2"),
    (("</think>", "\uff5cDSML\uff5c"), "deepseek_v3"),
    (("</think>", "<\uff5cAssistant\uff5c>", "thinking is defined"), "deepseek_v3"),
    (("</think>", "<\uff5cAssistant\uff5c>"), "deepseek_r1"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>",), "qwen3"),
)


def families_of_template(template: str) -> tuple[str | None, str | None]:
    """Return the families of tool calls and of reasoning that a chat template shows, each None if it shows no family.

    Args:
        template: Text of the template.
    """
    return _family_by(template, _TOOL_SIGNS), _family_by(template, _REASONING_SIGNS)


def _family_by(template: str, signs: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    return next((family for texts, family in signs if all(text in template for text in texts)), None)


class RunningScript:
    """A script and the source that it reads.

    The script reads pushed text at the next `flush` or at the end of the response.
    """

    __slots__ = ("_pieces", "_script", "_source")

    def __init__(self, source: TextSource, script: Script[None]) -> None:
        self._source = source
        self._script: Script[None] | None = script
        self._pieces: list[str] = []

    def push(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def flush(self) -> None:
        if self._pieces:
            self._source.push("".join(self._pieces))
            self._pieces.clear()
            self._run()

    def end(self) -> None:
        self.flush()
        self._source.over = True
        self._run()
        assert self._script is None, "a script ends when its text ends"

    def _run(self) -> None:
        if self._script is None:
            return
        try:
            next(self._script)
        except StopIteration:
            self._script = None


class ScriptedParser:
    """A ResponseParser that runs scripts.

    Args:
        sink: Receives the parts.
        scripts: The scripts in order. Each script pushes text to the next script.
        pass_on: Receives the text of the response. It is `push` of the first script, or of the sink if there are no
            scripts.
    """

    def __init__(self, sink: PartSink, scripts: list[RunningScript], *, pass_on: Callable[[str], None]) -> None:
        self._sink = sink
        self._scripts = scripts
        self._pass_on = pass_on

    def feed(self, text: str) -> list[ResponsePart]:
        self._pass_on(text)
        for script in self._scripts:
            script.flush()
        return self._sink.drain()

    def end(self) -> list[ResponsePart]:
        for script in self._scripts:
            script.end()
        self._sink.abandon_call()
        return self._sink.drain()


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
        begins_inside: True if the prompt has opened reasoning, False if the prompt has ended reasoning. PromptReasoning
            returns this value. None to use the default of the family.
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
    """Return the families of tool calls and reasoning that two options select.

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


Leniency = Literal["strict", "lenient"]
"""Texts that count as calls: only those that the family's format marks, or also JSON without marks or in a fence."""

COMMON_TOOL_FAMILY = "hermes"
"""Format for models whose template shows none. Most models have learned this format."""

MISTRAL_ID_CHARACTERS = 9
HARMONY_CONTENT = "<|channel|>final<|message|>"
_HARMONY = REASONING_FAMILIES["openai"]


class ResponseFamilies:
    """Formats in which one model writes calls and reasoning.

    Args:
        tokenizer: Tokenizer of the model, with its chat template.
        tool_call_parser: Family of tool calls: a name, "auto" or "none".
        reasoning_parser: Family of reasoning: a name, "auto" or "none".
        tool_call_leniency: "lenient" to accept JSON calls without the family's marks.

    Attributes:
        tool_family: Family of tool calls. COMMON_TOOL_FAMILY if "auto" detects no family. None for "none".
        reasoning_family: Family of reasoning, or None if the model writes no reasoning.

    Raises:
        InvalidRequest: The name of a parser is not known. The message lists the known names.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        tool_call_leniency: Leniency = "strict",
    ) -> None:
        self._is_lenient = tool_call_leniency == "lenient"
        template = None if tokenizer.chat_template is None else tokenizer.chat_template.text
        tool_family, self.reasoning_family = named_families(tool_call_parser, reasoning_parser, template)
        if tool_family is None and tool_call_parser == AUTO:
            tool_family = COMMON_TOOL_FAMILY
        self.tool_family = tool_family
        self._tool_tokens_are_special = tool_family is not None and any(
            map(tokenizer.writes_special, TOOL_FAMILIES[tool_family].special_tokens)
        )
        self._reasoning_tokens_are_special = self.reasoning_family is not None and any(
            map(tokenizer.writes_special, REASONING_FAMILIES[self.reasoning_family].special_tokens)
        )

        tags = self.reasoning_tags
        self._prompt_reasoning = (
            None if tags is None else PromptReasoning(tokenizer, opening=tags.opening, closing=tags.closing)
        )

    @property
    def reasoning_tags(self) -> ReasoningTags | None:
        """Tags around the model's reasoning, or None if the model writes no reasoning."""
        return None if self.reasoning_family is None else REASONING_FAMILIES[self.reasoning_family].tags

    @property
    def content_begin(self) -> str | None:
        """Text that opens the content channel, or None if content has no channel of its own."""
        tools = self.tool_family is not None and TOOL_FAMILIES[self.tool_family].whole is not None
        return HARMONY_CONTENT if tools or REASONING_FAMILIES.get(self.reasoning_family or "") is _HARMONY else None

    def call_id(self, unique: str) -> str:
        """Return an id for a call that the model wrote without an id. The model's chat template accepts this id.

        Templates of Mistral accept only ids of nine characters.

        Args:
            unique: At least 16 random letters and digits.
        """
        return unique[:MISTRAL_ID_CHARACTERS] if self.tool_family == "mistral" else f"call_{unique}"

    def needs_parser(self, *, has_tools: bool) -> bool:
        """Return True if responses may have reasoning or calls. If False, the whole response is content.

        Args:
            has_tools: True if the request offers tools.
        """
        return self.reasoning_family is not None or (has_tools and self.tool_family is not None)

    def needs_special_tokens(self, *, has_tools: bool) -> bool:
        """Return True if the markers of reasoning or calls are special tokens, which the decoder must not skip.

        Args:
            has_tools: True if the request offers tools.
        """
        return self._reasoning_tokens_are_special or (has_tools and self._tool_tokens_are_special)

    def new_parser(self, tools: Iterable[OfferedTool], *, prompt_token_ids: Sequence[int]) -> ResponseParser:
        """Make the parser for one choice.

        Args:
            tools: Tools that the request offers.
            prompt_token_ids: All tokens of the prompt, which show whether the response begins inside of reasoning.
        """
        reasoning = self._prompt_reasoning
        return make_response_parser(
            self.tool_family,
            self.reasoning_family,
            tools=tools,
            begins_inside=None if reasoning is None else reasoning.begins_inside(prompt_token_ids),
            is_lenient=self._is_lenient,
        )
