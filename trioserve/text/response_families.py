"""Formats in which the served model writes calls and reasoning, detected from its chat template or set by an option."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from trioserve.text.reasoning_state import PromptReasoning
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.reasoning_script import ReasoningTags
from trioserve.text.response_parsers.registry import AUTO, make_response_parser, named_families
from trioserve.text.response_parts import ResponseParser

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["COMMON_TOOL_FAMILY", "Leniency", "ResponseFamilies"]

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
        tool_family: Family of tool calls. If "auto" detects none, COMMON_TOOL_FAMILY. None for "none".
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
        """Tags around the model's reasoning, or None if it writes no reasoning."""
        return None if self.reasoning_family is None else REASONING_FAMILIES[self.reasoning_family].tags

    @property
    def content_begin(self) -> str | None:
        """Text before the content, if reasoning, content and calls have separate channels. Otherwise None."""
        tools = self.tool_family is not None and TOOL_FAMILIES[self.tool_family].whole is not None
        return HARMONY_CONTENT if tools or REASONING_FAMILIES.get(self.reasoning_family or "") is _HARMONY else None

    def call_id(self, unique: str) -> str:
        """Return an id for a call to which the model gave none. The chat template of the model accepts it.

        Templates of Mistral accept only ids of nine characters.

        Args:
            unique: At least 16 random letters and digits.
        """
        return unique[:MISTRAL_ID_CHARACTERS] if self.tool_family == "mistral" else f"call_{unique}"

    def needs_parser(self, *, has_tools: bool) -> bool:
        """Return True if responses may have reasoning or calls. Otherwise all of a response is content.

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
