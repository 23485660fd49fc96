"""Types of chat completions and text completions, whole and streamed. Streams are assembled from bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from trioserve.api.generation import Usage
from trioserve.api.response import Response
from trioserve.api.streams.cursors import ResumeBody
from trioserve.contracts.request import KVTransferParams

# --- chat ---

# "abort" occurs only if the request has return_partial.
TextFinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort"]


class PromptToken(Response):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each token of the prompt, an object by token id. null for the first token."""


class TopLogprob(Response):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TopLogprob):
    """An output token with its log probability and the most probable tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Response):
    content: list[ChatToken]
    refusal: None


class CalledFunction(Response):
    """Function in a tool call.

    Attributes:
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


class ToolCall(Response, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class ChatMessage(Response):
    """The assistant's message.

    Attributes:
        content: text. null: there are tool calls and no text.
        reasoning_content: reasoning, under vLLM's older name.
        reasoning: the same reasoning, under vLLM's newer name.
        function_call: call in place of tool_calls, for requests with `functions`.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(Response):
    """One choice of a chat completion.

    Attributes:
        token_ids: output tokens, if the request has return_token_ids.
        weight_versions: pairs of a weight version and the number of tokens that it sampled. Unset until weights are
            replaced.
    """

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET


class ChatCompletion(Response, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


class FunctionDelta(Response):
    """New part of a called function.

    Attributes:
        arguments: next part of the arguments. Empty in the first delta.
        name: name of the function, in the first delta only.
    """

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Response):
    """New part of a tool call.

    Attributes:
        index: index of the call within its choice.
        id: id of the call, in its first delta only.
        type: type of the call, in its first delta only.
    """

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Response):
    """New part of the assistant's message.

    Attributes:
        content: new text. null: in the first delta of a response that begins with a tool call.
    """

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Response):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET


class ChatChunkHead(Response, tag_field="object", tag="chat.completion.chunk"):
    """Fields that all events of a streamed chat completion share."""

    id: str
    created: int
    model: str


class ChatCompletionChunk(ChatChunkHead):
    """Data of one event of a streamed chat completion.

    Attributes:
        choices: at most one choice. Empty in the last event, which has the usage.
        kv_transfer_params: present with finish_reason if the KV is held for another engine.
    """

    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


# --- text ---


class CompletionLogprobs(Response):
    """Log probabilities of a text completion, as four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Response):
    """One choice of a text completion.

    Attributes:
        finish_reason: null in events of a stream until the choice ends.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: TextFinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionHead(Response, tag_field="object", tag="text_completion"):
    """Fields that all events of a streamed text completion share."""

    id: str
    created: int
    model: str


class Completion(CompletionHead):
    """A whole text completion, or the data of one event of a streamed one.

    Attributes:
        usage: token counts. In a stream without continuous_usage_stats, null or unset until the last event.
        kv_transfer_params: present with finish_reason if the KV is held for another engine.
    """

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET
