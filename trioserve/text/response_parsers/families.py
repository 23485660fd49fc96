"""How each family of models writes calls and thoughts: a line for each, under vLLM's names where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from trioserve.text.call_formats import deepseek, gemma4, glm, harmony, kimi, kimi_k3, mistral, pythonic, qwen_xml
from trioserve.text.call_formats.invoke_tags import (
    DSML,
    DSML_SPACED,
    MINIMAX,
    InvokeTags,
    invoke_calls,
    invoke_form,
)
from trioserve.text.call_formats.json_calls import (
    COHERE_FORM,
    HERMES_FORM,
    LLAMA3_FORM,
    json_form,
    read_bare_calls,
    read_nothing,
    tagged_calls,
)
from trioserve.text.response_parsers.call_forms import CallForm
from trioserve.text.response_parsers.call_reading import CallReader
from trioserve.text.response_parsers.content_script import read_bare
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.part_sink import PartSink
from trioserve.text.response_parsers.text_source import Script, TextSource
from trioserve.text.response_parsers.thought_script import ThoughtTags

__all__ = ["REASONING_FAMILIES", "TOOL_FAMILIES", "ReasoningFamily", "ToolFamily", "WholeScript"]

# Families with channels: one script reads all of a response. The last argument is as for make_response_parser.
WholeScript = Callable[[TextSource, PartSink, Mapping[str, OfferedTool], bool | None], Script[None]]


class ToolFamily(msgspec.Struct, frozen=True, kw_only=True):
    """How one family writes calls.

    Args:
        readers, line_readers, first_readers, drops_space, has_channels: as for ContentScript.
        special_tokens: markers that are special tokens in the family's vocabulary. They have to stay in the text.
        whole: reads all of a response, reasoning included, in the place of readers.
        ends_thoughts: texts that end reasoning whose closing tag is missing. Any other call in reasoning is none.
        form: how the family writes calls today.
        older_forms: forms by the special token that older vocabularies lack.
    """

    readers: dict[str, CallReader] = {}
    line_readers: dict[str, CallReader] = {}
    first_readers: dict[str, CallReader] = {}
    drops_space: bool = True
    has_channels: bool = False
    special_tokens: tuple[str, ...] = ()
    whole: WholeScript | None = None
    ends_thoughts: tuple[str, ...] = ()
    form: CallForm = HERMES_FORM
    older_forms: dict[str, CallForm] = {}

    def form_in(self, special_token_ids: Mapping[str, int]) -> CallForm:
        """The form for a vocabulary with these special tokens."""
        return next((form for token, form in self.older_forms.items() if token not in special_token_ids), self.form)


class ReasoningFamily(msgspec.Struct, frozen=True, kw_only=True):
    """channels: the family of calls whose markers stand around content, too. It reads the content even where there are
    no tools, and nobody else does."""

    tags: ThoughtTags = ThoughtTags()
    special_tokens: tuple[str, ...] = ()
    channels: str | None = None


def _json(opening: str, closing: str, *, is_array: bool = False) -> ToolFamily:
    """JSON between two tags, or behind one."""
    return ToolFamily(
        readers={opening: tagged_calls(closing) if closing else read_bare_calls},
        special_tokens=tuple(filter(None, (opening, closing))),
        form=json_form(opening, closing, is_array=is_array),
    )


def _qwen_xml(opening: str, closing: str) -> ToolFamily:
    return ToolFamily(
        readers={opening: qwen_xml.function_calls(closing)},
        line_readers={qwen_xml.FUNCTION_MARKER: qwen_xml.read_bare_function(closing)},
        special_tokens=(opening, closing),
        ends_thoughts=(f"{opening}\n{qwen_xml.FUNCTION_MARKER}", f"{opening}{qwen_xml.FUNCTION_MARKER}"),
        form=qwen_xml.qwen_xml_form(opening, closing),
    )


def _glm(line_break: str) -> ToolFamily:
    return ToolFamily(
        readers={glm.CALL_TAG: glm.read_glm_call}, special_tokens=glm.GLM_TOKENS, form=glm.glm_form(line_break)
    )


def _deepseek(form: CallForm) -> ToolFamily:
    return ToolFamily(
        readers={deepseek.CALLS_MARKER: deepseek.read_section, deepseek.CALL_MARKER: deepseek.read_call},
        special_tokens=deepseek.DEEPSEEK_TOKENS,
        form=form,
    )


def _invoke(tags: InvokeTags, around: str, special_tokens: tuple[str, ...]) -> ToolFamily:
    """around: the tag around calls that the family writes; the others of its kind are read, too."""
    readers = {tags.around_opening(name): invoke_calls(tags, name) for name in tags.around}
    return ToolFamily(readers=readers, special_tokens=special_tokens, form=invoke_form(tags, around))


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
        form=LLAMA3_FORM,
    ),
    "mistral": ToolFamily(
        readers={mistral.CALLS_MARKER: mistral.read_mistral_calls},
        drops_space=False,
        special_tokens=mistral.MISTRAL_TOKENS,
        form=mistral.MISTRAL_FORM,
        older_forms={mistral.ARGUMENTS_MARKER: mistral.MISTRAL_ARRAY_FORM},
    ),
    "pythonic": ToolFamily(
        readers={pythonic.PYTHON_START: pythonic.tagged_list(pythonic.PYTHON_END)},
        first_readers={"[": pythonic.read_python_list},
        drops_space=False,
        special_tokens=pythonic.PYTHON_TOKENS,
        form=pythonic.PYTHONIC_FORM,
    ),
    "lfm2": ToolFamily(
        readers={"<|tool_call_start|>": pythonic.tagged_list("<|tool_call_end|>")},
        special_tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        form=pythonic.list_form("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo3": ToolFamily(
        readers={"<function_calls>": pythonic.python_lines("</function_calls>")},
        form=pythonic.lines_form("<function_calls>", "</function_calls>"),
    ),
    "qwen3_coder": _qwen_xml("<tool_call>", "</tool_call>"),
    "seed_oss": _qwen_xml("<seed:tool_call>", "</seed:tool_call>"),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "deepseek_v3": _deepseek(deepseek.V3_FORM),
    "deepseek_v31": _deepseek(deepseek.V31_FORM),
    "deepseek_v32": _invoke(DSML, "function_calls", _DSML_TOKENS),
    "deepseek_v4": _invoke(DSML, "tool_calls", _DSML_TOKENS),
    "deepseek_v41": _invoke(DSML_SPACED, "calls", _DSML_TOKENS),
    "minimax_m2": _invoke(MINIMAX, "tool_call", ("<minimax:tool_call>", "</minimax:tool_call>")),
    "kimi_k2": ToolFamily(
        readers={kimi.SECTION_MARKER: kimi.read_section, kimi.CALL_MARKER: kimi.read_call},
        drops_space=False,
        special_tokens=kimi.KIMI_TOKENS,
        ends_thoughts=(kimi.SECTION_MARKER,),
        form=kimi.K2_FORM,
    ),
    "kimi_k3": ToolFamily(
        readers=kimi_k3.K3_READERS,
        drops_space=False,
        has_channels=True,
        special_tokens=kimi_k3.K3_TOKENS,
        form=kimi_k3.K3_FORM,
    ),
    "gemma4": ToolFamily(
        readers={gemma4.CALL_MARKER: gemma4.read_gemma4_call},
        drops_space=False,
        special_tokens=gemma4.GEMMA4_TOKENS,
        form=gemma4.GEMMA4_FORM,
    ),
    "openai": ToolFamily(whole=harmony.read_harmony, special_tokens=harmony.HARMONY_TOKENS, form=harmony.HARMONY_FORM),
    "cohere_command3": ToolFamily(
        readers={
            "<|START_ACTION|>": tagged_calls("<|END_ACTION|>"),
            **dict.fromkeys(_COHERE_MARKS, read_nothing),
        },
        drops_space=False,
        has_channels=True,
        special_tokens=("<|START_ACTION|>", "<|END_ACTION|>", *_COHERE_MARKS),
        form=COHERE_FORM,
    ),
    "nemotron_json": _json("<TOOLCALL>", "</TOOLCALL>", is_array=True),
    "granite": _json("<|tool_call|>", "", is_array=True),
    "jamba": _json("<tool_calls>", "</tool_calls>", is_array=True),
    "internlm": _json("<|action_start|><|plugin|>", "<|action_end|>"),
    "phi4_mini_json": _json("functools", "", is_array=True),
    "longcat": _json("<longcat_tool_call>", "</longcat_tool_call>"),
}
# The same under other names.
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
_THINK_FROM_THE_START = ReasoningFamily(tags=ThoughtTags(begins_inside=True), special_tokens=_THINK_TOKENS)
_HARMONY = ReasoningFamily(
    tags=ThoughtTags(opening=("<|channel|>analysis<|message|>",), closing=("<|end|>",)),
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
    "kimi_k3": ReasoningFamily(tags=kimi_k3.K3_THOUGHTS, special_tokens=kimi_k3.K3_TOKENS, channels="kimi_k3"),
    "mistral": ReasoningFamily(
        tags=ThoughtTags(opening=("[THINK]", "<think>"), closing=("[/THINK]", "</think>")),
        special_tokens=("[THINK]", "[/THINK]"),
    ),
    "seed_oss": ReasoningFamily(
        tags=ThoughtTags(opening=("<seed:think>",), closing=("</seed:think>",)),
        special_tokens=("<seed:think>", "</seed:think>"),
    ),
    "gemma4": ReasoningFamily(
        tags=ThoughtTags(
            opening=("<|channel>thought\n", "<|channel>thought"), closing=("<channel|>",), interleaves=True
        ),
        special_tokens=("<|channel>", "<channel|>"),
    ),
    "cohere_command3": ReasoningFamily(
        tags=ThoughtTags(opening=("<|START_THINKING|>",), closing=("<|END_THINKING|>",), interleaves=True),
        special_tokens=("<|START_THINKING|>", "<|END_THINKING|>", *_COHERE_MARKS),
        channels="cohere_command3",
    ),
    "openai_gptoss": _HARMONY,
    "gpt_oss": _HARMONY,
    "openai": _HARMONY,
}
