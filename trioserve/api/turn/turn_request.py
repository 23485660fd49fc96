"""The common request of all chat-like APIs: one turn of a conversation, as a value.

Each API translates its request body to a TurnRequest, and the parts of the turn (see chat_turn.py) to its own events.
This module knows no API.
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
    """Options for the model's reasoning.

    Attributes:
        is_on: Reasoning on or off. None: the template's default.
        effort: Effort level, for templates that have one.
        budget_tokens: The reasoning ends after this number of tokens. None: no limit.
    """

    is_on: bool | None = None
    effort: ReasoningEffort | None = None
    budget_tokens: int | None = None

    def template_arguments(self) -> dict[str, Any]:
        """Return the template arguments, under the names that the templates of the model families use."""
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
    """A request for the assistant's next message, in `sampling.n` choices.

    Attributes:
        messages: Messages in the shape of OpenAI's chat API, checked with messages.check_messages. Tool calls are in
            "tool_calls", their results in messages of the role "tool".
        sampling: Sampling options.
        tools: Tools in OpenAI's shape: {"type": "function", "function": {"name", "description", "parameters",
            "strict"}}. May include tools that tool_choice excludes.
        tool_choice: Tools that the model may or must call.
        parallel_tool_calls: True if the response may have more than one call.
        structured: Schema or grammar for the content. Reasoning and tool calls are exempt.
        reasoning: Options for the reasoning.
        template_arguments: Arguments for the chat template. They override those of `reasoning`.
        chat_template: Template that replaces the model's own.
        add_generation_prompt: See ChatPrompt.
        continue_final_message: See ChatPrompt.
        priority: See Engine.generate.
        cache_salt: See Engine.generate.
        deadlines: Deadlines of the request.
        kv_transfer_params: See Engine.generate.
        cut: Truncation of the prompt. See Engine.generate.
        plain_prompt: Prompt text that replaces the messages and uses no template. The whole response is content.
        shape: Properties of the response that bound its size.
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
        """The tools that the model sees and may call."""
        return self.tool_choice.offered(self.tools)

    def prompt(self) -> ChatPrompt:
        """Return the prompt. Only for a turn with messages, not with plain_prompt."""
        return ChatPrompt(
            messages=self.messages,
            tools=self.offered_tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            template_arguments=self.reasoning.template_arguments() | self.template_arguments,
        )
