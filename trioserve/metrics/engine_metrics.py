"""Metrics of an engine: its requests and steps."""

from __future__ import annotations

from typing import Annotated

from prometheus_client import Counter, Gauge

from trioserve.contracts.deadlines import Deadline
from trioserve.contracts.events import FinishReason, IterativePhase, Phase
from trioserve.metrics.metric import (
    CHOICE_COUNTS,
    FREE_SECONDS,
    FREE_STEPS,
    REQUEST_SECONDS,
    STEP_TOKENS,
    TOKEN_COUNTS,
    TOKEN_SECONDS,
    WAIT_SECONDS,
    Label,
    Metric,
    PlainHistogram,
    Question,
)

__all__ = ["EngineMetrics"]

# The label's values are the phases of text requests and of image generation (encode, denoise, decode).
_PHASE = Label("phase", tuple(dict.fromkeys(phase.value for phase in (*Phase, *IterativePhase))))


class EngineMetrics:
    """Metrics of the requests and steps of every engine."""

    num_requests_running: Annotated[
        Gauge, Metric(Question.LOAD, "sequences", "Sequences that the engine computes now.", vllm=True)
    ]
    num_requests_waiting: Annotated[
        Gauge, Metric(Question.LOAD, "sequences", "Sequences that wait for their first or next step.", vllm=True)
    ]
    time_to_first_token_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.LATENCY,
            "seconds",
            "Time from the arrival of a request to its first token.",
            buckets=WAIT_SECONDS,
            vllm=True,
        ),
    ]
    inter_token_latency_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.LATENCY,
            "seconds",
            "Time between two tokens of one sequence.",
            buckets=TOKEN_SECONDS,
            vllm=True,
            others=("vllm:time_per_output_token_seconds",),
        ),
    ]
    request_time_per_output_token_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.LATENCY,
            "seconds",
            "Mean time between two tokens of a finished sequence with at least two tokens.",
            buckets=TOKEN_SECONDS,
            vllm=True,
        ),
    ]
    e2e_request_latency_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.LATENCY,
            "seconds",
            "Time from the arrival of a request to its last token.",
            buckets=REQUEST_SECONDS,
            vllm=True,
        ),
    ]
    request_queue_time_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.WAITING,
            "seconds",
            "Time from the arrival of a request to its first step.",
            buckets=WAIT_SECONDS,
            vllm=True,
        ),
    ]
    request_prefill_time_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.STAGES,
            "seconds",
            "Time from the first step of a finished sequence to its first token, or to its vector or score.",
            buckets=WAIT_SECONDS,
            vllm=True,
        ),
    ]
    request_decode_time_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.STAGES,
            "seconds",
            "Time from the first token of a finished sequence to its last token.",
            buckets=REQUEST_SECONDS,
            vllm=True,
        ),
    ]
    request_inference_time_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.STAGES,
            "seconds",
            "Time from the first step of a finished sequence to its last token.",
            buckets=REQUEST_SECONDS,
            vllm=True,
        ),
    ]
    request_prompt_tokens: Annotated[
        PlainHistogram,
        Metric(
            Question.SIZES,
            "tokens",
            "Prompt tokens of each started sequence, counted when it ends for any reason.",
            buckets=TOKEN_COUNTS,
            vllm=True,
        ),
    ]
    request_prefill_kv_computed_tokens: Annotated[
        PlainHistogram,
        Metric(
            Question.SIZES,
            "tokens",
            "Prompt tokens of each started sequence that were computed here: not found in the prefix cache, and not"
            " loaded from elsewhere.",
            buckets=TOKEN_COUNTS,
            vllm=True,
        ),
    ]
    request_generation_tokens: Annotated[
        PlainHistogram,
        Metric(
            Question.SIZES,
            "tokens",
            "Tokens sampled for each started sequence, counted when it ends for any reason.",
            buckets=TOKEN_COUNTS,
            vllm=True,
        ),
    ]
    request_max_num_generation_tokens: Annotated[
        PlainHistogram,
        Metric(
            Question.SIZES,
            "tokens",
            "Tokens sampled for the longest sequence of each request.",
            buckets=TOKEN_COUNTS,
            vllm=True,
        ),
    ]
    request_params_n: Annotated[
        PlainHistogram,
        Metric(
            Question.SIZES,
            "sequences",
            "Number of choices (n) of each request, counted when it ends.",
            buckets=CHOICE_COUNTS,
            vllm=True,
        ),
    ]
    request_params_max_tokens: Annotated[
        PlainHistogram,
        Metric(
            Question.SIZES,
            "tokens",
            "Value of max_tokens of each request that sets it, counted when it ends.",
            buckets=TOKEN_COUNTS,
            vllm=True,
        ),
    ]
    step_tokens: Annotated[
        PlainHistogram,
        Metric(
            Question.LOAD,
            "tokens",
            "Tokens computed in one step: prompt tokens, output tokens and draft tokens.",
            buckets=STEP_TOKENS,
            others=("vllm:iteration_tokens_total",),
        ),
    ]
    num_requests_waiting_by_reason: Annotated[
        Gauge,
        Metric(
            Question.WAITING,
            "sequences",
            "Waiting sequences by reason: capacity (no room in the batch or the KV pool), or deferred (waiting for "
            "tokenization, a compiled grammar, or KV from elsewhere).",
            labels=(Label("reason", ("capacity", "deferred")),),
            vllm=True,
        ),
    ]
    engine_sleep_state: Annotated[
        Gauge,
        Metric(
            Question.HANGS,
            "0 or 1",
            "1 for the current state of the engine: awake, asleep without its KV cache (weights_offloaded, although"
            " the weights stay), or asleep without weights (discard_all).",
            labels=(Label("sleep_state", ("awake", "weights_offloaded", "discard_all")),),
            vllm=True,
        ),
    ]
    prompt_tokens_total: Annotated[
        Counter,
        Metric(
            Question.LOAD,
            "tokens",
            "Prompt tokens of started requests, including those found in the prefix cache.",
            vllm=True,
        ),
    ]
    adapters: Annotated[
        Gauge,
        Metric(
            Question.ADAPTERS,
            "adapters",
            "LoRA adapters that are loading or in memory. Retired adapters have no name any more, but older "
            "requests still use them.",
            labels=(Label("state", ("loading", "ready", "retired")),),
        ),
    ]
    adapter_bytes: Annotated[
        Gauge,
        Metric(
            Question.ADAPTERS,
            "bytes",
            "Memory of LoRA adapters in the format that was read. The native kernels keep a second copy of the same"
            " size.",
        ),
    ]
    adapter_requests: Annotated[
        Gauge,
        Metric(
            Question.ADAPTERS,
            "requests",
            "Requests that use each LoRA adapter, including waiting ones.",
            labels=(Label("adapter"),),
        ),
    ]
    lora_requests_info: Annotated[
        Gauge,
        Metric(
            Question.ADAPTERS,
            "seconds",
            "LoRA adapters of current requests, in labels. The value is the time of the scrape, as in vLLM.",
            labels=(Label("max_lora"), Label("waiting_lora_adapters"), Label("running_lora_adapters")),
            shown_as="vllm:lora_requests_info",
        ),
    ]
    generation_tokens_total: Annotated[Counter, Metric(Question.LOAD, "tokens", "Tokens that were sampled.", vllm=True)]
    spec_decode_num_drafts_total: Annotated[
        Counter,
        Metric(
            Question.SHORTCUTS,
            "drafts",
            "Verified drafts: one for each sequence and step with draft tokens.",
            vllm=True,
        ),
    ]
    spec_decode_num_draft_tokens_total: Annotated[
        Counter, Metric(Question.SHORTCUTS, "tokens", "Draft tokens that were verified.", vllm=True)
    ]
    spec_decode_num_accepted_tokens_total: Annotated[
        Counter,
        Metric(
            Question.SHORTCUTS,
            "tokens",
            "Draft tokens that were accepted. Each saves a step, except one that ends its sequence.",
            vllm=True,
        ),
    ]
    request_success_total: Annotated[
        Counter,
        Metric(
            Question.ENDS,
            "sequences",
            "Sequences that ended, by reason. Aborts and errors are included.",
            labels=(Label("finished_reason", tuple(reason.value for reason in FinishReason)),),
            vllm=True,
        ),
    ]
    pooled_inputs_total: Annotated[
        Counter,
        Metric(
            Question.SIZES,
            "inputs",
            "Inputs that were turned into vectors, scores or label probabilities instead of text.",
        ),
    ]
    forced_tokens_total: Annotated[
        Counter,
        Metric(
            Question.SHORTCUTS,
            "tokens",
            "Tokens that a grammar forced, so that they were accepted without sampling.",
        ),
    ]
    form_preparation_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.SHORTCUTS,
            "seconds",
            "Time to compile the schema, regex or grammar of a request, including the wait for other compilations. "
            "Cached ones are not counted.",
            buckets=WAIT_SECONDS,
        ),
    ]
    forms_compiled_total: Annotated[
        Counter, Metric(Question.SHORTCUTS, "forms", "Schemas, regexes and grammars that were compiled.")
    ]
    form_cache_hits_total: Annotated[
        Counter,
        Metric(
            Question.SHORTCUTS,
            "forms",
            "Schemas, regexes and grammars that were found in the cache of compiled ones.",
        ),
    ]
    mask_rows_total: Annotated[
        Counter,
        Metric(
            Question.SHORTCUTS,
            "rows",
            "Token masks that were filled: one for each step of a sequence with a grammar, and one for each of its "
            "draft tokens.",
        ),
    ]
    mask_seconds_total: Annotated[
        Counter,
        Metric(
            Question.SHORTCUTS,
            "seconds",
            "Time spent filling token masks, in a thread beside the forward pass.",
        ),
    ]
    rank_step_seconds_total: Annotated[
        Counter,
        Metric(
            Question.STAGES,
            "seconds",
            "Time that each rank spent computing steps, if the model is split over ranks (--tensor-parallel-size).",
            labels=(Label("rank"),),
        ),
    ]
    rank_together_seconds_total: Annotated[
        Counter,
        Metric(
            Question.STAGES,
            "seconds",
            "Part of rank_step_seconds_total spent in collective operations, including waiting for other ranks: the"
            " slowest rank waits least.",
            labels=(Label("rank"),),
        ),
    ]
    aborts_total: Annotated[
        Counter,
        Metric(
            Question.CANCELLATION,
            "sequences",
            "Sequences that were aborted (client left, abort by id, deadline), by the phase that they had reached.",
            labels=(_PHASE,),
        ),
    ]
    deadlines_passed_total: Annotated[
        Counter,
        Metric(
            Question.CANCELLATION,
            "requests",
            "Requests that were ended because one of their deadlines passed, by deadline.",
            labels=(Label("deadline", tuple(deadline.value for deadline in Deadline)),),
        ),
    ]
    cancel_to_free_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.CANCELLATION,
            "seconds",
            "Time from an abort until the KV blocks or the latent slot were free, by the phase that the request had"
            " reached.",
            labels=(_PHASE,),
            buckets=FREE_SECONDS,
        ),
    ]
    cancel_to_free_steps: Annotated[
        PlainHistogram,
        Metric(
            Question.CANCELLATION,
            "steps",
            "Engine steps that ended between an abort and the moment when the KV blocks or the latent slot were "
            "free, by the phase that the request had reached: 0 is at once, 1 is after the step in flight.",
            labels=(_PHASE,),
            buckets=FREE_STEPS,
        ),
    ]
    live_requests: Annotated[
        Gauge,
        Metric(
            Question.LOAD,
            "requests",
            "Requests that have entered the engine and not left it, including those that are being tokenized.",
        ),
    ]
    batch_invariant: Annotated[
        Gauge,
        Metric(
            Question.HARDWARE,
            "0 or 1",
            "1 if the bits of a response depend only on its own tokens and the weights (--batch-invariant).",
        ),
    ]
    weights_info: Annotated[
        Gauge,
        Metric(
            Question.HARDWARE,
            "1",
            "Version of the weights that steps are computed with, in a label: default until the weights are replaced.",
            labels=(Label("version"),),
        ),
    ]
    step_weight_bytes: Annotated[
        Gauge,
        Metric(
            Question.HARDWARE,
            "bytes",
            "Bytes of weights that a decode step reads, independent of its number of tokens.",
        ),
    ]
    token_kv_bytes: Annotated[
        Gauge, Metric(Question.HARDWARE, "bytes", "Bytes of KV cache for one token, in all layers.")
    ]
    token_flops: Annotated[
        Gauge,
        Metric(
            Question.HARDWARE,
            "flops",
            "Floating-point operations of the layers' matrix products for one token.",
        ),
    ]
    attended_token_flops: Annotated[
        Gauge,
        Metric(
            Question.HARDWARE,
            "flops",
            "Floating-point operations of attention for one token attending to one other token, in all layers.",
        ),
    ]
    engine_restarts_total: Annotated[
        Counter,
        Metric(
            Question.HANGS,
            "restarts",
            "Times that the engine restarted after a fault, or tried to (--engine-restarts).",
        ),
    ]
    requests_poisoned_total: Annotated[
        Counter,
        Metric(
            Question.HANGS,
            "requests",
            "Requests that ended with an error because they broke the engine, at least once while alone in a step.",
        ),
    ]
    large_response_bytes: Annotated[
        Gauge,
        Metric(
            Question.LEAKS,
            "bytes",
            "Bytes of large non-streamed responses that are encoded and not yet sent (each at most --max-response-"
            "bytes).",
        ),
    ]
    tasks: Annotated[
        Gauge,
        Metric(
            Question.LEAKS,
            "tasks",
            "Trio tasks of the whole process, including the one that answers this scrape.",
        ),
    ]
    step_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.STAGES,
            "seconds",
            "Time of one engine step: schedule, compute, update, deliver.",
            buckets=TOKEN_SECONDS,
        ),
    ]
    step_age_seconds: Annotated[
        Gauge, Metric(Question.HANGS, "seconds", "Age of the step that is computed now, 0 if there is none.")
    ]
    step_age_seconds_max: Annotated[
        Gauge,
        Metric(
            Question.HANGS,
            "seconds",
            "Age of a step after which /ready answers 503 and new requests are refused (--step-timeout). +Inf: no "
            "limit.",
        ),
    ]
    no_progress_seconds: Annotated[
        Gauge,
        Metric(
            Question.HANGS,
            "seconds",
            "Time since the last step ended while a request waits, for a step, a connector or held blocks. 0 if no "
            "request waits or runs.",
        ),
    ]
    kv_transfer_loads_waiting: Annotated[
        Gauge, Metric(Question.WAITING, "sequences", "Sequences that wait for KV from elsewhere.")
    ]
    requests_rejected_total: Annotated[
        Counter,
        Metric(
            Question.REFUSED,
            "requests",
            "Requests that were refused because a limit was reached or the server is shutting down.",
            labels=(Label("reason"),),
        ),
    ]
