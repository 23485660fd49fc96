"""What each path of OpenAI's API does and may answer, and those of operators: for the API's own description."""

from __future__ import annotations

from trioserve.api.described_operation import GENERATES, READS_BODY, DescribedOperation
from trioserve.api.openai import response_types
from trioserve.api.openai.request_types import (
    AbortBody,
    AbortRequestBody,
    AbortRequestsBody,
    BroadcastWeightsBody,
    ChatBody,
    CompletionBody,
    ControlBody,
    DetokenizeBody,
    LoadAdapterBody,
    PauseBody,
    SharedWeightsBody,
    TokenizeBody,
    UnloadAdapterBody,
    WeightGroupBody,
    WeightGroupNameBody,
    WeightsOnDiskBody,
)
from trioserve.contracts.kv_events import BlocksRemoved, BlocksStored, LoadReported, ResidencySnapshot
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range
from trioserve.contracts.thinking import THINKING_TOKENS_MAX

__all__ = ["OPERATIONS", "RANGES"]

RANGES = SAMPLING_RANGES | {
    "max_completion_tokens": SAMPLING_RANGES["max_tokens"],
    "top_logprobs": SAMPLING_RANGES["logprobs"],
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
    "thinking_token_budget": Range(0, THINKING_TOKENS_MAX),
    "thinking_budget": Range(0, THINKING_TOKENS_MAX),
    "max_reasoning_tokens": Range(0, THINKING_TOKENS_MAX),
}

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/chat/completions"): DescribedOperation(
        summary="Answer a chat",
        description="Fields, and their meanings, are OpenAI's and vLLM's. Fields that are not named here are "
        "ignored or refused.",
        body=ChatBody,
        ranges=RANGES,
        response=response_types.ChatCompletion,
        event=response_types.ChatCompletionChunk,
        errors=GENERATES,
        takes_deadlines=True,
    ),
    ("POST", "/v1/completions"): DescribedOperation(
        summary="Continue one or more prompts",
        description="Choice number prompt_index * n + i is choice i of that prompt. As above for everything else.",
        body=CompletionBody,
        ranges=RANGES,
        response=response_types.Completion,
        event=response_types.Completion,
        errors=GENERATES,
        takes_deadlines=True,
    ),
    ("GET", "/v1/models"): DescribedOperation(summary="List the names that are served", response=response_types.Models),
    ("GET", "/v1/models/{model}"): DescribedOperation(
        summary="Find a model by its name",
        response=response_types.Model,
        errors=(400, 404),
        path_parameter="name of the model, slashes included",
    ),
    ("POST", "/v1/load_lora_adapter"): DescribedOperation(
        summary="Load a LoRA adapter",
        description="The admin's, where the server was started with --allow-runtime-lora-updating.",
        body=LoadAdapterBody,
        response="text/plain",
        errors=(*READS_BODY, 403, 404),
    ),
    ("POST", "/v1/unload_lora_adapter"): DescribedOperation(
        summary="Unload a LoRA adapter",
        description="Nobody gets it from then on. The response comes when nobody uses it any more.",
        body=UnloadAdapterBody,
        response="text/plain",
        errors=(*READS_BODY, 403, 404),
    ),
    ("POST", "/pause"): DescribedOperation(
        summary="Begin no further step until /resume",
        description="The admin's, where there are keys. Responds when no step is in flight. Requests that come wait.",
        response=response_types.PauseStatus,
        errors=(400, 403, 503),
        query={
            "mode": (
                "what becomes of requests that have begun: they end with what they have, or are waited for, or pause",
                {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
            ),
            "wait_for_inflight_requests": ("the older name of mode=wait", {"type": "boolean", "default": False}),
            "clear_cache": (
                "what was computed is no hit afterwards, and requests that are kept are computed again",
                {"type": "boolean", "default": True},
            ),
        },
    ),
    ("POST", "/reset_prefix_cache"): DescribedOperation(
        summary="Empty the prefix cache",
        description="The admin's, where there are keys. Requests that run keep what they use.",
        response=response_types.CacheReset,
        errors=(400, 403),
        query={
            "reset_running_requests": (
                "of an engine that pauses: requests that have begun are computed again",
                {"type": "boolean", "default": False},
            ),
            "reset_external": ("refused: what a connector keeps it keeps", {"type": "boolean", "default": False}),
        },
    ),
    ("POST", "/flush_cache"): DescribedOperation(
        summary="As /reset_prefix_cache, with SGLang's name", response=response_types.PauseChanged, errors=(400, 403)
    ),
    ("POST", "/resume"): DescribedOperation(
        summary="Go on after a pause", response=response_types.PauseStatus, errors=(400, 403)
    ),
    ("GET", "/is_paused"): DescribedOperation(
        summary="Whether no step begins until /resume", response=response_types.IsPaused, errors=(400, 403)
    ),
    ("POST", "/update_weights_from_disk"): DescribedOperation(
        summary="Replace the model's weights, between two steps",
        description="The admin's, where there are keys. All tensors of the model, by the names of its checkpoint. What "
        "does not fit is refused, and nothing has changed. Responds when steps are computed with them.",
        body=WeightsOnDiskBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403, 500, 503),
    ),
    ("POST", "/update_weights_from_shared_memory"): DescribedOperation(
        summary="The same from a segment of shared memory on the server's machine",
        body=SharedWeightsBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403, 500, 503),
    ),
    ("POST", "/update_weights_from_distributed"): DescribedOperation(
        summary="The same from a trainer that sends them by torch.distributed",
        description="In a group that was joined before. The trainer sends when this was asked for.",
        body=BroadcastWeightsBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403, 500, 503),
    ),
    ("POST", "/init_weights_update_group"): DescribedOperation(
        summary="Join a group of torch.distributed",
        description="Responds when all of it are there: its rank 0, the trainer, listens at the address.",
        body=WeightGroupBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403, 503),
    ),
    ("POST", "/destroy_weights_update_group"): DescribedOperation(
        summary="Leave it",
        body=WeightGroupNameBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403),
    ),
    ("GET", "/get_weight_version"): DescribedOperation(
        summary="Which weights steps are computed with", response=response_types.WeightVersion
    ),
    ("GET", "/weight_info"): DescribedOperation(
        summary="The same, with vLLM's name", response=response_types.WeightVersion
    ),
    ("GET", "/get_world_size"): DescribedOperation(
        summary="How many members a group with a trainer has of this engine", response=response_types.WorldSize
    ),
    ("POST", "/sleep"): DescribedOperation(
        summary="Give memory back until /wake_up",
        description="The admin's, where there are keys. Pauses first. Responds when the memory is given back. Requests "
        "that come wait.",
        response=response_types.IsSleeping,
        errors=(400, 403, 503),
        query={
            "level": (
                "1: the KV cache, or latents; 2: the weights, too",
                {"type": "integer", "minimum": 1, "maximum": 2, "default": 1},
            ),
            "mode": (
                "what becomes of requests that have begun: they end with what they have, or are waited for, or are "
                "computed again afterwards",
                {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
            ),
        },
    ),
    ("POST", "/wake_up"): DescribedOperation(
        summary="Take all memory again, and go on", response=response_types.IsSleeping, errors=(400, 403, 503)
    ),
    ("GET", "/is_sleeping"): DescribedOperation(
        summary="Whether memory is given back", response=response_types.IsSleeping, errors=(400, 403)
    ),
    ("POST", "/pause_generation"): DescribedOperation(
        summary="As /pause, with SGLang's names",
        body=PauseBody,
        response=response_types.PauseChanged,
        errors=(*READS_BODY, 403),
    ),
    ("POST", "/continue_generation"): DescribedOperation(
        summary="As /resume, with SGLang's names", response=response_types.PauseChanged, errors=(400, 403)
    ),
    ("GET", "/v1/requests"): DescribedOperation(
        summary="List the requests that live",
        description="Those of the caller's key; all of them with the admin key, or where there are no keys. Answered "
        "ones, too, while their blocks are held for another engine.",
        response=response_types.LiveRequests,
    ),
    ("DELETE", "/v1/requests/{request}"): DescribedOperation(
        summary="Abort a request",
        description="Its blocks are free with the next step. The client of its stream gets an error event. Of one that "
        "has its response, and whose blocks are held for another engine, the hold is ended.",
        response=response_types.RequestAbort,
        errors=(400, 404),
        path_parameter="the request's X-Request-Id",
    ),
    ("POST", "/v1/requests/{request}"): DescribedOperation(
        summary="End the thought of a request while it is written",
        description="What follows the thought is written as ever. 409 if the request has no thought that could end.",
        body=ControlBody,
        response=response_types.RequestControl,
        errors=(*READS_BODY, 404, 409),
        path_parameter="the request's X-Request-Id",
    ),
    ("POST", "/v1/requests/{request}/hand-over"): DescribedOperation(
        summary="Give a stream away, for another server to go on with",
        description="It ends at the latest after the step in flight, behind a last whole group. An event then says "
        "how its KV can be fetched, where a connector holds it. Only streams that were asked for with "
        "X-Trioserve-Resumable can be given away, and while they run; 409 otherwise.",
        response=response_types.RequestHandOver,
        errors=(400, 404, 409),
        path_parameter="the request's X-Request-Id",
    ),
    ("POST", "/v1/requests/abort"): DescribedOperation(
        summary="Abort several requests",
        description="With return_partial the answer holds what there is of each, and how it goes on.",
        body=AbortBody,
        response=response_types.RequestAborts,
        errors=READS_BODY,
    ),
    ("POST", "/abort_request"): DescribedOperation(
        summary="The same, with SGLang's name: one request, or all of the caller's",
        body=AbortRequestBody,
        response=response_types.RequestAborts,
        errors=READS_BODY,
    ),
    ("POST", "/abort_requests"): DescribedOperation(
        summary="The same, with vLLM's name",
        body=AbortRequestsBody,
        response=response_types.AbortedRequests,
        errors=READS_BODY,
    ),
    ("POST", "/tokenize"): DescribedOperation(
        summary="Show the tokens of a prompt or a chat",
        body=TokenizeBody,
        response=response_types.Tokenized,
        errors=(*READS_BODY, 404),
    ),
    ("POST", "/detokenize"): DescribedOperation(
        summary="Show the text of tokens",
        body=DetokenizeBody,
        response=response_types.Detokenized,
        errors=(*READS_BODY, 404),
    ),
    ("GET", "/tokenizer_info"): DescribedOperation(
        summary="Say what a client needs to render chats and to count tokens by itself",
        response=response_types.TokenizerInfo,
    ),
    ("GET", "/kv_events"): DescribedOperation(
        summary="Read which blocks the prefix cache holds, and each change from then on",
        description="A snapshot, in one part or several, then changes, numbered in order. Another snapshot means that "
        "changes were missed. Only where the server was started with --kv-events; with API keys, only for the admin's. "
        "With ?load=only it is the load instead, as /load has it: when it has changed, at most ten times a second, and "
        "once a second in any case; always there, for every key.",
        response="text/event-stream",
        kinds=(ResidencySnapshot, BlocksStored, BlocksRemoved, LoadReported),
        errors=(400, 403, 404, 429, 503),
    ),
    ("GET", "/health"): DescribedOperation(
        summary="Whether the process lives, and its engine does not hang",
        response=response_types.Alive,
        not_ready=response_types.Hangs,
    ),
    ("GET", "/ready"): DescribedOperation(
        summary="Whether requests are taken", response=response_types.Ready, not_ready=response_types.NotReady
    ),
    ("GET", "/load"): DescribedOperation(summary="How much there is to do", response=response_types.Load),
    ("GET", "/version"): DescribedOperation(summary="Version of the server", response=response_types.Version),
    ("GET", "/metrics"): DescribedOperation(summary="Metrics, in Prometheus' text format", response="text/plain"),
    ("GET", "/debug/tasks"): DescribedOperation(
        summary="The tree of Trio tasks, and what each waits for",
        description="The admin's, where there are keys.",
        response="application/json",
        errors=(400, 403),
    ),
    ("GET", "/debug/steps"): DescribedOperation(
        summary="The last 1,000 steps, for ui.perfetto.dev",
        description="In the Trace Event Format. The admin's, where there are keys.",
        response="application/json",
        errors=(400, 403),
    ),
    ("GET", "/openapi.json"): DescribedOperation(summary="This description", response="application/json"),
}
