"""How each family of models writes calls and thoughts: a line for each, under vLLM's names where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from trioserve.text.response_parsers.call_forms import CallForm
from trioserve.text.response_parsers.call_reading import CallReader
from trioserve.text.response_parsers.json_calls import HERMES_FORM, LLAMA3_FORM, read_bare_calls, tagged_calls
from trioserve.text.response_parsers.mistral import (
    ARGUMENTS_MARKER,
    CALL_ID_MARKER,
    CALLS_MARKER,
    MISTRAL_ARRAY_FORM,
    MISTRAL_FORM,
    read_mistral_calls,
)
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.part_sink import PartSink
from trioserve.text.response_parsers.text_source import Script, TextSource
from trioserve.text.response_parsers.thought_script import ThoughtTags

__all__ = ["REASONING_FAMILIES", "TOOL_FAMILIES", "ReasoningFamily", "ToolFamily", "WholeScript"]

# Families with channels: one script reads all of a response. begins_inside: as for ThoughtTags.
WholeScript = Callable[[TextSource, PartSink, Mapping[str, OfferedTool], bool | None], Script[None]]


class ToolFamily(msgspec.Struct, frozen=True, kw_only=True):
    """readers, line_readers, drops_space, is_lenient: as for ContentScript. special_tokens: markers that are special
    tokens in the family's vocabulary: they have to stay in the text. whole: reads thoughts, too, instead of readers.
    form: how the family writes calls today. older_forms: by the special token that older vocabularies lack."""

    readers: dict[str, CallReader] = {}
    line_readers: dict[str, CallReader] = {}
    drops_space: bool = True
    is_lenient: bool = True
    special_tokens: tuple[str, ...] = ()
    whole: WholeScript | None = None
    form: CallForm = HERMES_FORM
    older_forms: dict[str, CallForm] = {}

    def form_in(self, special_token_ids: Mapping[str, int]) -> CallForm:
        """The form for a vocabulary with these special tokens."""
        return next((form for token, form in self.older_forms.items() if token not in special_token_ids), self.form)


class ReasoningFamily(msgspec.Struct, frozen=True, kw_only=True):
    tags: ThoughtTags = ThoughtTags()
    special_tokens: tuple[str, ...] = ()


_HERMES = {"<tool_call>": tagged_calls("</tool_call>"), "<tools>": tagged_calls("</tools>", is_bare=True)}
_MISTRAL_TOKENS = (CALLS_MARKER, CALL_ID_MARKER, ARGUMENTS_MARKER)

TOOL_FAMILIES: dict[str, ToolFamily] = {
    "hermes": ToolFamily(readers=_HERMES, special_tokens=("<tool_call>", "</tool_call>")),
    "llama3_json": ToolFamily(
        readers={"<|python_tag|>": read_bare_calls},
        drops_space=False,
        special_tokens=("<|python_tag|>",),
        form=LLAMA3_FORM,
    ),
    "mistral": ToolFamily(
        readers={CALLS_MARKER: read_mistral_calls},
        drops_space=False,
        special_tokens=_MISTRAL_TOKENS,
        form=MISTRAL_FORM,
        older_forms={ARGUMENTS_MARKER: MISTRAL_ARRAY_FORM},
    ),
}

_THINK = ThoughtTags()
_THINK_FROM_THE_START = ThoughtTags(begins_inside=True)
_THINK_TOKENS = ("<think>", "</think>")
_MISTRAL_THOUGHTS = ThoughtTags(opening=("[THINK]", "<think>"), closing=("[/THINK]", "</think>"))

REASONING_FAMILIES: dict[str, ReasoningFamily] = {
    "qwen3": ReasoningFamily(special_tokens=_THINK_TOKENS),
    "deepseek_r1": ReasoningFamily(tags=_THINK_FROM_THE_START, special_tokens=_THINK_TOKENS),
    "deepseek_v3": ReasoningFamily(special_tokens=_THINK_TOKENS),
    "glm45": ReasoningFamily(special_tokens=_THINK_TOKENS),
    "kimi_k2": ReasoningFamily(special_tokens=_THINK_TOKENS),
    "mistral": ReasoningFamily(tags=_MISTRAL_THOUGHTS, special_tokens=("[THINK]", "[/THINK]")),
}
