"""What a caller may ask to be continued: text, token ids, or a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

__all__ = ["ChatPrompt", "Cut", "Prompt"]


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages to be rendered with the model's chat template.

    messages: plain dicts as in OpenAI's API (role, content, ...), content as a string or a list of text parts.
    continue_final_message: the last message is the beginning of the response (then add_generation_prompt is off).
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_arguments: dict[str, Any] = {}


Prompt = str | Sequence[int] | ChatPrompt
"""Text and chats get the model's special tokens as its tokenizer or template says; token ids are taken as they are."""


class Cut(NamedTuple):
    """tokens_max: what is left of a longer text. side: where tokens are cut off."""

    tokens_max: int
    side: Literal["left", "right"] = "right"
