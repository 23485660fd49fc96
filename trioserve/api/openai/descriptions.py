"""Descriptions of OpenAI's and the operators' paths, for the OpenAPI document."""

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
        description="Choice number prompt_index * n + i is choice i of that prompt. Other fields: as for chats.",
        body=CompletionBody,
        ranges=RANGES,
        response=response_types.Completion,
        event=response_types.Completion,
        errors=GENERATES,
        takes_deadlines=True,
    ),
    ("GET", "/v1/models"): DescribedOperation(summary="List models and adapters", response=response_types.Models),
    ("GET", "/v1/models/{model}"): DescribedOperation(
        summary="Find a model by its name",
        response=response_types.Model,
        errors=(400, 404),
        path_parameter="name of the model, slashes included",
    ),
    ("POST", "/v1/load_lora_adapter"): DescribedOperation(
        summary="Load a LoRA adapter",
        description="Needs the admin's key, and a server with --allow-runtime-lora-updating.",
        body=LoadAdapterBody,
        response="text/plain",
        errors=(*READS_BODY, 403, 404),
    ),
    ("POST", "/v1/unload_lora_adapter"): DescribedOperation(
        summary="Unload a LoRA adapter",
        description="New requests cannot use it. The response is sent when no request uses it any more.",
        body=UnloadAdapterBody,
        response="text/plain",
        errors=(*READS_BODY, 403, 404),
    ),
    ("POST", "/pause"): DescribedOperation(
        summary="Begin no more steps until /resume",
        description="Needs the admin's key, if there are keys. Responds when no step is in flight. New requests wait.",
        response=response_types.PauseStatus,
        errors=(400, 403, 503),
        query={
            "mode": (
                "how to treat running requests: end them with their partial results, wait for them, or pause them",
                {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
            ),
            "wait_for_inflight_requests": ("the older name of mode=wait", {"type": "boolean", "default": False}),
            "clear_cache": (
                "true: empty the prefix cache, and recompute the KV of paused requests",
                {"type": "boolean", "default": True},
            ),
        },
    ),
    ("POST", "/reset_prefix_cache"): DescribedOperation(
        summary="Empty the prefix cache",
        description="Needs the admin's key, if there are keys. Running requests keep their blocks.",
        response=response_types.CacheReset,
        errors=(400, 403),
        query={
            "reset_running_requests": (
                "true: recompute the KV of paused requests; only for a paused engine",
                {"type": "boolean", "default": False},
            ),
            "reset_external": (
                "refused: the caches of connectors cannot be emptied",
                {"type": "boolean", "default": False},
            ),
        },
    ),
    ("POST", "/flush_cache"): DescribedOperation(
        summary="Empty the prefix cache (SGLang's name of /reset_prefix_cache)",
        response=response_types.PauseChanged,
        errors=(400, 403),
    ),
    ("POST", "/resume"): DescribedOperation(
        summary="Resume after a pause", response=response_types.PauseStatus, errors=(400, 403)
    ),
    ("GET", "/is_paused"): DescribedOperation(
        summary="Say if the engine is paused", response=response_types.IsPaused, errors=(400, 403)
    ),
    ("POST", "/update_weights_from_disk"): DescribedOperation(
        summary="Replace the model's weights between two steps, from a directory",
        description="Needs the admin's key, if there are keys. The source has all tensors of the model, with the "
        "names of its checkpoint. If a tensor does not fit, the update is refused and nothing changes. Responds when "
        "steps use the new weights.",
        body=WeightsOnDiskBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403, 500, 503),
    ),
    ("POST", "/update_weights_from_shared_memory"): DescribedOperation(
        summary="Replace the model's weights from shared memory on the server's machine",
        body=SharedWeightsBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403, 500, 503),
    ),
    ("POST", "/update_weights_from_distributed"): DescribedOperation(
        summary="Replace the model's weights from a trainer that sends them by torch.distributed",
        description="The engine must have joined the trainer's group. The trainer sends after this request.",
        body=BroadcastWeightsBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403, 500, 503),
    ),
    ("POST", "/init_weights_update_group"): DescribedOperation(
        summary="Join a trainer's group of torch.distributed",
        description="Responds when all members have joined. The trainer is rank 0, and listens at the address.",
        body=WeightGroupBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403, 503),
    ),
    ("POST", "/destroy_weights_update_group"): DescribedOperation(
        summary="Leave a trainer's group of torch.distributed",
        body=WeightGroupNameBody,
        response=response_types.WeightUpdate,
        error=response_types.WeightUpdateError,
        errors=(*READS_BODY, 403),
    ),
    ("GET", "/get_weight_version"): DescribedOperation(
        summary="Read the version of the weights in use", response=response_types.WeightVersion
    ),
    ("GET", "/weight_info"): DescribedOperation(
        summary="Read the version of the weights in use (vLLM's name)", response=response_types.WeightVersion
    ),
    ("GET", "/get_world_size"): DescribedOperation(
        summary="Count the members of a trainer's group that this engine has", response=response_types.WorldSize
    ),
    ("POST", "/sleep"): DescribedOperation(
        summary="Free memory until /wake_up",
        description="Needs the admin's key, if there are keys. Pauses first. Responds when the memory is free. "
        "New requests wait.",
        response=response_types.IsSleeping,
        errors=(400, 403, 503),
        query={
            "level": (
                "1: free the KV cache, or latents; 2: free the weights too",
                {"type": "integer", "minimum": 1, "maximum": 2, "default": 1},
            ),
            "mode": (
                "how to treat running requests: end them with their partial results, wait for them, or recompute them "
                "afterwards",
                {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
            ),
        },
    ),
    ("POST", "/wake_up"): DescribedOperation(
        summary="Allocate the memory again, and resume", response=response_types.IsSleeping, errors=(400, 403, 503)
    ),
    ("GET", "/is_sleeping"): DescribedOperation(
        summary="Say if the engine sleeps", response=response_types.IsSleeping, errors=(400, 403)
    ),
    ("POST", "/pause_generation"): DescribedOperation(
        summary="Pause (SGLang's name of /pause)",
        body=PauseBody,
        response=response_types.PauseChanged,
        errors=(*READS_BODY, 403),
    ),
    ("POST", "/continue_generation"): DescribedOperation(
        summary="Resume after a pause (SGLang's name of /resume)",
        response=response_types.PauseChanged,
        errors=(400, 403),
    ),
    ("GET", "/v1/requests"): DescribedOperation(
        summary="List running requests",
        description="Lists the requests of the caller's key, or all requests with the admin's key or without keys. "
        "Includes finished requests whose blocks are held for another engine.",
        response=response_types.LiveRequests,
    ),
    ("DELETE", "/v1/requests/{request}"): DescribedOperation(
        summary="Abort a request",
        description="Its blocks are free after the next step. A streaming client gets an error event. If the request "
        "has finished and its blocks are held for another engine, they are released.",
        response=response_types.RequestAbort,
        errors=(400, 404),
        path_parameter="the request's X-Request-Id",
    ),
    ("POST", "/v1/requests/{request}"): DescribedOperation(
        summary="End the reasoning of a running request",
        description="The model continues after the end of the reasoning. 409 if the request has no reasoning to end.",
        body=ControlBody,
        response=response_types.RequestControl,
        errors=(*READS_BODY, 404, 409),
        path_parameter="the request's X-Request-Id",
    ),
    ("POST", "/v1/requests/{request}/hand-over"): DescribedOperation(
        summary="Hand a stream over to another server",
        description="The stream ends after the step in flight at the latest, with a last complete group. If a "
        "connector holds its KV, an event then says how to fetch it. Only running streams that were requested with "
        "X-Trioserve-Resumable can be handed over; 409 otherwise.",
        response=response_types.RequestHandOver,
        errors=(400, 404, 409),
        path_parameter="the request's X-Request-Id",
    ),
    ("POST", "/v1/requests/abort"): DescribedOperation(
        summary="Abort several requests",
        description="With return_partial, the response has the partial result of each request, which can be resumed.",
        body=AbortBody,
        response=response_types.RequestAborts,
        errors=READS_BODY,
    ),
    ("POST", "/abort_request"): DescribedOperation(
        summary="Abort one request, or all of the caller (SGLang's name)",
        body=AbortRequestBody,
        response=response_types.RequestAborts,
        errors=READS_BODY,
    ),
    ("POST", "/abort_requests"): DescribedOperation(
        summary="Abort several requests (vLLM's name)",
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
        summary="Read the data that clients need to render chats and count tokens",
        response=response_types.TokenizerInfo,
    ),
    ("GET", "/kv_events"): DescribedOperation(
        summary="Stream the blocks of the prefix cache, and their changes",
        description="Sends a snapshot in one or more parts, then numbered changes. Another snapshot means that changes "
        "were missed. Needs a server with --kv-events and, if there are API keys, the admin's key. With ?load=only, it "
        "sends the load instead, as /load does: after changes at most ten times a second, and at least once a second. "
        "This works on every server, with any key.",
        response="text/event-stream",
        kinds=(ResidencySnapshot, BlocksStored, BlocksRemoved, LoadReported),
        errors=(400, 403, 404, 429, 503),
    ),
    ("GET", "/health"): DescribedOperation(
        summary="Check that the process is alive and its engine does not hang",
        response=response_types.Alive,
        not_ready=response_types.Hangs,
    ),
    ("GET", "/ready"): DescribedOperation(
        summary="Check that the server accepts requests",
        response=response_types.Ready,
        not_ready=response_types.NotReady,
    ),
    ("GET", "/load"): DescribedOperation(summary="Read the load", response=response_types.Load),
    ("GET", "/version"): DescribedOperation(summary="Version of the server", response=response_types.Version),
    ("GET", "/metrics"): DescribedOperation(summary="Metrics, in Prometheus' text format", response="text/plain"),
    ("GET", "/debug/tasks"): DescribedOperation(
        summary="Read the tree of Trio tasks with their stacks",
        description="Needs the admin's key, if there are keys.",
        response="application/json",
        errors=(400, 403),
    ),
    ("GET", "/debug/steps"): DescribedOperation(
        summary="Read the last 1,000 steps, for ui.perfetto.dev",
        description="In the Trace Event Format. Needs the admin's key, if there are keys.",
        response="application/json",
        errors=(400, 403),
    ),
    ("GET", "/openapi.json"): DescribedOperation(summary="Read this description", response="application/json"),
}
