"""What answers look like, as types: for the API's description and for whoever checks answers against it.

Answers are not made of these: streamed ones are put together from bytes, whole ones from dicts, where that is faster or
shorter. That both agree is what the tests of the description show.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.generation import Usage
from trioserve.api.resume_body import ResumeBody
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
    """What all have in common: no field that is not described."""


# --- errors ---


class ErrorDetail(Response):
    """message: for people. type, code: for programs, OpenAI's where it has them. param: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Response):
    error: ErrorDetail


# --- chat ---

# "abort" is told to those alone who sent return_partial.
FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort"]


class PromptToken(Response):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each token of the prompt an object by token id; none for the first."""


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
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(Response):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Response):
    """content: null where there are calls and no text. reasoning_content, reasoning: the thought, under both of its
    names. function_call: instead of tool_calls, for those who sent functions."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(Response):
    """token_ids: when return_token_ids was asked for. weight_versions: which weights sampled the tokens, in runs, once
    the server's were replaced."""

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
    """name: at first, with empty arguments; then the arguments, piece by piece."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Response):
    """index: of the call within its choice. id, type: in its first delta."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Response):
    """content: null in the first delta of a response that begins with a call."""

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
    """The data of one event of a streamed chat completion; choices is empty in the one with the usage at the end.
    kv_transfer_params: with the finish_reason, when the KV is held for another engine."""

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
    """Four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Response):
    """finish_reason: null only in an event of a stream, as long as the choice goes on."""

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
    """A whole text completion, or the data of one event of a streamed one (without usage, or null, but at the end).
    kv_transfer_params: with the finish_reason, when the KV is held for another engine."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


# --- models, tokens ---


class Model(Response):
    """parent: of a LoRA adapter, the model that it changes; adapter: the digest of its content. weight_version: of the
    model's weights."""

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
    """Each token as its text; null where the model's files name none."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


# --- requests that live ---


class LiveRequest(Response):
    """age_seconds: since it came. blocks: of the KV cache, in use, or held for another engine (state "held")."""

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
    """top: the most probable tokens and their log probabilities, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class PartialChoice(Response):
    """weight_versions: runs of a version and how many tokens it sampled; empty: all are of the first one."""

    index: int
    token_ids: list[int]
    logprobs: list[KeptLogprob] | None
    weight_versions: list[tuple[str, int]]
    finish_reason: Literal["stop", "length", "abort", "deadline", "error", "handed_over"] | None


class Partial(Response):
    """What the client of a request was given, or is by the end of its response. resume: to be sent with the same
    request, so that it goes on."""

    choices: list[PartialChoice]
    resume: ResumeBody


class RequestAbort(Response):
    """partials: where they were asked for, one for each request that bears the id."""

    id: str
    object: Literal["request.abort"]
    result: AbortOutcome
    partials: list[Partial] | UnsetType = UNSET


class RequestControl(Response):
    """result: "ending": the end of the thought is written next."""

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
    """store: why the disk of the store takes nothing, if it does not."""

    status: Literal["alive"]
    store: str | UnsetType = UNSET


class Hangs(Response):
    """message: how old the step in flight is."""

    status: Literal["hangs"]
    reason: Literal["step_overdue"]
    message: str


class Ready(Response):
    """store: why the disk of the store takes nothing, if it does not. Requests are served all the same."""

    ready: Literal[True]
    store: str | UnsetType = UNSET


class NotReady(Response):
    """reason: "loading", "draining", "engine_fault", "engine_reopening", "sleeping", "weights_in_part", "paused" or
    "step_overdue". message: with the last one, how old the step in flight is."""

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
    """weight_version: of the new ones, where success is true."""

    success: bool
    message: str
    weight_version: str | UnsetType = UNSET


class WeightUpdateError(Error):
    """success, message: as SGLang has them, of a body that could be read."""

    success: bool | UnsetType = UNSET
    message: str | UnsetType = UNSET


class WeightVersion(Response):
    weight_version: str


class WorldSize(Response):
    """world_size: how many members a group with a trainer has of this engine."""

    world_size: int


class AbortedRequests(Response):
    """aborted: how many requests were live, and are no more."""

    status: Literal["aborted"]
    aborted: int


class Load(Response):
    """running, waiting: sequences. seats: how many may run at a time. kv_usage: share of the KV cache in use.
    role: what the engine is meant for, where it gives KV to other engines or takes it. clock, told_at: when it looked,
    in seconds of a clock of its own with this name. fingerprint: names all that decides about the tokens of its
    responses. weight_version: of the weights, once they were replaced. routers: those that have asked of late and say
    who they are, and how many seconds ago each did so. instance: names the process, from its start to its end."""

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
