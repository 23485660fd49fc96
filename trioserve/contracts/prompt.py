"""Types of prompts: text, token ids, chats, and sound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from trioserve.contracts.media import AudioPrompt

__all__ = ["ChatPrompt", "Cut", "Prompt"]


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that the model's chat template turns into a prompt.

    Attributes:
        messages: Dicts as in OpenAI's API (role, content, ...). The content is a string or a list of parts.
        tools: Tool definitions for the template. None if there are none.
        add_generation_prompt: True to end the prompt with the start of an assistant message.
        continue_final_message: True if the last message is the beginning of the response. add_generation_prompt must be
            False.
        chat_template: Template to use instead of the model's own.
        template_arguments: Further variables for the template. None for no further variables.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_arguments: dict[str, Any] = {}


Prompt = str | Sequence[int] | ChatPrompt | AudioPrompt
"""For text and chats, the tokenizer or the template adds special tokens. Token ids are used unchanged."""


class Cut(NamedTuple):
    """How to truncate a text that is too long.

    Attributes:
        tokens_max: Tokens to keep.
        side: Side at which tokens are removed: "left" or "right".
    """

    tokens_max: int
    side: Literal["left", "right"] = "right"
