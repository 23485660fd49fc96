"""How the messages of a body become a ChatPrompt: which roles, contents and template wishes are taken."""

from __future__ import annotations

from typing import Any

from trioserve.api.openai.request_types import ChatBody, TokenizeBody
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt

__all__ = ["chat_prompt"]

JSON_DEPTH_MAX = 64  # templates walk and print these values recursively; a schema of real tools is ten deep at most
JSON_VALUES_MAX = 100_000  # in one field; as Python objects they take ten times the room that they take on the wire


def chat_prompt(body: ChatBody | TokenizeBody, *, trust_chat_template: bool) -> ChatPrompt:
    """Raises InvalidRequest, naming the field by its path, for what a template could not make text of."""
    messages = body.messages or []
    if not messages:
        raise InvalidRequest("messages is empty, at least one is needed", param="messages")
    # First of all: the checks below print what is wrong, and printing is recursive, too.
    for field in ("messages", "tools", "chat_template_kwargs"):
        _check_shape(getattr(body, field), field)
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
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


def _check_message(message: dict[str, Any], path: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{path} has no role: a non-empty string is needed", param=f"{path}.role")
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if role != "assistant":
            raise InvalidRequest(
                f"{path} has no content: a string or a list of text parts is needed", param=f"{path}.content"
            )
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}.content is neither a string nor a list of text parts", param=f"{path}.content")
    for index, part in enumerate(content):
        _check_part(part, f"{path}.content[{index}]")


def _check_part(part: object, path: str) -> None:
    if not isinstance(part, dict):
        raise InvalidRequest(f'{path} is no content part: send {{"type": "text", "text": "..."}}', param=path)
    if part.get("type") != "text":
        raise InvalidRequest(
            f'{path} is of type {part.get("type")!r}, but only "text" is supported', param=f"{path}.type"
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text must be a string", param=f"{path}.text")


def _check_shape(value: object, field: str) -> None:
    """Raises InvalidRequest if there is more in it, or further down, than a template should have to walk."""
    count = 0
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
        count += len(level)
        if count > JSON_VALUES_MAX:
            raise InvalidRequest(f"{field} holds more than {JSON_VALUES_MAX} values", param=field)
    raise InvalidRequest(f"{field} is nested more than {JSON_DEPTH_MAX} deep", param=field)
