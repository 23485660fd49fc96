"""Formats of calls and reasoning of all model families. A family has the same name as in vLLM if vLLM supports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from trioserve.text.call_formats import deepseek, gemma4, glm, harmony, kimi, mistral, pythonic, qwen_xml
from trioserve.text.call_formats.invoke_tags import DSML, DSML_SPACED, MINIMAX, InvokeTags, invoke_calls, invoke_format
from trioserve.text.call_formats.json_calls import (
    COHERE_FORMAT,
    HERMES_FORMAT,
    LLAMA3_FORMAT,
    json_format,
    read_bare_calls,
    read_nothing,
    tagged_calls,
)
from trioserve.text.response_parsers.call_format import CallFormat, CallReader
from trioserve.text.response_parsers.content_script import ReasoningTags, read_bare
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.scripts import PartSink, Script, TextSource

__all__ = ["REASONING_FAMILIES", "TOOL_FAMILIES", "ReasoningFamily", "ToolFamily", "WholeScript"]

# A WholeScript reads a whole response of a family with channels. Its last argument is begins_inside, as in
# make_response_parser.
WholeScript = Callable[[TextSource, PartSink, Mapping[str, OfferedTool], bool | None], Script[None]]


class ToolFamily(msgspec.Struct, frozen=True, kw_only=True):
    """Format in which one family writes calls.

    Attributes:
        readers: Scripts that read a call, by the marker that opens the call. ContentScript uses them.
        line_readers: Scripts by markers that count only at the beginning of a line.
        first_readers: Scripts for formats without markers, by the first character of a call. They count only as long
            as the response has no content.
        drops_space: True if white space before a call is not content, since the family's template writes it.
        has_channels: True if the family's markers separate content from other text.
        special_tokens: Markers that are special tokens in the family's vocabulary. The decoder must not skip these
            tokens.
        whole: Script that reads a whole response, including reasoning, instead of `readers`. None for other families.
        ends_reasoning: Beginnings of calls that end reasoning without a closing tag. All other calls within reasoning
            are ignored.
        call_format: Format in which current models of the family write calls.
        older_formats: Formats of older models, by a special token that the vocabularies of these models lack.
    """

    readers: dict[str, CallReader] = {}
    line_readers: dict[str, CallReader] = {}
    first_readers: dict[str, CallReader] = {}
    drops_space: bool = True
    has_channels: bool = False
    special_tokens: tuple[str, ...] = ()
    whole: WholeScript | None = None
    ends_reasoning: tuple[str, ...] = ()
    call_format: CallFormat = HERMES_FORMAT
    older_formats: dict[str, CallFormat] = {}

    def format_for(self, special_token_ids: Mapping[str, int]) -> CallFormat:
        """Return the format of calls that models with a given vocabulary use.

        Args:
            special_token_ids: Special tokens of the vocabulary, by their text.
        """
        older = (older for token, older in self.older_formats.items() if token not in special_token_ids)
        return next(older, self.call_format)


class ReasoningFamily(msgspec.Struct, frozen=True, kw_only=True):
    """Format in which one family writes reasoning.

    Attributes:
        tags: Tags around reasoning.
        special_tokens: Tags that are special tokens in the family's vocabulary. The decoder must not skip these tokens.
        channels: Family of calls whose markers also surround the content. The script of that family then reads the
            content, even without tools. None if the content has no markers.
    """

    tags: ReasoningTags = ReasoningTags()
    special_tokens: tuple[str, ...] = ()
    channels: str | None = None


def _json(opening: str, closing: str, *, is_array: bool = False) -> ToolFamily:
    """Make a family that writes calls as JSON between two tags, or after a single tag."""
    return ToolFamily(
        readers={opening: tagged_calls(closing) if closing else read_bare_calls},
        special_tokens=tuple(filter(None, (opening, closing))),
        call_format=json_format(opening, closing, is_array=is_array),
    )


def _qwen_xml(opening: str, closing: str) -> ToolFamily:
    return ToolFamily(
        readers={opening: qwen_xml.function_calls(closing)},
        line_readers={qwen_xml.FUNCTION_MARKER: qwen_xml.read_bare_function(closing)},
        special_tokens=(opening, closing),
        ends_reasoning=(f"{opening}\n{qwen_xml.FUNCTION_MARKER}", f"{opening}{qwen_xml.FUNCTION_MARKER}"),
        call_format=qwen_xml.qwen_xml_format(opening, closing),
    )


def _glm(line_break: str) -> ToolFamily:
    return ToolFamily(
        readers={glm.CALL_TAG: glm.read_glm_call}, special_tokens=glm.GLM_TOKENS, call_format=glm.glm_format(line_break)
    )


def _deepseek(call_format: CallFormat) -> ToolFamily:
    return ToolFamily(
        readers={deepseek.CALLS_MARKER: deepseek.read_section, deepseek.CALL_MARKER: deepseek.read_call},
        special_tokens=deepseek.DEEPSEEK_TOKENS,
        call_format=call_format,
    )


def _invoke(tags: InvokeTags, around: str, special_tokens: tuple[str, ...]) -> ToolFamily:
    """Make a family that writes calls with <invoke> tags.

    Args:
        around: Name of the tag that the family writes around calls. The parser also reads the other names in
            `tags.around`.
    """
    readers = {tags.around_opening(name): invoke_calls(tags, name) for name in tags.around}
    return ToolFamily(readers=readers, special_tokens=special_tokens, call_format=invoke_format(tags, around))


_HERMES = {"<tool_call>": tagged_calls("</tool_call>"), "<tools>": tagged_calls("</tools>", is_bare=True)}
_COHERE_MARKS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_DSML_TOKENS = ("\uff5cDSML\uff5c",)

TOOL_FAMILIES: dict[str, ToolFamily] = {
    "hermes": ToolFamily(readers=_HERMES, special_tokens=("<tool_call>", "</tool_call>")),
    "llama3_json": ToolFamily(
        readers={"<|python_tag|>": read_bare_calls},
        first_readers={"{": read_bare, "[": read_bare},
        drops_space=False,
        special_tokens=("<|python_tag|>",),
        call_format=LLAMA3_FORMAT,
    ),
    "mistral": ToolFamily(
        readers={mistral.CALLS_MARKER: mistral.read_mistral_calls},
        drops_space=False,
        special_tokens=mistral.MISTRAL_TOKENS,
        call_format=mistral.MISTRAL_FORMAT,
        older_formats={mistral.ARGUMENTS_MARKER: mistral.MISTRAL_ARRAY_FORMAT},
    ),
    "pythonic": ToolFamily(
        readers={pythonic.PYTHON_START: pythonic.tagged_list(pythonic.PYTHON_END)},
        first_readers={"[": pythonic.read_python_list},
        drops_space=False,
        special_tokens=pythonic.PYTHON_TOKENS,
        call_format=pythonic.PYTHONIC_FORMAT,
    ),
    "lfm2": ToolFamily(
        readers={"<|tool_call_start|>": pythonic.tagged_list("<|tool_call_end|>")},
        special_tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        call_format=pythonic.list_format("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo3": ToolFamily(
        readers={"<function_calls>": pythonic.python_lines("</function_calls>")},
        call_format=pythonic.lines_format("<function_calls>", "</function_calls>"),
    ),
    "qwen3_coder": _qwen_xml("<tool_call>", "</tool_call>"),
    "seed_oss": _qwen_xml("<seed:tool_call>", "</seed:tool_call>"),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "deepseek_v3": _deepseek(deepseek.V3_FORMAT),
    "deepseek_v31": _deepseek(deepseek.V31_FORMAT),
    "deepseek_v32": _invoke(DSML, "function_calls", _DSML_TOKENS),
    "deepseek_v4": _invoke(DSML, "tool_calls", _DSML_TOKENS),
    "deepseek_v41": _invoke(DSML_SPACED, "calls", _DSML_TOKENS),
    "minimax_m2": _invoke(MINIMAX, "tool_call", ("<minimax:tool_call>", "</minimax:tool_call>")),
    "kimi_k2": ToolFamily(
        readers={kimi.SECTION_MARKER: kimi.read_section, kimi.CALL_MARKER: kimi.read_call},
        drops_space=False,
        special_tokens=kimi.KIMI_TOKENS,
        ends_reasoning=(kimi.SECTION_MARKER,),
        call_format=kimi.K2_FORMAT,
    ),
    "kimi_k3": ToolFamily(
        readers=kimi.K3_READERS,
        drops_space=False,
        has_channels=True,
        special_tokens=kimi.K3_TOKENS,
        call_format=kimi.K3_FORMAT,
    ),
    "gemma4": ToolFamily(
        readers={gemma4.CALL_MARKER: gemma4.read_gemma4_call},
        drops_space=False,
        special_tokens=gemma4.GEMMA4_TOKENS,
        call_format=gemma4.GEMMA4_FORMAT,
    ),
    "openai": ToolFamily(
        whole=harmony.read_harmony, special_tokens=harmony.HARMONY_TOKENS, call_format=harmony.HARMONY_FORMAT
    ),
    "cohere_command3": ToolFamily(
        readers={
            "<|START_ACTION|>": tagged_calls("<|END_ACTION|>"),
            **dict.fromkeys(_COHERE_MARKS, read_nothing),
        },
        drops_space=False,
        has_channels=True,
        special_tokens=("<|START_ACTION|>", "<|END_ACTION|>", *_COHERE_MARKS),
        call_format=COHERE_FORMAT,
    ),
    "nemotron_json": _json("<TOOLCALL>", "</TOOLCALL>", is_array=True),
    "granite": _json("<|tool_call|>", "", is_array=True),
    "jamba": _json("<tool_calls>", "</tool_calls>", is_array=True),
    "internlm": _json("<|action_start|><|plugin|>", "<|action_end|>"),
    "phi4_mini_json": _json("functools", "", is_array=True),
    "longcat": _json("<longcat_tool_call>", "</longcat_tool_call>"),
}
# Aliases.
TOOL_FAMILIES |= {
    "llama4_json": TOOL_FAMILIES["llama3_json"],
    "llama4_pythonic": TOOL_FAMILIES["pythonic"],
    "qwen3_xml": TOOL_FAMILIES["qwen3_coder"],
    "hunyuan_a13b": TOOL_FAMILIES["jamba"],
    "ernie45": TOOL_FAMILIES["hermes"],
    "gpt_oss": TOOL_FAMILIES["openai"],
}

_THINK_TOKENS = ("<think>", "</think>")
_THINK = ReasoningFamily(special_tokens=_THINK_TOKENS)
_THINK_FROM_THE_START = ReasoningFamily(tags=ReasoningTags(begins_inside=True), special_tokens=_THINK_TOKENS)
_HARMONY = ReasoningFamily(
    tags=ReasoningTags(opening=("<|channel|>analysis<|message|>",), closing=("<|end|>",)),
    special_tokens=harmony.HARMONY_TOKENS,
    channels="openai",
)

REASONING_FAMILIES: dict[str, ReasoningFamily] = {
    "qwen3": _THINK,
    "deepseek_v3": _THINK,
    "deepseek_v4": _THINK,
    "deepseek_v41": _THINK,
    "deepseek_r1": _THINK_FROM_THE_START,
    "minimax_m2": _THINK_FROM_THE_START,
    "glm45": _THINK,
    "glm47": _THINK,
    "hunyuan_a13b": _THINK,
    "ernie45": _THINK,
    "kimi_k2": _THINK,
    "kimi_k3": ReasoningFamily(tags=kimi.K3_REASONING, special_tokens=kimi.K3_TOKENS, channels="kimi_k3"),
    "mistral": ReasoningFamily(
        tags=ReasoningTags(opening=("[THINK]", "<think>"), closing=("[/THINK]", "</think>")),
        special_tokens=("[THINK]", "[/THINK]"),
    ),
    "seed_oss": ReasoningFamily(
        tags=ReasoningTags(opening=("<seed:think>",), closing=("</seed:think>",)),
        special_tokens=("<seed:think>", "</seed:think>"),
    ),
    "gemma4": ReasoningFamily(
        tags=ReasoningTags(
            opening=("<|channel>thought\n", "<|channel>thought"), closing=("<channel|>",), interleaves=True
        ),
        special_tokens=("<|channel>", "<channel|>"),
    ),
    "cohere_command3": ReasoningFamily(
        tags=ReasoningTags(opening=("<|START_THINKING|>",), closing=("<|END_THINKING|>",), interleaves=True),
        special_tokens=("<|START_THINKING|>", "<|END_THINKING|>", *_COHERE_MARKS),
        channels="cohere_command3",
    ),
    "openai_gptoss": _HARMONY,
    "gpt_oss": _HARMONY,
    "openai": _HARMONY,
}
