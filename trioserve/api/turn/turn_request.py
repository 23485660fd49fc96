"""What every chat-like API asks for, whatever its own shape: one turn of a conversation, as a value.

A surface translates its body to this, and the parts of the turn (see chat_turn.py) back to its own events. Nothing of
any surface is known here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from trioserve.api.whole_response import ResponseShape
from trioserve.contracts.deadlines import NO_DEADLINES, Deadlines
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.prompt import ChatPrompt, Cut
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.text.tool_choice import ToolChoice

__all__ = ["Reasoning", "ReasoningEffort", "TurnRequest"]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """is_on: whether the model is to think; None: as its template does by itself. effort: for templates that know it.
    budget_tokens: the thought is ended when it has as many."""

    is_on: bool | None = None
    effort: ReasoningEffort | None = None
    budget_tokens: int | None = None

    def template_arguments(self) -> dict[str, Any]:
        """Under the names that the templates of the families use."""
        arguments: dict[str, Any] = {}
        is_on = self.is_on
        if self.effort is not None:
            arguments["reasoning_effort"] = self.effort
            if is_on is None:
                is_on = self.effort != "none"
        if is_on is not None:
            arguments["enable_thinking"] = arguments["thinking"] = is_on
        return arguments


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn: the assistant's next message is asked for, n times.

    messages: in the shape of OpenAI's chat API, checked with messages.check_messages; tool calls in "tool_calls", their
    results in messages of the role "tool". tools: as there, {"type": "function", "function": {"name", "description",
    "parameters", "strict"}}; those that tool_choice excludes may be among them. structured: the form of the text that
    is no thought and no call. template_arguments: the caller's own go before those of `reasoning`. plain_prompt: a text
    in the place of messages, for which there is no template; all of its response is content.
    priority, cache_salt, kv_transfer_params, cut: see Engine.generate. shape: of the response, to bound its size.
    """

    messages: list[dict[str, Any]]
    sampling: SamplingParams
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    structured: StructuredOutput | None = None
    reasoning: Reasoning = Reasoning()
    template_arguments: dict[str, Any] = {}
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    deadlines: Deadlines = NO_DEADLINES
    kv_transfer_params: KVTransferParams | None = None
    cut: Cut | None = None
    plain_prompt: str | None = None
    shape: ResponseShape = ResponseShape()

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Those that the model is shown, and may call."""
        return self.tool_choice.offered(self.tools)

    def prompt(self) -> ChatPrompt:
        """Of one that has messages."""
        return ChatPrompt(
            messages=self.messages,
            tools=self.offered_tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            template_arguments=self.reasoning.template_arguments() | self.template_arguments,
        )
