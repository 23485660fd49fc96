"""Types of responses, for the OpenAPI document and for tests that check responses.

The server does not build responses from these types. Streams are assembled from bytes, and whole responses from dicts,
if that is faster or shorter. Tests check that the responses agree with these types.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.generation import Usage
from trioserve.api.streams.cursors import ResumeBody
from trioserve.contracts.events import AbortOutcome, Phase
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.contracts.kv_transfer_params import KVTransferParams

__all__ = [
    "AbortedRequests",
    "Alive",
    "Hangs",
    "ChatCompletion",
    "ChatCompletionChunk",
    "CacheReset",
    "Completion",
    "Detokenized",
    "Error",
    "LiveRequests",
    "Load",
    "Model",
    "Models",
    "IsPaused",
    "IsSleeping",
    "NotReady",
    "PauseChanged",
    "PauseStatus",
    "Ready",
    "RequestAbort",
    "RequestAborts",
    "RequestControl",
    "Tokenized",
    "TokenizerInfo",
    "Version",
    "WeightUpdate",
    "WeightVersion",
    "WorldSize",
]


class Response(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all response types, which forbids fields without a description."""


# --- errors ---


class ErrorDetail(Response):
    """Details of an error.

    Attributes:
        message: sentence for people.
        type: class of the error, for programs. OpenAI's where OpenAI has one.
        param: field or header with the fault.
        code: kind of the error, for programs. OpenAI's where OpenAI has one.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Response):
    error: ErrorDetail


# --- chat ---

# "abort" occurs only if the request has return_partial.
FinishReason = Literal["stop", "length", "abort"]
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


class TokenLogprob(Response):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Response):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Response):
    """Function in a tool call.

    Attributes:
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


class ToolCall(Response):
    id: str
    type: Literal["function"]
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


class ChatCompletion(Response):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
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


class ChatCompletionChunk(Response):
    """Data of one event of a streamed chat completion.

    Attributes:
        choices: at most one choice. Empty in the last event, which has the usage.
        kv_transfer_params: present with finish_reason if the KV is held for another engine.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
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
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Response):
    """A whole text completion, or the data of one event of a streamed one.

    Attributes:
        usage: token counts. In a stream without continuous_usage_stats, null or unset until the last event.
        kv_transfer_params: present with finish_reason if the KV is held for another engine.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


# --- models and tokens ---


