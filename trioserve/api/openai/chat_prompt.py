"""How a body becomes a turn of a chat: which messages, tools and template wishes are taken."""

from __future__ import annotations

from typing import Any

from trioserve.api.openai.request_types import ChatBody, TokenizeBody
from trioserve.api.turn.messages import check_messages, check_shape
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt

__all__ = ["chat_prompt"]


def chat_prompt(body: ChatBody | TokenizeBody, *, trust_chat_template: bool) -> ChatPrompt:
    """Raises InvalidRequest, naming the field by its path, for what a template could not make text of."""
    for field in ("tools", "chat_template_kwargs"):
        check_shape(getattr(body, field), field)
    messages = check_messages(body.messages)
    tools = _tools(body)
    if body.chat_template is not None and not trust_chat_template:
        raise InvalidRequest(
            "chat_template is refused: this server takes no templates from requests "
            "(its operator can allow them with trust_request_chat_template)",
            param="chat_template",
        )
    if body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens is for plain prompts: a chat template writes its own", param="add_special_tokens"
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both set, only one of them can be",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=messages,
        tools=tools,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        chat_template=body.chat_template,
        template_arguments=body.chat_template_kwargs or {},
    )


def _tools(body: ChatBody | TokenizeBody) -> list[dict[str, Any]] | None:
    """The tools that the template is to show. Calls are not parsed out of the response, so none can be promised."""
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest(
            'tool_choice must be "auto" or "none": a call cannot be forced here, the model may write one as text',
            param="tool_choice",
        )
    return None if body.tool_choice == "none" else body.tools or None
