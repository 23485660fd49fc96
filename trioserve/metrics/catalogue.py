"""All metrics: name, kind, unit, meaning, labels and aliases. Pure data.

If a metric has the same meaning as a vLLM metric, its name is our prefix and vLLM's name, and it is also shown under
vLLM's prefix. So dashboards and autoscalers made for vLLM's V1 engine work unchanged. The bucket bounds are our own.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from trioserve.contracts.deadlines import Deadline
from trioserve.contracts.endpoint import PairOutcome
from trioserve.contracts.events import FinishReason, IterativePhase, Phase
from trioserve.contracts.kv_transfer import TransferFault

__all__ = ["ALIAS_PREFIX", "CATALOGUE", "ENGINE_LABEL", "MODEL_LABEL", "PREFIX", "Label", "Metric", "Part", "Question"]

PREFIX = "trioserve:"
ALIAS_PREFIX = "vllm:"
ROUTER_PREFIX = "trioserve_router:"
ROUTER_ALIAS_PREFIX = "vllm_router:"
Part = Literal["engine", "frontend", "router", "images"]
MODEL_LABEL = "model_name"
"""Label of every series that has a prefix. The label is added when a page is written, so the instruments do not have
it.
"""
ENGINE_LABEL = "engine"
"""Label of every series of an engine, added in the same way. Its value is the engine's number in the process, which is
always 0. Dashboards use this label.
"""


class Label(msgspec.Struct, frozen=True):
    """A label of a metric.

    Attributes:
        name: name of the label.
        values: all values of the label. Each value is shown with a count of zero before its first event. Empty if the
            values depend on the configuration.
    """

    name: str
    values: tuple[str, ...] = ()


class Question(enum.Enum):
    """A question that a metric helps to answer. The documentation groups the metrics by question."""

    LOAD = "How busy is the server?"
    LATENCY = "How fast are responses?"
    STAGES = "Where does the time go?"
    WAITING = "Which requests wait, and for what?"
    SIZES = "How large are requests and responses?"
    ENDS = "How do requests end?"
    CANCELLATION = "Does cancellation work?"
    LEAKS = "Is anything leaked?"
    HANGS = "Does the engine hang or fail?"
    REFUSED = "What is refused?"
    CLIENTS = "Do clients leave or read slowly?"
    CACHE = "Is there room for KV, and does the prefix cache help?"
    SHORTCUTS = "Do speculative decoding and grammars help?"
    ADAPTERS = "Which adapters are used?"
    IMAGES = "What do input images cost?"
    IMAGE_GENERATION = "How does image generation progress?"
    TRANSFERS = "Do KV transfers between engines work?"
    HOST = "Does offloading KV to host memory and files work?"
    SURVIVAL = "Do streams survive server failures?"
    ENDPOINTS = "Are the endpoints healthy?"
    PEERS = "Do routers see each other?"
    STORED = "What is kept after its request?"
    HARDWARE = "Which hardware limit applies?"
    TELEMETRY = "Do logs and traces arrive?"


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric family.

    Attributes:
        name: name without prefix. The unit comes last, and a counter ends in `_total`.
        question: question that the metric helps to answer.
        kind: type of the metric.
        unit: unit of the metric's values.
        meaning: description in the docs and on the page.
        labels: the metric's own labels, in addition to `model_name` and `engine`.
        buckets: upper bounds of a histogram's buckets, increasing, in `unit`. Empty for other kinds.
        vllm: True if the metric is also shown under vLLM's prefix.
        others: further full names under which it is shown.
        shown_as: full name that replaces our name, for tools that expect the name of another program. Such a metric has
            only its own labels.
        part: part of the program that counts the metric.
    """

    name: str
    question: Question
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    meaning: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: bool = False
    others: tuple[str, ...] = ()
    shown_as: str | None = None
    part: Part = "engine"

    @property
    def full_name(self) -> str:
        return self.shown_as or (ROUTER_PREFIX if self.part == "router" else PREFIX) + self.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further full names under which the metric is shown."""
        prefix = ROUTER_ALIAS_PREFIX if self.part == "router" else ALIAS_PREFIX
        return (*((prefix + self.name,) if self.vllm else ()), *self.others)


# These buckets range from a token of a small model on a GPU (a millisecond) to a long prompt on a CPU (minutes).
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)
WAIT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
# An abort between steps frees its blocks within microseconds. An abort during a step takes until the end of the step.
# The buckets are fine for both cases.
FREE_SECONDS_AT_ONCE = (0.00001, 0.00002, 0.00003, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005)
FREE_SECONDS_IN_A_STEP = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
FREE_SECONDS = (*FREE_SECONDS_AT_ONCE, *FREE_SECONDS_IN_A_STEP, 0.75, 1, 2, 5, 10)
FREE_STEPS = (0, 1, 2, 5)
TOKEN_COUNTS = tuple(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_COUNTS = (1, 2, 5, 10, 20, 50, 100)
# There are few buckets, because each route and method has its own series. HTTP_SECONDS_FINE is used without labels, so
# it has many buckets.
HTTP_SECONDS = (0.1, 0.5, 1, 5, 30)
HTTP_SECONDS_FINE = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 30, 60, 120, 300)

# Phases of text requests, and of image generation (encode, denoise, decode).
_PHASE = Label("phase", tuple(dict.fromkeys(phase.value for phase in (*Phase, *IterativePhase))))
_STEP_PHASE = Label("phase", tuple(phase.value for phase in IterativePhase if phase is not IterativePhase.QUEUED))

CATALOGUE: tuple[Metric, ...] = (
    # --- shared with vLLM ---
    Metric(
        name="num_requests_running",
        question=Question.LOAD,
        kind="gauge",
        unit="sequences",
        meaning="Sequences that the engine computes now.",
        vllm=True,
    ),
    Metric(
        name="num_requests_waiting",
        question=Question.LOAD,
        kind="gauge",
        unit="sequences",
        meaning="Sequences that wait for their first or next step.",
        vllm=True,
    ),
    Metric(
        name="kv_cache_usage_perc",
        question=Question.CACHE,
        kind="gauge",
        unit="share, 0 to 1",
        meaning="Share of the KV blocks that requests use or connectors hold. Unused cached blocks count as free.",
        vllm=True,
        others=("vllm:gpu_cache_usage_perc",),
    ),
    Metric(
        name="time_to_first_token_seconds",
        question=Question.LATENCY,
        kind="histogram",
        unit="seconds",
        meaning="Time from the arrival of a request to its first token.",
        buckets=WAIT_SECONDS,
        vllm=True,
    ),
    Metric(
        name="inter_token_latency_seconds",
        question=Question.LATENCY,
        kind="histogram",
        unit="seconds",
        meaning="Time between two tokens of one sequence.",
        buckets=TOKEN_SECONDS,
        vllm=True,
        others=("vllm:time_per_output_token_seconds",),
    ),
    Metric(
        name="request_time_per_output_token_seconds",
        question=Question.LATENCY,
        kind="histogram",
        unit="seconds",
        meaning="Mean time between two tokens of a finished sequence with at least two tokens.",
        buckets=TOKEN_SECONDS,
        vllm=True,
    ),
    Metric(
        name="e2e_request_latency_seconds",
        question=Question.LATENCY,
        kind="histogram",
        unit="seconds",
        meaning="Time from the arrival of a request to its last token.",
        buckets=REQUEST_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_queue_time_seconds",
        question=Question.WAITING,
        kind="histogram",
        unit="seconds",
        meaning="Time from the arrival of a request to its first step.",
        buckets=WAIT_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_prefill_time_seconds",
        question=Question.STAGES,
        kind="histogram",
        unit="seconds",
        meaning="Time from the first step of a finished sequence to its first token, or to its vector or score.",
        buckets=WAIT_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_decode_time_seconds",
        question=Question.STAGES,
        kind="histogram",
        unit="seconds",
        meaning="Time from the first token of a finished sequence to its last token.",
        buckets=REQUEST_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_inference_time_seconds",
        question=Question.STAGES,
        kind="histogram",
        unit="seconds",
        meaning="Time from the first step of a finished sequence to its last token.",
        buckets=REQUEST_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_prompt_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="Prompt tokens of each started sequence, counted when it ends for any reason.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_prefill_kv_computed_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="Prompt tokens of each started sequence that were computed here: not found in the prefix cache, and "
        "not loaded from elsewhere.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_generation_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="Tokens sampled for each started sequence, counted when it ends for any reason.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_max_num_generation_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="Tokens sampled for the longest sequence of each request.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_params_n",
        question=Question.SIZES,
        kind="histogram",
        unit="sequences",
        meaning="Number of choices (n) of each request, counted when it ends.",
        buckets=CHOICE_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_params_max_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="Value of max_tokens of each request that sets it, counted when it ends.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="step_tokens",
        question=Question.LOAD,
        kind="histogram",
        unit="tokens",
        meaning="Tokens computed in one step: prompt tokens, output tokens and draft tokens.",
        buckets=STEP_TOKENS,
        others=("vllm:iteration_tokens_total",),
    ),
    Metric(
        name="num_requests_waiting_by_reason",
        question=Question.WAITING,
        kind="gauge",
        unit="sequences",
        meaning="Waiting sequences by reason: capacity (no room in the batch or the KV pool), or deferred (waiting "
        "for tokenization, a compiled grammar, or KV from elsewhere).",
        labels=(Label("reason", ("capacity", "deferred")),),
        vllm=True,
    ),
    Metric(
        name="engine_sleep_state",
        question=Question.HANGS,
        kind="gauge",
        unit="0 or 1",
        meaning="1 for the current state of the engine: awake, asleep without its KV cache (weights_offloaded, "
        "although the weights stay), or asleep without weights (discard_all).",
        labels=(Label("sleep_state", ("awake", "weights_offloaded", "discard_all")),),
        vllm=True,
    ),
    Metric(
        name="cache_config_info",
        question=Question.CACHE,
        kind="gauge",
        unit="1",
        meaning="Configuration of the KV cache, in labels. num_gpu_blocks is the number of blocks, also on a CPU.",
        labels=(
            Label("block_size"),
            Label("num_gpu_blocks"),
            Label("cache_dtype"),
            Label("enable_prefix_caching"),
        ),
        vllm=True,
    ),
    Metric(
        name="prompt_tokens_total",
        question=Question.LOAD,
        kind="counter",
        unit="tokens",
        meaning="Prompt tokens of started requests, including those found in the prefix cache.",
        vllm=True,
    ),
    Metric(
        name="prompt_tokens_by_source_total",
        question=Question.CACHE,
        kind="counter",
        unit="tokens",
        meaning="Prompt tokens of started requests, by the source of their KV: computed here, found in the prefix "
        "cache, or loaded from elsewhere.",
        labels=(Label("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),),
        vllm=True,
    ),
    Metric(
        name="prompt_tokens_cached_total",
        question=Question.CACHE,
        kind="counter",
        unit="tokens",
        meaning="Prompt tokens of started requests that were not computed here.",
        vllm=True,
    ),
    Metric(
        name="adapters",
        question=Question.ADAPTERS,
        kind="gauge",
        unit="adapters",
        meaning="LoRA adapters that are loading or in memory. Retired adapters have no name any more, but older "
        "requests still use them.",
        labels=(Label("state", ("loading", "ready", "retired")),),
    ),
    Metric(
        name="adapter_bytes",
        question=Question.ADAPTERS,
        kind="gauge",
        unit="bytes",
        meaning="Memory of LoRA adapters in the format that was read. The native kernels keep a second copy of the "
        "same size.",
    ),
    Metric(
        name="adapter_requests",
        question=Question.ADAPTERS,
        kind="gauge",
        unit="requests",
        meaning="Requests that use each LoRA adapter, including waiting ones.",
        labels=(Label("adapter"),),
    ),
    Metric(
        name="lora_requests_info",
        question=Question.ADAPTERS,
        kind="gauge",
        unit="seconds",
        meaning="LoRA adapters of current requests, in labels. The value is the time of the scrape, as in vLLM.",
        labels=(Label("max_lora"), Label("waiting_lora_adapters"), Label("running_lora_adapters")),
        shown_as="vllm:lora_requests_info",
    ),
    Metric(
        name="resumed_requests_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="requests",
        meaning="Requests that resumed a response that began elsewhere, or in an engine that failed.",
    ),
    Metric(
        name="resumed_tokens_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="tokens",
        meaning="Known tokens of resumed responses. They are computed like a prompt and not sampled again.",
    ),
    Metric(
        name="generation_tokens_total",
        question=Question.LOAD,
        kind="counter",
        unit="tokens",
        meaning="Tokens that were sampled.",
        vllm=True,
    ),
    Metric(
        name="prefix_cache_queries_total",
        question=Question.CACHE,
        kind="counter",
        unit="tokens",
        meaning="Prompt tokens that were looked up in the prefix cache.",
        vllm=True,
        others=("vllm:gpu_prefix_cache_queries_total",),
    ),
    Metric(
        name="prefix_cache_hits_total",
        question=Question.CACHE,
        kind="counter",
        unit="tokens",
        meaning="Prompt tokens that were found in the prefix cache.",
        vllm=True,
        others=("vllm:gpu_prefix_cache_hits_total",),
    ),
    Metric(
        name="spec_decode_num_drafts_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="drafts",
        meaning="Verified drafts: one for each sequence and step with draft tokens.",
        vllm=True,
    ),
    Metric(
        name="spec_decode_num_draft_tokens_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="tokens",
        meaning="Draft tokens that were verified.",
        vllm=True,
    ),
    Metric(
        name="spec_decode_num_accepted_tokens_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="tokens",
        meaning="Draft tokens that were accepted. Each saves a step, except one that ends its sequence.",
        vllm=True,
    ),
    Metric(
        name="request_success_total",
        question=Question.ENDS,
        kind="counter",
        unit="sequences",
        meaning="Sequences that ended, by reason. Aborts and errors are included.",
        labels=(Label("finished_reason", tuple(reason.value for reason in FinishReason)),),
        vllm=True,
    ),
    Metric(
        name="pooled_inputs_total",
        question=Question.SIZES,
        kind="counter",
        unit="inputs",
        meaning="Inputs that were turned into vectors, scores or label probabilities instead of text.",
    ),
    Metric(
        name="num_preemptions_total",
        question=Question.CACHE,
        kind="counter",
        unit="preemptions",
        meaning="Times that a running sequence lost its blocks to another one and must be computed again.",
        vllm=True,
    ),
    # --- our own ---
    Metric(
        name="kv_blocks_given_back_total",
        question=Question.CACHE,
        kind="counter",
        unit="blocks",
        meaning="KV blocks that running sequences freed because no layer's sliding window reached them any more.",
    ),
    Metric(
        name="forced_tokens_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="tokens",
        meaning="Tokens that a grammar forced, so that they were accepted without sampling.",
    ),
    Metric(
        name="form_preparation_seconds",
        question=Question.SHORTCUTS,
        kind="histogram",
        unit="seconds",
        meaning="Time to compile the schema, regex or grammar of a request, including the wait for other "
        "compilations. Cached ones are not counted.",
        buckets=WAIT_SECONDS,
    ),
    Metric(
        name="forms_compiled_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="forms",
        meaning="Schemas, regexes and grammars that were compiled.",
    ),
    Metric(
        name="form_cache_hits_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="forms",
        meaning="Schemas, regexes and grammars that were found in the cache of compiled ones.",
    ),
    Metric(
        name="mask_rows_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="rows",
        meaning="Token masks that were filled: one for each step of a sequence with a grammar, and one for each of "
        "its draft tokens.",
    ),
    Metric(
        name="mask_seconds_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="seconds",
        meaning="Time spent filling token masks, in a thread beside the forward pass.",
    ),
    Metric(
        name="rank_step_seconds_total",
        question=Question.STAGES,
        kind="counter",
        unit="seconds",
        labels=(Label("rank"),),
        meaning="Time that each rank spent computing steps, if the model is split over ranks (--tensor-parallel-size).",
    ),
    Metric(
        name="rank_together_seconds_total",
        question=Question.STAGES,
        kind="counter",
        unit="seconds",
        labels=(Label("rank"),),
        meaning="Part of rank_step_seconds_total spent in collective operations, including waiting for other ranks: "
        "the slowest rank waits least.",
    ),
    Metric(
        name="image_encoding_seconds",
        question=Question.IMAGES,
        kind="histogram",
        unit="seconds",
        meaning="Time to encode an image that was not cached, including the steps that were computed in between.",
        buckets=WAIT_SECONDS,
    ),
    Metric(
        name="image_decoders_killed_total",
        question=Question.IMAGES,
        kind="counter",
        unit="processes",
        meaning="Processes that ended while they decoded a client's image: killed after --image-decode-timeout "
        "(timeout), or ended by the kernel, a memory limit or a crash (lost).",
        labels=(Label("reason", ("timeout", "lost")),),
    ),
    Metric(
        name="image_queries_total",
        question=Question.IMAGES,
        kind="counter",
        unit="images",
        meaning="Images in prompts. An image that a prompt repeats counts once.",
    ),
    Metric(
        name="image_hits_total",
        question=Question.IMAGES,
        kind="counter",
        unit="images",
        meaning="Images in prompts that had been encoded before.",
    ),
    Metric(
        name="image_output_bytes",
        question=Question.IMAGES,
        kind="gauge",
        unit="bytes",
        meaning="Memory of encoded images: used by requests, including reservations, or cached.",
        labels=(Label("state", ("used", "cached")),),
    ),
    Metric(
        name="aborts_total",
        question=Question.CANCELLATION,
        kind="counter",
        unit="sequences",
        meaning="Sequences that were aborted (client left, abort by id, deadline), by the phase that they had reached.",
        labels=(_PHASE,),
    ),
    Metric(
        name="deadlines_passed_total",
        question=Question.CANCELLATION,
        kind="counter",
        unit="requests",
        meaning="Requests that were ended because one of their deadlines passed, by deadline.",
        labels=(Label("deadline", tuple(deadline.value for deadline in Deadline)),),
    ),
    Metric(
        name="cancel_to_free_seconds",
        question=Question.CANCELLATION,
        kind="histogram",
        unit="seconds",
        meaning="Time from an abort until the KV blocks or the latent slot were free, by the phase that the request "
        "had reached.",
        labels=(_PHASE,),
        buckets=FREE_SECONDS,
    ),
    Metric(
        name="cancel_to_free_steps",
        question=Question.CANCELLATION,
        kind="histogram",
        unit="steps",
        meaning="Engine steps that ended between an abort and the moment when the KV blocks or the latent slot were "
        "free, by the phase that the request had reached: 0 is at once, 1 is after the step in flight.",
        labels=(_PHASE,),
        buckets=FREE_STEPS,
    ),
    Metric(
        name="live_requests",
        question=Question.LOAD,
        kind="gauge",
        unit="requests",
        meaning="Requests that have entered the engine and not left it, including those that are being tokenized.",
    ),
    Metric(
        name="batch_invariant",
        question=Question.HARDWARE,
        kind="gauge",
        unit="0 or 1",
        meaning="1 if the bits of a response depend only on its own tokens and the weights (--batch-invariant).",
    ),
    Metric(
        name="weights_info",
        question=Question.HARDWARE,
        kind="gauge",
        unit="1",
        meaning="Version of the weights that steps are computed with, in a label: default until the weights are "
        "replaced.",
        labels=(Label("version"),),
    ),
    Metric(
        name="step_weight_bytes",
        question=Question.HARDWARE,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of weights that a decode step reads, independent of its number of tokens.",
    ),
    Metric(
        name="token_kv_bytes",
        question=Question.HARDWARE,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of KV cache for one token, in all layers.",
    ),
    Metric(
        name="token_flops",
        question=Question.HARDWARE,
        kind="gauge",
        unit="flops",
        meaning="Floating-point operations of the layers' matrix products for one token.",
    ),
    Metric(
        name="attended_token_flops",
        question=Question.HARDWARE,
        kind="gauge",
        unit="flops",
        meaning="Floating-point operations of attention for one token attending to one other token, in all layers.",
    ),
    Metric(
        name="engine_restarts_total",
        question=Question.HANGS,
        kind="counter",
        unit="restarts",
        meaning="Times that the engine restarted after a fault, or tried to (--engine-restarts).",
    ),
    Metric(
        name="requests_poisoned_total",
        question=Question.HANGS,
        kind="counter",
        unit="requests",
        meaning="Requests that ended with an error because they broke the engine, at least once while alone in a step.",
    ),
    Metric(
        name="large_response_bytes",
        question=Question.LEAKS,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of large non-streamed responses that are encoded and not yet sent (each at most "
        "--max-response-bytes).",
    ),
    Metric(
        name="tasks",
        question=Question.LEAKS,
        kind="gauge",
        unit="tasks",
        meaning="Trio tasks of the whole process, including the one that answers this scrape.",
    ),
    Metric(
        name="step_seconds",
        question=Question.STAGES,
        kind="histogram",
        unit="seconds",
        meaning="Time of one engine step: schedule, compute, update, deliver.",
        buckets=TOKEN_SECONDS,
    ),
    Metric(
        name="step_age_seconds",
        question=Question.HANGS,
        kind="gauge",
        unit="seconds",
        meaning="Age of the step that is computed now, 0 if there is none.",
    ),
    Metric(
        name="step_age_seconds_max",
        question=Question.HANGS,
        kind="gauge",
        unit="seconds",
        meaning="Age of a step after which /ready answers 503 and new requests are refused (--step-timeout). +Inf: no "
        "limit.",
    ),
    Metric(
        name="no_progress_seconds",
        question=Question.HANGS,
        kind="gauge",
        unit="seconds",
        meaning="Time since the last step ended while a request waits, for a step, a connector or held blocks. 0 if "
        "no request waits or runs.",
    ),
    Metric(
        name="kv_blocks",
        question=Question.CACHE,
        kind="gauge",
        unit="blocks",
        meaning="KV blocks by state. Cached blocks are unused and reusable. The states add up to the pool.",
        labels=(Label("state", ("free", "cached", "used", "held")),),
    ),
    Metric(
        name="state_slots",
        question=Question.CACHE,
        kind="gauge",
        unit="slots",
        meaning="Slots for the layer state of a whole sequence: of running sequences, and of copies that the prefix "
        "cache can find. 0 if no layer keeps such a state.",
        labels=(Label("state", ("free", "used", "copies_free", "copies_kept")),),
    ),
    Metric(
        name="transfer_faults_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="faults",
        meaning="Faults of the KV connector that the engine survived, by kind.",
        labels=(Label("kind", tuple(fault.value for fault in TransferFault)),),
    ),
    Metric(
        name="kv_transfer_blocks_sent_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="blocks",
        meaning="KV blocks that other engines have read here.",
    ),
    Metric(
        name="kv_transfer_bytes_sent_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="bytes",
        meaning="Bytes of the KV blocks that other engines have read here.",
    ),
    Metric(
        name="kv_transfer_blocks_received_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="blocks",
        meaning="KV blocks received from other engines.",
    ),
    Metric(
        name="kv_transfer_bytes_received_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="bytes",
        meaning="Bytes of the KV blocks received from other engines.",
    ),
    Metric(
        name="kv_transfer_sends_completed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose held blocks were read completely.",
    ),
    Metric(
        name="kv_transfer_sends_failed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose held blocks were released before they were read completely.",
    ),
    Metric(
        name="kv_transfer_loads_completed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose KV was loaded completely.",
    ),
    Metric(
        name="kv_transfer_load_seconds_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="seconds",
        meaning="Time of completed KV loads, from their turn until all KV was there.",
    ),
    Metric(
        name="kv_transfer_loads_failed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose KV did not arrive, or was wrong.",
    ),
    Metric(
        name="kv_transfer_sends_unwanted_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose held blocks were released because the reader left.",
    ),
    Metric(
        name="kv_transfer_sends_aborted_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose held blocks were released because the request was aborted here.",
    ),
    Metric(
        name="kv_transfer_sends_expired_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose held blocks were released because no engine read them in time.",
    ),
    Metric(
        name="kv_transfer_loads_abandoned_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests that stopped waiting for their KV.",
    ),
    Metric(
        name="kv_transfer_transfers_resumed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="transfers",
        meaning="Times that a broken KV load resumed over another connection.",
    ),
    Metric(
        name="kv_transfer_transfers_refused_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="transfers",
        meaning="Times that another engine asked for blocks that are not held, or not held for it.",
    ),
    Metric(
        name="kv_transfer_peers_refused_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="connections",
        meaning="Connections that did not prove in time that they belong to an engine, or were displaced by too many "
        "others.",
    ),
    Metric(
        name="kv_transfer_host_saved_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were copied to host memory when they left the prefix cache.",
    ),
    Metric(
        name="kv_transfer_host_saved_bytes_total",
        question=Question.HOST,
        kind="counter",
        unit="bytes",
        meaning="Bytes of the blocks that were copied to host memory.",
    ),
    Metric(
        name="kv_transfer_host_unsaved_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were not copied to host memory, because there was no room or too many copies were "
        "running.",
    ),
    Metric(
        name="kv_transfer_host_loaded_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were loaded back from host memory or files.",
    ),
    Metric(
        name="kv_transfer_host_loaded_bytes_total",
        question=Question.HOST,
        kind="counter",
        unit="bytes",
        meaning="Bytes of the blocks that were loaded back from host memory or files.",
    ),
    Metric(
        name="kv_transfer_host_loaded_from_files_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were loaded back from a file.",
    ),
    Metric(
        name="kv_transfer_host_written_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were written to files.",
    ),
    Metric(
        name="kv_transfer_host_unwritten_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were lost before they were in a file, because they left host memory or could not be "
        "written.",
    ),
    Metric(
        name="kv_transfer_host_evicted_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were evicted from host memory to make room for others.",
    ),
    Metric(
        name="kv_transfer_host_files_evicted_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Block files that were evicted from the directory to make room for others.",
    ),
    Metric(
        name="kv_transfer_host_dropped_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were dropped because they were damaged, missing, or did not match their hash.",
    ),
    Metric(
        name="kv_transfer_host_write_failures_total",
        question=Question.HOST,
        kind="counter",
        unit="failures",
        meaning="Failed attempts to write a block to disk.",
    ),
    Metric(
        name="kv_transfer_host_read_failures_total",
        question=Question.HOST,
        kind="counter",
        unit="failures",
        meaning="Failed attempts to read a block from disk.",
    ),
    Metric(
        name="kv_transfer_host_memory_bytes_used",
        question=Question.HOST,
        kind="gauge",
        unit="bytes",
        meaning="Host memory that is used by blocks.",
    ),
    Metric(
        name="kv_transfer_host_directory_bytes_used",
        question=Question.HOST,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of block files in the directory.",
    ),
    Metric(
        name="kv_transfer_heartbeats_sent_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="messages",
        meaning="Heartbeats sent to engines that hold blocks.",
    ),
    Metric(
        name="kv_transfer_heartbeats_received_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="messages",
        meaning="Heartbeats received for held blocks.",
    ),
    Metric(
        name="kv_transfer_loaded_tokens_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="tokens",
        meaning="Prompt tokens whose KV was loaded instead of computed.",
    ),
    Metric(
        name="kv_transfer_loads_waiting",
        question=Question.WAITING,
        kind="gauge",
        unit="sequences",
        meaning="Sequences that wait for KV from elsewhere.",
    ),
    Metric(
        name="kv_transfer_requests_held",
        question=Question.TRANSFERS,
        kind="gauge",
        unit="sequences",
        meaning="Answered sequences whose blocks are held for another engine.",
    ),
    Metric(
        name="kv_transfer_holds_refused_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="sequences",
        meaning="Sequences whose blocks could not be held for another engine, because the limit of held blocks was "
        "reached.",
    ),
    Metric(
        name="requests_rejected_total",
        question=Question.REFUSED,
        kind="counter",
        unit="requests",
        meaning="Requests that were refused because a limit was reached or the server is shutting down.",
        labels=(Label("reason"),),
    ),
    Metric(
        name="ignored_request_fields_total",
        question=Question.CLIENTS,
        kind="counter",
        unit="fields",
        meaning="Fields of request bodies that were ignored. X-Trioserve-Ignored in the response names them.",
        part="frontend",
    ),
    Metric(
        name="connections_open",
        question=Question.LOAD,
        kind="gauge",
        unit="connections",
        meaning="Open client connections.",
        part="frontend",
    ),
    Metric(
        name="connections_known_open",
        question=Question.LOAD,
        kind="gauge",
        unit="connections",
        meaning="Open client connections that have sent a valid API key. Some places are reserved for them.",
        part="frontend",
    ),
    Metric(
        name="connections_max",
        question=Question.LOAD,
        kind="gauge",
        unit="connections",
        meaning="Limit of open client connections: --max-connections, or what the limit of open files allows.",
        part="frontend",
    ),
    Metric(
        name="accepts_failed_total",
        question=Question.REFUSED,
        kind="counter",
        unit="connections",
        meaning="Client connections that could not be accepted at first, for lack of open files or memory.",
        part="frontend",
    ),
    Metric(
        name="connections_total",
        question=Question.LOAD,
        kind="counter",
        unit="connections",
        meaning="Client connections that were accepted.",
        part="frontend",
    ),
    Metric(
        name="connections_refused_total",
        question=Question.REFUSED,
        kind="counter",
        unit="connections",
        meaning="Client connections that were ended because a limit was reached, by limit.",
        labels=(Label("reason"),),
        part="frontend",
    ),
    Metric(
        name="streams_refused_total",
        question=Question.REFUSED,
        kind="counter",
        unit="requests",
        meaning="HTTP requests that were refused before their handler because a limit was reached, by limit.",
        labels=(Label("reason"),),
        part="frontend",
    ),
    Metric(
        name="clients_left_total",
        question=Question.CLIENTS,
        kind="counter",
        unit="requests",
        meaning="HTTP requests that were cancelled because their client left.",
        part="frontend",
    ),
    Metric(
        name="clients_stalled_total",
        question=Question.CLIENTS,
        kind="counter",
        unit="requests",
        meaning="HTTP requests that were cancelled because their client read nothing, or too little, for too long.",
        part="frontend",
    ),
    Metric(
        name="clients_slow",
        question=Question.CLIENTS,
        kind="gauge",
        unit="requests",
        meaning="HTTP requests whose client reads more slowly than its response is produced, so that bytes are "
        "buffered.",
        part="frontend",
    ),
    Metric(
        name="answer_bytes_held",
        question=Question.CLIENTS,
        kind="gauge",
        unit="bytes",
        meaning="Bytes buffered for clients that read more slowly than their responses are produced.",
        part="frontend",
    ),
    Metric(
        name="request_body_bytes_held",
        question=Question.LEAKS,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of the bodies of current requests.",
        part="frontend",
    ),
    Metric(
        name="request_body_bytes_total",
        question=Question.SIZES,
        kind="counter",
        unit="bytes",
        meaning="Bytes of request bodies that were read.",
        part="frontend",
    ),
    Metric(
        name="streams_open",
        question=Question.LOAD,
        kind="gauge",
        unit="requests",
        meaning="HTTP requests whose handler is running: HTTP/2 streams, or HTTP/1.1 requests.",
        part="frontend",
    ),
    Metric(
        name="http_requests_total",
        question=Question.ENDS,
        kind="counter",
        unit="requests",
        meaning='HTTP requests by route and status. Unknown paths are "other". Status "left": the client left before '
        "a response.",
        labels=(Label("path"), Label("status")),
        part="frontend",
    ),
    Metric(
        name="http_requests_by_handler_total",
        question=Question.ENDS,
        kind="counter",
        unit="requests",
        meaning='HTTP requests by route, method and class of status. An unknown path is "none", an unknown method '
        '"other". Status "left": the client left before a response. Requests that machines poll, such as '
        "/health and /metrics, are not counted.",
        labels=(Label("handler"), Label("method"), Label("status")),
        shown_as="http_requests_total",
        part="frontend",
    ),
    Metric(
        name="http_request_duration_seconds",
        question=Question.LATENCY,
        kind="histogram",
        unit="seconds",
        meaning="Time from the head of an HTTP request to the end of its response, by route and method. Requests that "
        "machines poll are not counted.",
        labels=(Label("handler"), Label("method")),
        buckets=HTTP_SECONDS,
        shown_as="http_request_duration_seconds",
        part="frontend",
    ),
    Metric(
        name="http_request_duration_highr_seconds",
        question=Question.LATENCY,
        kind="histogram",
        unit="seconds",
        meaning="Time from the head of an HTTP request to the end of its response, for all routes together, in finer "
        "buckets.",
        buckets=HTTP_SECONDS_FINE,
        shown_as="http_request_duration_highr_seconds",
        part="frontend",
    ),
    Metric(
        name="log_lines_dropped_total",
        question=Question.TELEMETRY,
        kind="counter",
        unit="lines",
        meaning="Log lines that were dropped because too many waited for a blocked terminal, pipe or disk.",
        part="frontend",
    ),
    Metric(
        name="trace_spans_total",
        question=Question.TELEMETRY,
        kind="counter",
        unit="spans",
        meaning="Trace spans: accepted by the collector, not accepted, or dropped because too many were waiting.",
        labels=(Label("outcome", ("exported", "failed", "dropped")),),
        part="frontend",
    ),
    Metric(
        name="batches_live",
        question=Question.STORED,
        kind="gauge",
        unit="batches",
        meaning="Batches that have not ended, including those that wait for their turn.",
        part="frontend",
    ),
    Metric(
        name="batch_lines_total",
        question=Question.STORED,
        kind="counter",
        unit="lines",
        meaning="Finished lines of batches, by the file that their result was written to.",
        labels=(Label("file", ("output", "error")),),
        part="frontend",
    ),
    # --- router ---
    Metric(
        name="queued_requests",
        question=Question.WAITING,
        kind="gauge",
        unit="requests",
        meaning="Requests that wait in the queue for an endpoint.",
        vllm=True,
        part="router",
    ),
    Metric(
        name="queue_wait_seconds",
        question=Question.WAITING,
        kind="histogram",
        unit="seconds",
        meaning="Time from the arrival of a request to its lease at an endpoint, or to its refusal in the queue.",
        buckets=WAIT_SECONDS,
        vllm=True,
        part="router",
    ),
    Metric(
        name="admissions_total",
        question=Question.LOAD,
        kind="counter",
        unit="leases",
        meaning="Leases that were granted. A retried request gets another lease.",
        vllm=True,
        part="router",
    ),
    Metric(
        name="rejections_total",
        question=Question.REFUSED,
        kind="counter",
        unit="requests",
        meaning="Requests that were refused, by the reason that was sent to the client.",
        labels=(Label("reason"),),
        vllm=True,
        part="router",
    ),
    Metric(
        name="retries_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="requests",
        meaning="Requests that were retried because an endpoint failed them, or was lost, before their first token.",
        vllm=True,
        part="router",
    ),
    Metric(
        name="peers",
        question=Question.PEERS,
        kind="gauge",
        unit="routers",
        meaning="Other routers that use the same endpoints.",
        part="router",
    ),
    Metric(
        name="peers_well",
        question=Question.PEERS,
        kind="gauge",
        unit="routers",
        meaning="Other routers that answer.",
        part="router",
    ),
    Metric(
        name="peers_lost_total",
        question=Question.PEERS,
        kind="counter",
        unit="routers",
        meaning="Times that a router which had answered stopped answering.",
        part="router",
    ),
    Metric(
        name="streams_found_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="streams",
        meaning="Client retries whose stream was still running at an endpoint and was resumed.",
        part="router",
    ),
    Metric(
        name="streams_recomputed_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="streams",
        meaning="Client retries whose stream was no longer running anywhere and was computed again.",
        part="router",
    ),
    Metric(
        name="farewells_dropped_total",
        question=Question.PEERS,
        kind="counter",
        unit="streams",
        meaning="Streams whose client left and whose endpoint was not notified, because too many notices were waiting.",
        part="router",
    ),
    Metric(
        name="stream_continuations_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="streams",
        meaning="Times that a stream that broke off got a lease to resume with.",
        part="router",
    ),
    Metric(
        name="stream_continuations_refused_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="requests",
        meaning="Streams that broke off and were not allowed to resume elsewhere, and requests without a token that "
        "are held to be the cause of their endpoints' failures.",
        labels=(Label("reason", ("poisoned", "too_many", "no_endpoint")),),
        part="router",
    ),
    Metric(
        name="stream_moves_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="streams",
        meaning="Streams that got a lease at another endpoint in order to leave one that is being emptied.",
        part="router",
    ),
    Metric(
        name="moving_requests",
        question=Question.SURVIVAL,
        kind="gauge",
        unit="requests",
        meaning="Streams at endpoints that are being emptied, which run there until another endpoint has room.",
        part="router",
    ),
    Metric(
        name="continuing_requests",
        question=Question.SURVIVAL,
        kind="gauge",
        unit="requests",
        meaning="Streams that broke off and wait for an endpoint to resume at.",
        part="router",
    ),
    Metric(
        name="streams_continued_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="streams",
        meaning="Streams that got a token from another endpoint after one had failed, by the failure.",
        labels=(Label("reason", ("broke", "hung", "leaving", "unreachable", "busy", "transfer")),),
        part="router",
    ),
    Metric(
        name="silent_responses_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="responses",
        meaning="Responses that were given up because nothing arrived over an open connection, by sign: no heartbeat, "
        "another process at the address, nothing acknowledged, or, for endpoints without heartbeats, load "
        "reports or elapsed time.",
        labels=(Label("reason", ("silent", "replaced", "unacknowledged", "not_running", "overtaken", "stalled")),),
        part="router",
    ),
    Metric(
        name="streams_not_resumable_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="streams",
        meaning="Streams that broke off and that no other endpoint could resume, by reason.",
        labels=(Label("reason", ("not_resumable", "bytes_max", "malformed", "mismatch", "refused")),),
        part="router",
    ),
    Metric(
        name="stream_pause_seconds",
        question=Question.SURVIVAL,
        kind="histogram",
        unit="seconds",
        meaning="Time from giving up a stream's endpoint to the first token from another one.",
        buckets=WAIT_SECONDS,
        part="router",
    ),
    Metric(
        name="continuation_bytes_held",
        question=Question.LEAKS,
        kind="gauge",
        unit="bytes",
        meaning="Bytes kept of running streams so that another endpoint can resume them.",
        part="router",
    ),
    Metric(
        name="endpoint_load_reports_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="reports",
        meaning="Load reports of endpoints, by whether the router asked or the endpoint sent them by itself.",
        labels=(Label("how", ("asked", "pushed")),),
        part="router",
    ),
    Metric(
        name="pairs_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose prompt and response should be computed at different endpoints, by outcome.",
        labels=(Label("outcome", tuple(outcome.value for outcome in PairOutcome)),),
        part="router",
    ),
    Metric(
        name="pair_handover_seconds",
        question=Question.TRANSFERS,
        kind="histogram",
        unit="seconds",
        meaning="Time from the end of the prompt at one endpoint to the first token at another one, for disaggregated "
        "streamed requests.",
        buckets=WAIT_SECONDS,
        part="router",
    ),
    Metric(
        name="endpoint_leases",
        question=Question.LOAD,
        kind="gauge",
        unit="sequences",
        meaning="Sequences that have a lease at the endpoint.",
        labels=(Label("endpoint"),),
        vllm=True,
        part="router",
    ),
    Metric(
        name="endpoint_in_flight",
        question=Question.LOAD,
        kind="gauge",
        unit="sequences",
        meaning="Sequences that were sent to the endpoint and have not ended.",
        labels=(Label("endpoint"),),
        vllm=True,
        part="router",
    ),
    Metric(
        name="endpoint_healthy",
        question=Question.ENDPOINTS,
        kind="gauge",
        unit="0 or 1",
        meaning="1 if the endpoint gets requests.",
        labels=(Label("endpoint"),),
        vllm=True,
        part="router",
    ),
    Metric(
        name="endpoint_resident_blocks",
        question=Question.CACHE,
        kind="gauge",
        unit="blocks",
        meaning="Blocks in the endpoint's prefix cache, as reported by the endpoint. Not shown while unknown.",
        labels=(Label("endpoint"),),
        part="router",
    ),
    Metric(
        name="endpoint_ejections_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="ejections",
        meaning="Times that the endpoint stopped getting requests because it failed.",
        labels=(Label("endpoint"),),
        vllm=True,
        part="router",
    ),
    Metric(
        name="endpoint_failures_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="requests",
        meaning="Requests that the endpoint failed, by reason: a fault (broke, unreachable, hung), a status, or a "
        "response that no inference server sends (html, redirect, content_type, not_json, not_http, empty, "
        "shape, event, no_end, key_refused).",
        labels=(Label("endpoint"), Label("reason")),
        part="router",
    ),
    Metric(
        name="endpoint_hangs_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="hangs",
        meaning="Times that the endpoint stopped getting requests because it sent nothing or its step did not end.",
        labels=(Label("endpoint"),),
        part="router",
    ),
    # --- image generation ---
    Metric(
        name="images_total",
        question=Question.IMAGE_GENERATION,
        kind="counter",
        unit="images",
        meaning="Images that were generated.",
        part="images",
    ),
    Metric(
        name="denoising_steps_total",
        question=Question.IMAGE_GENERATION,
        kind="counter",
        unit="steps",
        meaning="Denoising steps of all images, including images whose client left early.",
        part="images",
    ),
    Metric(
        name="latent_slots",
        question=Question.IMAGE_GENERATION,
        kind="gauge",
        unit="slots",
        meaning="Slots for the latents of images between two steps: of images in progress (free, used), and of "
        "preempted images (kept_free, kept_used).",
        labels=(Label("state", ("free", "used", "kept_free", "kept_used")),),
        part="images",
    ),
    Metric(
        name="time_to_first_picture_seconds",
        question=Question.IMAGE_GENERATION,
        kind="histogram",
        unit="seconds",
        meaning="Time from the arrival of a request to its first visible image: a partial or a finished one. The time "
        "to the finished image is e2e_request_latency_seconds.",
        buckets=WAIT_SECONDS,
        part="images",
    ),
    Metric(
        name="step_work",
        question=Question.IMAGE_GENERATION,
        kind="histogram",
        unit="units of work",
        meaning="Work of one step, in the units that limit a step, by phase.",
        labels=(_STEP_PHASE,),
        buckets=STEP_TOKENS,
        part="images",
    ),
    # --- stored objects and streams that continue after their request ---
    Metric(
        name="store_bytes_used",
        question=Question.STORED,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of stored responses, files and similar objects, including their database rows.",
    ),
    Metric(
        name="store_objects",
        question=Question.STORED,
        kind="gauge",
        unit="objects",
        meaning="Number of stored objects.",
    ),
    Metric(
        name="store_evicted_total",
        question=Question.STORED,
        kind="counter",
        unit="objects",
        meaning="Stored objects that were evicted before their expiry to make room for others.",
    ),
    Metric(
        name="store_refused_total",
        question=Question.STORED,
        kind="counter",
        unit="writes",
        meaning="Writes to the store that were refused for lack of room.",
    ),
    Metric(
        name="store_write_failures_total",
        question=Question.STORED,
        kind="counter",
        unit="writes",
        meaning="Writes that the store's disk refused because it was full, read-only or broken. Each retry counts.",
    ),
    Metric(
        name="store_unwritten_bytes",
        question=Question.STORED,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of final states and results that stay in memory until the store's disk accepts them.",
    ),
    Metric(
        name="background_responses",
        question=Question.STORED,
        kind="gauge",
        unit="responses",
        meaning="Background responses that are running.",
    ),
    Metric(
        name="detached_streams",
        question=Question.STORED,
        kind="gauge",
        unit="streams",
        meaning="Streams that run without a reader.",
    ),
    Metric(
        name="detached_bytes_held",
        question=Question.STORED,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of events kept for streams that may be detached.",
    ),
    Metric(
        name="router_streams",
        question=Question.SURVIVAL,
        kind="gauge",
        unit="streams",
        meaning="Streams that run on although their router is gone.",
    ),
    Metric(
        name="router_stream_bytes_held",
        question=Question.SURVIVAL,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of events kept for streams that another router may take over.",
    ),
    Metric(
        name="router_streams_taken_over_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="streams",
        meaning="Times that another router, or the same one again, resumed reading a stream whose router was gone.",
    ),
    Metric(
        name="router_streams_expired_total",
        question=Question.SURVIVAL,
        kind="counter",
        unit="streams",
        meaning="Streams whose router was gone and that were ended because no router resumed reading them in time.",
    ),
)