class Model(Response):
    """A model or a LoRA adapter.

    Attributes:
        parent: model that the adapter changes. null: this is a model.
        adapter: digest of the adapter's content. Unset: this is a model.
        weight_version: version of the model's weights.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    batch_invariant: bool
    fingerprint: str | None
    weight_version: str
    adapter: str | UnsetType = UNSET


class Models(Response):
    object: Literal["list"]
    data: list[Model]


class Tokenized(Response):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Response):
    prompt: str


class TokenizerInfo(Response):
    """Special tokens as text (null if the model's files name none), and the chat template."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


# --- running requests ---


class LiveRequest(Response):
    """A running request.

    Attributes:
        age_seconds: time since the request arrived.
        blocks: blocks of the KV cache that the request uses, or that are held for another engine (state "held").
    """

    id: str
    object: Literal["request"]
    state: str
    phase: Phase
    priority: int
    age_seconds: float
    prompt_tokens: int
    completion_tokens: int
    blocks: int


class LiveRequests(Response):
    object: Literal["list"]
    data: list[LiveRequest]


class KeptLogprob(Response):
    """Log probability of one token.

    Attributes:
        top: the most probable tokens with their log probabilities, best first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class PartialChoice(Response):
    """Partial result of one choice.

    Attributes:
        weight_versions: pairs of a weight version and the number of tokens that it sampled. Empty: the weights were
            never replaced.
    """

    index: int
    token_ids: list[int]
    logprobs: list[KeptLogprob] | None
    weight_versions: list[tuple[str, int]]
    finish_reason: Literal["stop", "length", "abort", "deadline", "error", "handed_over"] | None


class Partial(Response):
    """Output that the client of a request has received, or receives by the end of its response.

    Attributes:
        resume: value of the field `resume` in the next, otherwise unchanged request. It continues the response.
    """

    choices: list[PartialChoice]
    resume: ResumeBody


class RequestAbort(Response):
    """Result of aborting one id.

    Attributes:
        partials: partial results, one for each request with this id. Unset: they were not asked for.
    """

    id: str
    object: Literal["request.abort"]
    result: AbortOutcome
    partials: list[Partial] | UnsetType = UNSET


class RequestControl(Response):
    """Result of a change to a running request.

    Attributes:
        result: "ending": the model writes the end of the reasoning next.
    """

    id: str
    object: Literal["request.control"]
    result: Literal["ending"]


class RequestHandOver(Response):
    id: str
    object: Literal["request.hand_over"]
    result: Literal["handed_over"]


class RequestAborts(Response):
    object: Literal["list"]
    data: list[RequestAbort]


# --- operations ---


class Alive(Response):
    """Response of a living server.

    Attributes:
        store: reason why the store's disk refuses writes. Unset: it works.
    """

    status: Literal["alive"]
    store: str | UnsetType = UNSET


class Hangs(Response):
    """Response of a server whose engine hangs.

    Attributes:
        message: age of the step in flight.
    """

    status: Literal["hangs"]
    reason: Literal["step_overdue"]
    message: str


class Ready(Response):
    """Response of a server that accepts requests.

    Attributes:
        store: reason why the store's disk refuses writes. Unset: it works.
    """

    ready: Literal[True]
    store: str | UnsetType = UNSET


class NotReady(Response):
    """Response of a server that accepts no requests.

    Attributes:
        reason: "loading", "draining", "engine_fault", "engine_reopening", "sleeping", "weights_in_part", "paused" or
            "step_overdue".
        message: age of the step in flight, with "step_overdue" only.
    """

    ready: Literal[False]
    reason: str
    message: str | UnsetType = UNSET


class PauseStatus(Response):
    status: Literal["paused", "resumed"]


class CacheReset(Response):
    status: Literal["ok"]


class IsPaused(Response):
    is_paused: bool


class IsSleeping(Response):
    is_sleeping: bool


class PauseChanged(Response):
    message: str
    status: Literal["ok"]


class WeightUpdate(Response):
    """Result of a weight update.

    Attributes:
        weight_version: version of the new weights, if success is true.
    """

    success: bool
    message: str
    weight_version: str | UnsetType = UNSET


class WeightUpdateError(Error):
    """Error of a weight update.

    Attributes:
        success: false, as in SGLang. Unset if the body could not be read.
        message: reason, as in SGLang. Unset if the body could not be read.
    """

    success: bool | UnsetType = UNSET
    message: str | UnsetType = UNSET


class WeightVersion(Response):
    weight_version: str


class WorldSize(Response):
    """Size of the engine in a group with a trainer.

    Attributes:
        world_size: number of members of the group that belong to this engine.
    """

    world_size: int


class AbortedRequests(Response):
    """Result of vLLM's /abort_requests.

    Attributes:
        aborted: number of running requests that were aborted.
    """

    status: Literal["aborted"]
    aborted: int


class Load(Response):
    """Load of an engine.

    Attributes:
        running: sequences that run.
        waiting: sequences that wait.
        seats: largest number of sequences that run at a time. null: no limit.
        kv_usage: share of the KV cache in use, from 0 to 1.
        role: role of an engine that sends KV to other engines or receives KV.
        fingerprint: digest of everything that determines the tokens of its responses.
        weight_version: version of the weights, once they were replaced.
        routers: names of routers that asked recently, with the seconds since then.
        clock: name of the clock of `told_at`.
        told_at: time of this report, in seconds of the engine's own clock.
        instance: name of the server process, which changes at every start.
    """

    running: int
    waiting: int
    seats: int | None
    kv_usage: float
    role: EngineRole | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    routers: dict[str, float] | UnsetType = UNSET
    clock: str | UnsetType = UNSET
    told_at: float | UnsetType = UNSET
    instance: str | UnsetType = UNSET


class Version(Response):
    version: str
