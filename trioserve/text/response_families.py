"""How the served model writes calls and thoughts: told by its chat template, or by whoever serves it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from trioserve.text.prompt_reasoning import PromptReasoning
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.registry import AUTO, make_response_parser, named_families
from trioserve.text.response_parsers.thought_script import ThoughtTags
from trioserve.text.response_parts import ResponseParser

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["COMMON_TOOL_FAMILY", "Leniency", "ResponseFamilies"]

Leniency = Literal["strict", "lenient"]
"""Which texts are calls: those that the family's format marks, or bare and fenced JSON as well."""

COMMON_TOOL_FAMILY = "hermes"
"""For models whose template says nothing: the format that most others have learned."""

MISTRAL_ID_CHARACTERS = 9
HARMONY_CONTENT = "<|channel|>final<|message|>"
_HARMONY = REASONING_FAMILIES["openai"]


class ResponseFamilies:
    """tool_family: the model's own, or the common one. reasoning_family: None for a model that does not think aloud."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        tool_call_leniency: Leniency = "strict",
    ) -> None:
        """Raises InvalidRequest for a parser that nobody knows, with those that are known."""
        self._is_lenient = tool_call_leniency == "lenient"
        template = None if tokenizer.chat_template is None else tokenizer.chat_template.text
        tool_family, self.reasoning_family = named_families(tool_call_parser, reasoning_parser, template)
        if tool_family is None and tool_call_parser == AUTO:
            tool_family = COMMON_TOOL_FAMILY
        self.tool_family = tool_family
        self._tool_tokens_are_special = tool_family is not None and any(
            map(tokenizer.writes_special, TOOL_FAMILIES[tool_family].special_tokens)
        )
        self._thought_tokens_are_special = self.reasoning_family is not None and any(
            map(tokenizer.writes_special, REASONING_FAMILIES[self.reasoning_family].special_tokens)
        )

        tags = self.thought_tags
        self._prompt_reasoning = (
            None if tags is None else PromptReasoning(tokenizer, opening=tags.opening, closing=tags.closing)
        )

    @property
    def thought_tags(self) -> ThoughtTags | None:
        """How the model writes its thoughts; None for one that does not."""
        return None if self.reasoning_family is None else REASONING_FAMILIES[self.reasoning_family].tags

    @property
    def content_begin(self) -> str | None:
        """What content stands behind, where thoughts, content and calls have channels of their own; None elsewhere."""
        tools = self.tool_family is not None and TOOL_FAMILIES[self.tool_family].whole is not None
        return HARMONY_CONTENT if tools or REASONING_FAMILIES.get(self.reasoning_family or "") is _HARMONY else None

    def call_id(self, unique: str) -> str:
        """An id for a call to which the model gave none, such that its chat template takes it back. unique: 16 random
        letters and digits or more. Templates of Mistral take nine, and refuse anything else."""
        return unique[:MISTRAL_ID_CHARACTERS] if self.tool_family == "mistral" else f"call_{unique}"

    def needs_parser(self, *, has_tools: bool) -> bool:
        """Whether there is anything to look for in the response; otherwise all of it is content."""
        return self.reasoning_family is not None or (has_tools and self.tool_family is not None)

    def needs_special_tokens(self, *, has_tools: bool) -> bool:
        """Whether the markers to look for would be hidden with the other special tokens."""
        return self._thought_tokens_are_special or (has_tools and self._tool_tokens_are_special)

    def new_parser(self, tools: Iterable[OfferedTool], *, prompt_token_ids: Sequence[int]) -> ResponseParser:
        """Make the parser for one choice.

        Args:
            prompt_token_ids: the whole prompt, which tells whether the response begins inside of reasoning.
        """
        reasoning = self._prompt_reasoning
        return make_response_parser(
            self.tool_family,
            self.reasoning_family,
            tools=tools,
            begins_inside=None if reasoning is None else reasoning.begins_inside(prompt_token_ids),
            is_lenient=self._is_lenient,
        )
