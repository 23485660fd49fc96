"""Every metric: its name, kind, unit and meaning, its labels, and the names others know it by. Pure data.

Where vLLM has a metric of the same meaning it carries vLLM's name behind our prefix and is also shown under theirs, so
that dashboards and autoscalers made for vLLM's V1 engine read trioserve unchanged. Bucket bounds are our own.
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
"""On every series under a prefix, added when it is shown; the instruments do not know it."""
ENGINE_LABEL = "engine"
"""On every series of an engine, added in the same way: its number in the process, which others filter by. Always 0."""


class Label(msgspec.Struct, frozen=True):
    """values: all that it can take, shown as zero before they first happen; empty where only the user knows them."""

    name: str
    values: tuple[str, ...] = ()


class Question(enum.Enum):
    """What one looks at a metric for; the documents list them by it."""

    LOAD = "How busy is it?"
    FEEL = "How does it feel?"
    STAGES = "Where does the time go?"
    WAITING = "Who waits, and for what?"
    SIZES = "What is asked for?"
    ENDS = "How do requests end?"
    STOPS = "Does it stop?"
    LEFT_BEHIND = "Is anything left behind?"
    HANGS = "Does it hang, or break?"
    REFUSED = "What is refused?"
    CLIENTS = "Do clients leave, or read slowly?"
    CACHE = "Is there room for KV, and does the prefix cache help?"
    SHORTCUTS = "Do drafts and forms help?"
    ADAPTERS = "Who uses which adapter?"
    IMAGES = "What do images cost?"
    PICTURES = "How do pictures come along?"
    TRANSFERS = "Does KV get from one engine to another?"
    HOST = "Does KV get to the host's memory, and back?"
    SURVIVES = "Do streams survive their servers?"
    ENDPOINTS = "Are the endpoints well?"
    PEERS = "Do routers see each other?"
    LASTING = "What outlives its request?"
    HARDWARE = "What is it bound by?"
    TOLD = "Is everything told?"


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One family. name: without prefix, with the unit last, and `_total` for a counter. question: that it answers, or
    helps to answer.

    buckets: upper bounds of a histogram, in `unit`, growing. vllm: also shown under vLLM's prefix. others: further
    names, in full, under which it is shown. shown_as: its full name where it has none of ours, since it is there for
    those who know it by another one; such a metric has its own labels alone. part: who counts it.
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
        """Full names under which others know this metric."""
        prefix = ROUTER_ALIAS_PREFIX if self.part == "router" else ALIAS_PREFIX
        return (*((prefix + self.name,) if self.vllm else ()), *self.others)


# A token of a small model on a GPU takes a millisecond, a long prompt on a CPU minutes.
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10)
WAIT_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
# An abort that frees at once takes microseconds, one that waits for its step as long as the rest of it: fine for both.
FREE_SECONDS_AT_ONCE = (0.00001, 0.00002, 0.00003, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005)
FREE_SECONDS_IN_A_STEP = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
FREE_SECONDS = (*FREE_SECONDS_AT_ONCE, *FREE_SECONDS_IN_A_STEP, 0.75, 1, 2, 5, 10)
FREE_STEPS = (0, 1, 2, 5)
TOKEN_COUNTS = tuple(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_COUNTS = (1, 2, 5, 10, 20, 50, 100)
# By route and method, so few; without labels, many.
HTTP_SECONDS = (0.1, 0.5, 1, 5, 30)
HTTP_SECONDS_FINE = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 30, 60, 120, 300)

# Of texts, and of pictures: those are encoded, denoised and decoded.
_PHASE = Label("phase", tuple(dict.fromkeys(phase.value for phase in (*Phase, *IterativePhase))))
_STEP_PHASE = Label("phase", tuple(phase.value for phase in IterativePhase if phase is not IterativePhase.QUEUED))

CATALOGUE: tuple[Metric, ...] = (
    # --- shared with vLLM ---
    Metric(
        name="num_requests_running",
        question=Question.LOAD,
        kind="gauge",
        unit="sequences",
        meaning="Sequences that the engine computes at this moment.",
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
        meaning="Share of the pool that requests use or connectors hold. Cached blocks that nobody uses are free.",
        vllm=True,
        others=("vllm:gpu_cache_usage_perc",),
    ),
    Metric(
        name="time_to_first_token_seconds",
        question=Question.FEEL,
        kind="histogram",
        unit="seconds",
        meaning="From a request's arrival to its first token.",
        buckets=WAIT_SECONDS,
        vllm=True,
    ),
    Metric(
        name="inter_token_latency_seconds",
        question=Question.FEEL,
        kind="histogram",
        unit="seconds",
        meaning="Between two tokens of one sequence.",
        buckets=TOKEN_SECONDS,
        vllm=True,
        others=("vllm:time_per_output_token_seconds",),
    ),
    Metric(
        name="request_time_per_output_token_seconds",
        question=Question.FEEL,
        kind="histogram",
        unit="seconds",
        meaning="Mean time between two tokens, of each sequence that was finished and has at least two.",
        buckets=TOKEN_SECONDS,
        vllm=True,
    ),
    Metric(
        name="e2e_request_latency_seconds",
        question=Question.FEEL,
        kind="histogram",
        unit="seconds",
        meaning="From a request's arrival to its last token.",
        buckets=REQUEST_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_queue_time_seconds",
        question=Question.WAITING,
        kind="histogram",
        unit="seconds",
        meaning="From a request's arrival to its first step.",
        buckets=WAIT_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_prefill_time_seconds",
        question=Question.STAGES,
        kind="histogram",
        unit="seconds",
        meaning="From a sequence's first step to its first token, or to its vector or score; of those that were "
        "finished.",
        buckets=WAIT_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_decode_time_seconds",
        question=Question.STAGES,
        kind="histogram",
        unit="seconds",
        meaning="From a sequence's first token to its last; of those that were finished.",
        buckets=REQUEST_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_inference_time_seconds",
        question=Question.STAGES,
        kind="histogram",
        unit="seconds",
        meaning="From a sequence's first step to its last token; of those that were finished.",
        buckets=REQUEST_SECONDS,
        vllm=True,
    ),
    Metric(
        name="request_prompt_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="Prompt of each sequence that was started, counted when it ends, however that is.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_prefill_kv_computed_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="The same without what was found in the prefix cache or loaded from elsewhere.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_generation_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="Tokens that were sampled for each sequence that was started, counted when it ends, however that is.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_max_num_generation_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="Tokens that were sampled for the longest sequence of each request.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_params_n",
        question=Question.SIZES,
        kind="histogram",
        unit="sequences",
        meaning="How many choices requests asked for (n), counted when they end.",
        buckets=CHOICE_COUNTS,
        vllm=True,
    ),
    Metric(
        name="request_params_max_tokens",
        question=Question.SIZES,
        kind="histogram",
        unit="tokens",
        meaning="How many tokens requests asked for at most (max_tokens), of those that did, counted when they end.",
        buckets=TOKEN_COUNTS,
        vllm=True,
    ),
    Metric(
        name="step_tokens",
        question=Question.LOAD,
        kind="histogram",
        unit="tokens",
        meaning="Tokens that a step computed: of prompts, of responses, and drafts.",
        buckets=STEP_TOKENS,
        others=("vllm:iteration_tokens_total",),
    ),
    Metric(
        name="num_requests_waiting_by_reason",
        question=Question.WAITING,
        kind="gauge",
        unit="sequences",
        meaning="Of those that wait: for room in the batch or in the pool (capacity), or for their tokens, their form "
        "or their KV from elsewhere (deferred).",
        labels=(Label("reason", ("capacity", "deferred")),),
        vllm=True,
    ),
    Metric(
        name="engine_sleep_state",
        question=Question.HANGS,
        kind="gauge",
        unit="0 or 1",
        meaning="Whether the engine is awake, sleeps without its KV cache (weights_offloaded, though they stay), or "
        "sleeps without weights, too (discard_all).",
        labels=(Label("sleep_state", ("awake", "weights_offloaded", "discard_all")),),
        vllm=True,
    ),
    Metric(
        name="cache_config_info",
        question=Question.CACHE,
        kind="gauge",
        unit="1",
        meaning="The KV cache that the engine was opened with, in labels. num_gpu_blocks counts its blocks, also those "
        "on a CPU.",
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
        meaning="Prompt tokens of requests that were started, those from the prefix cache included.",
        vllm=True,
    ),
    Metric(
        name="prompt_tokens_by_source_total",
        question=Question.CACHE,
        kind="counter",
        unit="tokens",
        meaning="The same tokens by where their KV came from: computed here, found in the prefix cache, or loaded from "
        "elsewhere.",
        labels=(Label("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),),
        vllm=True,
    ),
    Metric(
        name="prompt_tokens_cached_total",
        question=Question.CACHE,
        kind="counter",
        unit="tokens",
        meaning="Of these tokens, those that were not computed here.",
        vllm=True,
    ),
    Metric(
        name="adapters",
        question=Question.ADAPTERS,
        kind="gauge",
        unit="adapters",
        meaning="LoRA adapters in memory, or on their way there; retired ones have no name any more, and are used by "
        "requests that had them before.",
        labels=(Label("state", ("loading", "ready", "retired")),),
    ),
    Metric(
        name="adapter_bytes",
        question=Question.ADAPTERS,
        kind="gauge",
        unit="bytes",
        meaning="Memory of LoRA adapters as they were read; the native kernels keep as much once more.",
    ),
    Metric(
        name="adapter_requests",
        question=Question.ADAPTERS,
        kind="gauge",
        unit="requests",
        meaning="Requests that have each LoRA adapter, waiting ones included.",
        labels=(Label("adapter"),),
    ),
    Metric(
        name="lora_requests_info",
        question=Question.ADAPTERS,
        kind="gauge",
        unit="seconds",
        meaning="Which LoRA adapters requests have, in labels; the value is the time of the scrape, as vLLM's is.",
        labels=(Label("max_lora"), Label("waiting_lora_adapters"), Label("running_lora_adapters")),
        shown_as="vllm:lora_requests_info",
    ),
    Metric(
        name="resumed_requests_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="requests",
        meaning="Requests that went on behind a response that began elsewhere, or in an engine that broke.",
    ),
    Metric(
        name="resumed_tokens_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="tokens",
        meaning="Tokens of such responses that were known: computed as a prompt is, and not drawn again.",
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
        meaning="Drafts that were verified: one for each sequence and step that drafted.",
        vllm=True,
    ),
    Metric(
        name="spec_decode_num_draft_tokens_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="tokens",
        meaning="Tokens of these drafts.",
        vllm=True,
    ),
    Metric(
        name="spec_decode_num_accepted_tokens_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="tokens",
        meaning="Those of them that were right, each a step saved; one that ends its sequence saves none.",
        vllm=True,
    ),
    Metric(
        name="request_success_total",
        question=Question.ENDS,
        kind="counter",
        unit="sequences",
        meaning="Sequences that ended, by the reason why.",
        labels=(Label("finished_reason", tuple(reason.value for reason in FinishReason)),),
        vllm=True,
    ),
    Metric(
        name="pooled_inputs_total",
        question=Question.SIZES,
        kind="counter",
        unit="inputs",
        meaning="Inputs that became vectors, scores or probabilities of labels, instead of being continued.",
    ),
    Metric(
        name="num_preemptions_total",
        question=Question.CACHE,
        kind="counter",
        unit="preemptions",
        meaning="Times a running sequence lost its blocks to another one and has to be computed again.",
        vllm=True,
    ),
    # --- our own ---
    Metric(
        name="kv_blocks_given_back_total",
        question=Question.CACHE,
        kind="counter",
        unit="blocks",
        meaning="KV blocks that running sequences gave back, since no layer's sliding window reached them any more.",
    ),
    Metric(
        name="forced_tokens_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="tokens",
        meaning="Tokens that the form of a response forced, and that were taken without being sampled.",
    ),
    Metric(
        name="form_preparation_seconds",
        question=Question.SHORTCUTS,
        kind="histogram",
        unit="seconds",
        meaning="Compiling what a request's tokens are to keep to, waiting for other compiles included; of those that "
        "were not at hand.",
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
        meaning="Schemas, regexes and grammars that were found compiled.",
    ),
    Metric(
        name="mask_rows_total",
        question=Question.SHORTCUTS,
        kind="counter",
        unit="rows",
        meaning="Token masks that were filled: one for each sequence with a form and step, and one for each of its "
        "draft tokens.",
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
        meaning="Time that each rank has computed steps, where the model is in several (--tensor-parallel-size).",
    ),
    Metric(
        name="rank_together_seconds_total",
        question=Question.STAGES,
        kind="counter",
        unit="seconds",
        labels=(Label("rank"),),
        meaning="Of that, in what ranks do together, waiting for each other included: the slowest rank waits least.",
    ),
    Metric(
        name="image_encoding_seconds",
        question=Question.IMAGES,
        kind="histogram",
        unit="seconds",
        meaning="What it took to encode an image that was not at hand, with the steps that were computed between.",
        buckets=WAIT_SECONDS,
    ),
    Metric(
        name="image_decoders_killed_total",
        question=Question.IMAGES,
        kind="counter",
        unit="processes",
        meaning="Processes that ended while they decoded a client's image: killed at --image-decode-timeout (timeout), "
        "or by the kernel, a limit on memory or a crash (lost).",
        labels=(Label("reason", ("timeout", "lost")),),
    ),
    Metric(
        name="image_queries_total",
        question=Question.IMAGES,
        kind="counter",
        unit="images",
        meaning="Images of prompts, each once for a prompt.",
    ),
    Metric(
        name="image_hits_total",
        question=Question.IMAGES,
        kind="counter",
        unit="images",
        meaning="Of these, the ones that had been encoded before.",
    ),
    Metric(
        name="image_output_bytes",
        question=Question.IMAGES,
        kind="gauge",
        unit="bytes",
        meaning="What encoded images take: used by requests, those to come included, or cached.",
        labels=(Label("state", ("used", "cached")),),
    ),
    Metric(
        name="aborts_total",
        question=Question.STOPS,
        kind="counter",
        unit="sequences",
        meaning="Sequences that were aborted (client left, abort by id, deadline), by how far they had come.",
        labels=(_PHASE,),
    ),
    Metric(
        name="deadlines_passed_total",
        question=Question.STOPS,
        kind="counter",
        unit="requests",
        meaning="Requests that were ended because one of their deadlines passed, by which.",
        labels=(Label("deadline", tuple(deadline.value for deadline in Deadline)),),
    ),
    Metric(
        name="cancel_to_free_seconds",
        question=Question.STOPS,
        kind="histogram",
        unit="seconds",
        meaning="From an abort to the moment when its KV blocks, or its latent slot, were free, by how far the request "
        "had come.",
        labels=(_PHASE,),
        buckets=FREE_SECONDS,
    ),
    Metric(
        name="cancel_to_free_steps",
        question=Question.STOPS,
        kind="histogram",
        unit="steps",
        meaning="Engine steps that ended between an abort and the moment when its KV blocks, or its latent slot, were "
        "free: 0 at once, 1 after the step in flight. By how far the request had come.",
        labels=(_PHASE,),
        buckets=FREE_STEPS,
    ),
    Metric(
        name="live_requests",
        question=Question.LOAD,
        kind="gauge",
        unit="requests",
        meaning="Requests that have entered the engine and not left it, from before they are tokenized on.",
    ),
    Metric(
        name="batch_invariant",
        question=Question.HARDWARE,
        kind="gauge",
        unit="0 or 1",
        meaning="Whether the bits of a response depend on its own tokens and the weights alone (--batch-invariant).",
    ),
    Metric(
        name="weights_info",
        question=Question.HARDWARE,
        kind="gauge",
        unit="1",
        meaning="The version of the weights that steps are computed with, in a label: default until they are replaced.",
        labels=(Label("version"),),
    ),
    Metric(
        name="step_weight_bytes",
        question=Question.HARDWARE,
        kind="gauge",
        unit="bytes",
        meaning="What a decode step has to read of the weights, however few tokens it has.",
    ),
    Metric(
        name="token_kv_bytes",
        question=Question.HARDWARE,
        kind="gauge",
        unit="bytes",
        meaning="What the KV cache keeps of one token, in all layers.",
    ),
    Metric(
        name="token_flops",
        question=Question.HARDWARE,
        kind="gauge",
        unit="flops",
        meaning="What the layers' matrix products of one token take.",
    ),
    Metric(
        name="attended_token_flops",
        question=Question.HARDWARE,
        kind="gauge",
        unit="flops",
        meaning="What attention takes for one token that another one sees, in all layers.",
    ),
    Metric(
        name="engine_restarts_total",
        question=Question.HANGS,
        kind="counter",
        unit="restarts",
        meaning="Times that the engine was opened anew after a fault, or was to be (--engine-restarts).",
    ),
    Metric(
        name="requests_poisoned_total",
        question=Question.HANGS,
        kind="counter",
        unit="requests",
        meaning="Requests ended with an error since they broke the engine, at least once in a step of their own.",
    ),
    Metric(
        name="large_response_bytes",
        question=Question.LEFT_BEHIND,
        kind="gauge",
        unit="bytes",
        meaning="Bytes of large whole responses that are encoded and not yet sent (each at most --max-response-bytes).",
    ),
    Metric(
        name="tasks",
        question=Question.LEFT_BEHIND,
        kind="gauge",
        unit="tasks",
        meaning="Trio tasks of the whole process, the one that answers this scrape included.",
    ),
    Metric(
        name="step_seconds",
        question=Question.STAGES,
        kind="histogram",
        unit="seconds",
        meaning="One engine step: schedule, compute, update, deliver.",
        buckets=TOKEN_SECONDS,
    ),
    Metric(
        name="step_age_seconds",
        question=Question.HANGS,
        kind="gauge",
        unit="seconds",
        meaning="Age of the step that is computed at this moment; 0 if none is.",
    ),
    Metric(
        name="step_age_seconds_max",
        question=Question.HANGS,
        kind="gauge",
        unit="seconds",
        meaning="Age of a step beyond which /ready says 503 and new requests are refused (--step-timeout); +Inf: none.",
    ),
    Metric(
        name="no_progress_seconds",
        question=Question.HANGS,
        kind="gauge",
        unit="seconds",
        meaning="How long somebody has waited since the last step ended, be it for a step, a connector, or blocks that "
        "are held; 0 if nobody waits or runs.",
    ),
    Metric(
        name="kv_blocks",
        question=Question.CACHE,
        kind="gauge",
        unit="blocks",
        meaning="KV blocks by state. Cached ones are used by nobody, and reusable; the states add up to the pool.",
        labels=(Label("state", ("free", "cached", "used", "held")),),
    ),
    Metric(
        name="state_slots",
        question=Question.CACHE,
        kind="gauge",
        unit="slots",
        meaning="Slots for what layers keep of a whole sequence: of sequences that run, and of copies that the prefix "
        "cache can find. 0 where no layer keeps a state.",
        labels=(Label("state", ("free", "used", "copies_free", "copies_kept")),),
    ),
    Metric(
        name="transfer_faults_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="faults",
        meaning="What went wrong with the KV connector and was survived, by kind.",
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
        meaning="Bytes of these blocks.",
    ),
    Metric(
        name="kv_transfer_blocks_received_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="blocks",
        meaning="KV blocks that came from other engines.",
    ),
    Metric(
        name="kv_transfer_bytes_received_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="bytes",
        meaning="Bytes of these blocks.",
    ),
    Metric(
        name="kv_transfer_sends_completed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose held blocks were read to the end.",
    ),
    Metric(
        name="kv_transfer_sends_failed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose held blocks were let go before they were read to the end.",
    ),
    Metric(
        name="kv_transfer_loads_completed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose KV came.",
    ),
    Metric(
        name="kv_transfer_load_seconds_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="seconds",
        meaning="What these took from their turn until all of it was there.",
    ),
    Metric(
        name="kv_transfer_loads_failed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests whose KV did not come, or not right.",
    ),
    Metric(
        name="kv_transfer_sends_unwanted_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Of these: their reader left.",
    ),
    Metric(
        name="kv_transfer_sends_aborted_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Of these: they were aborted here.",
    ),
    Metric(
        name="kv_transfer_sends_expired_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Of these: nobody read them in time.",
    ),
    Metric(
        name="kv_transfer_loads_abandoned_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests that did not wait for their KV any more.",
    ),
    Metric(
        name="kv_transfer_transfers_resumed_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="transfers",
        meaning="Times a load went on over another connection where it had broken off.",
    ),
    Metric(
        name="kv_transfer_transfers_refused_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="transfers",
        meaning="Times another engine asked for blocks that are not held, or not for it.",
    ),
    Metric(
        name="kv_transfer_peers_refused_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="connections",
        meaning="Connections that did not prove that they are an engine's, or not before too many others came.",
    ),
    Metric(
        name="kv_transfer_host_saved_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were copied into the host's memory as they left the prefix cache.",
    ),
    Metric(
        name="kv_transfer_host_saved_bytes_total",
        question=Question.HOST,
        kind="counter",
        unit="bytes",
        meaning="Bytes of these blocks.",
    ),
    Metric(
        name="kv_transfer_host_unsaved_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were not: there was no room, or too much was being copied.",
    ),
    Metric(
        name="kv_transfer_host_loaded_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that came back from the host.",
    ),
    Metric(
        name="kv_transfer_host_loaded_bytes_total",
        question=Question.HOST,
        kind="counter",
        unit="bytes",
        meaning="Bytes of these blocks.",
    ),
    Metric(
        name="kv_transfer_host_loaded_from_files_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Of these blocks: those that had to be read from a file.",
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
        meaning="Blocks that left the host's memory, or could not be written, before they were in a file.",
    ),
    Metric(
        name="kv_transfer_host_evicted_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that made room for others in the host's memory.",
    ),
    Metric(
        name="kv_transfer_host_files_evicted_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Files of blocks that made room for others in the directory.",
    ),
    Metric(
        name="kv_transfer_host_dropped_total",
        question=Question.HOST,
        kind="counter",
        unit="blocks",
        meaning="Blocks that were damaged, gone, or not what their name said.",
    ),
    Metric(
        name="kv_transfer_host_write_failures_total",
        question=Question.HOST,
        kind="counter",
        unit="failures",
        meaning="Times the disk did not take a block.",
    ),
    Metric(
        name="kv_transfer_host_read_failures_total",
        question=Question.HOST,
        kind="counter",
        unit="failures",
        meaning="Times the disk did not give a block back.",
    ),
    Metric(
        name="kv_transfer_host_memory_bytes_used",
        question=Question.HOST,
        kind="gauge",
        unit="bytes",
        meaning="Host memory that blocks take.",
    ),
    Metric(
        name="kv_transfer_host_directory_bytes_used",
        question=Question.HOST,
        kind="gauge",
        unit="bytes",
        meaning="Files of blocks in the directory.",
    ),
    Metric(
        name="kv_transfer_heartbeats_sent_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="messages",
        meaning="Signs of life that were sent to engines which hold blocks.",
    ),
    Metric(
        name="kv_transfer_heartbeats_received_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="messages",
        meaning="Signs of life that came for held blocks.",
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
        meaning="Sequences that wait for KV from elsewhere at this moment.",
    ),
    Metric(
        name="kv_transfer_requests_held",
        question=Question.TRANSFERS,
        kind="gauge",
        unit="sequences",
        meaning="Sequences that are answered and whose blocks are held for another engine.",
    ),
    Metric(
        name="kv_transfer_holds_refused_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="sequences",
        meaning="Sequences that were to be held for another engine and were not: as many blocks were held as may be.",
    ),
    Metric(
        name="requests_rejected_total",
        question=Question.REFUSED,
        kind="counter",
        unit="requests",
        meaning="Requests that were refused because a bound was reached or the server is leaving.",
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
        meaning="Client connections that are open.",
        part="frontend",
    ),
    Metric(
        name="connections_known_open",
        question=Question.LOAD,
        kind="gauge",
        unit="connections",
        meaning="Client connections on which an API key was shown; they have places that others cannot take.",
        part="frontend",
    ),
    Metric(
        name="connections_max",
        question=Question.LOAD,
        kind="gauge",
        unit="connections",
        meaning="Client connections that may be open: --max-connections, or what the limit of open files allows.",
        part="frontend",
    ),
    Metric(
        name="accepts_failed_total",
        question=Question.REFUSED,
        kind="counter",
        unit="connections",
        meaning="Client connections that could not be accepted at first, for want of open files or memory.",
        part="frontend",
    ),
    Metric(
        name="connections_total",
        question=Question.LOAD,
        kind="counter",
        unit="connections",
        meaning="Client connections that came.",
        part="frontend",
    ),
    Metric(
        name="connections_refused_total",
        question=Question.REFUSED,
        kind="counter",
        unit="connections",
        meaning="Client connections that were ended because a bound was reached, by which one.",
        labels=(Label("reason"),),
        part="frontend",
    ),
    Metric(
        name="streams_refused_total",
        question=Question.REFUSED,
        kind="counter",
        unit="requests",
        meaning="HTTP requests that were turned away before their handler because a bound was reached, by which one.",
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
        meaning="HTTP requests that were cancelled because their client took nothing, or too little, for too long.",
        part="frontend",
    ),
    Metric(
        name="clients_slow",
        question=Question.CLIENTS,
        kind="gauge",
        unit="requests",
        meaning="HTTP requests whose client is slower than its response, so that bytes wait for it.",
        part="frontend",
    ),
    Metric(
        name="answer_bytes_held",
        question=Question.CLIENTS,
        kind="gauge",
        unit="bytes",
        meaning="What waits for clients that are slower than their responses.",
        part="frontend",
    ),
    Metric(
        name="request_body_bytes_held",
        question=Question.LEFT_BEHIND,
        kind="gauge",
        unit="bytes",
        meaning="Bodies of the requests that are under way.",
        part="frontend",
    ),
    Metric(
        name="request_body_bytes_total",
        question=Question.SIZES,
        kind="counter",
        unit="bytes",
        meaning="Request bodies that were read.",
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
        meaning='HTTP requests by route and status. Unknown paths are "other"; status "left": gone before a response.',
        labels=(Label("path"), Label("status")),
        part="frontend",
    ),
    Metric(
        name="http_requests_by_handler_total",
        question=Question.ENDS,
        kind="counter",
        unit="requests",
        meaning="HTTP requests by route, method and class of status; what is not known is none and other, and left is "
        "one whose client was gone before a response. Without what machines poll, such as /health and /metrics.",
        labels=(Label("handler"), Label("method"), Label("status")),
        shown_as="http_requests_total",
        part="frontend",
    ),
    Metric(
        name="http_request_duration_seconds",
        question=Question.FEEL,
        kind="histogram",
        unit="seconds",
        meaning="From the head of the same requests to the end of their response, by route and method.",
        labels=(Label("handler"), Label("method")),
        buckets=HTTP_SECONDS,
        shown_as="http_request_duration_seconds",
        part="frontend",
    ),
    Metric(
        name="http_request_duration_highr_seconds",
        question=Question.FEEL,
        kind="histogram",
        unit="seconds",
        meaning="The same of all of them together, in finer buckets.",
        buckets=HTTP_SECONDS_FINE,
        shown_as="http_request_duration_highr_seconds",
        part="frontend",
    ),
    Metric(
        name="log_lines_dropped_total",
        question=Question.TOLD,
        kind="counter",
        unit="lines",
        meaning="Lines of the log that were dropped: too many waited for a terminal, pipe or disk that took none.",
        part="frontend",
    ),
    Metric(
        name="trace_spans_total",
        question=Question.TOLD,
        kind="counter",
        unit="spans",
        meaning="Spans of traces: taken by the collector, not taken by it, or dropped since too many waited for it.",
        labels=(Label("outcome", ("exported", "failed", "dropped")),),
        part="frontend",
    ),
    Metric(
        name="batches_live",
        question=Question.LASTING,
        kind="gauge",
        unit="batches",
        meaning="Batches that have not ended, those that wait for their turn included.",
        part="frontend",
    ),
    Metric(
        name="batch_lines_total",
        question=Question.LASTING,
        kind="counter",
        unit="lines",
        meaning="Lines of batches that are done, by the file that they went to.",
        labels=(Label("file", ("output", "error")),),
        part="frontend",
    ),
    # --- of a router ---
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
        meaning="From a request's arrival to its lease at an endpoint, or to its refusal in the queue.",
        buckets=WAIT_SECONDS,
        vllm=True,
        part="router",
    ),
    Metric(
        name="admissions_total",
        question=Question.LOAD,
        kind="counter",
        unit="leases",
        meaning="Leases that were given; a request that is tried again gets another one.",
        vllm=True,
        part="router",
    ),
    Metric(
        name="rejections_total",
        question=Question.REFUSED,
        kind="counter",
        unit="requests",
        meaning="Requests that were refused, by the reason that the client was told.",
        labels=(Label("reason"),),
        vllm=True,
        part="router",
    ),
    Metric(
        name="retries_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="requests",
        meaning="Requests that an endpoint failed, or that it was lost with, before their first token, tried again.",
        vllm=True,
        part="router",
    ),
    Metric(
        name="peers",
        question=Question.PEERS,
        kind="gauge",
        unit="routers",
        meaning="Other routers before the same endpoints.",
        part="router",
    ),
    Metric(
        name="peers_well",
        question=Question.PEERS,
        kind="gauge",
        unit="routers",
        meaning="Of these, the ones that answer.",
        part="router",
    ),
    Metric(
        name="peers_lost_total",
        question=Question.PEERS,
        kind="counter",
        unit="routers",
        meaning="Times that a router which had answered was found gone.",
        part="router",
    ),
    Metric(
        name="streams_found_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="streams",
        meaning="Retries of clients whose stream ran on at an endpoint, and was gone on with.",
        part="router",
    ),
    Metric(
        name="streams_recomputed_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="streams",
        meaning="Retries of clients whose stream was nowhere any more, and was computed once more.",
        part="router",
    ),
    Metric(
        name="farewells_dropped_total",
        question=Question.PEERS,
        kind="counter",
        unit="streams",
        meaning="Streams whose clients had left, and whose endpoints were not told, since too many were to be told.",
        part="router",
    ),
    Metric(
        name="stream_continuations_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="streams",
        meaning="Streams that broke off, and got a lease to go on with; each time counts.",
        part="router",
    ),
    Metric(
        name="stream_continuations_refused_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="requests",
        meaning=(
            "Streams that broke off and could have gone on elsewhere, but were not let; and requests without a token "
            "that are taken for the cause of the end of their endpoints."
        ),
        labels=(Label("reason", ("poisoned", "too_many", "no_endpoint")),),
        part="router",
    ),
    Metric(
        name="stream_moves_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="streams",
        meaning="Streams that got a lease elsewhere, to leave an endpoint that is emptied.",
        part="router",
    ),
    Metric(
        name="moving_requests",
        question=Question.SURVIVES,
        kind="gauge",
        unit="requests",
        meaning="Streams at endpoints that are emptied, which run there until there is room elsewhere.",
        part="router",
    ),
    Metric(
        name="continuing_requests",
        question=Question.SURVIVES,
        kind="gauge",
        unit="requests",
        meaning="Streams that broke off, and wait for an endpoint to go on at.",
        part="router",
    ),
    Metric(
        name="streams_continued_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="streams",
        meaning="Streams that got a token from another endpoint where one had stopped, by what that one did.",
        labels=(Label("reason", ("broke", "hung", "leaving", "unreachable", "busy", "transfer")),),
        part="router",
    ),
    Metric(
        name="silent_responses_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="responses",
        meaning="Responses that were taken from endpoints since nothing came over an open connection, by the sign: no "
        "heartbeat, another process at the address, nothing acknowledged, or, of endpoints without heartbeats, their "
        "reports of load or time alone.",
        labels=(Label("reason", ("silent", "replaced", "unacknowledged", "not_running", "overtaken", "stalled")),),
        part="router",
    ),
    Metric(
        name="streams_not_resumable_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="streams",
        meaning="Streams that broke off and that no other endpoint could have gone on with, by what there was not.",
        labels=(Label("reason", ("not_resumable", "bytes_max", "malformed", "mismatch", "refused")),),
        part="router",
    ),
    Metric(
        name="stream_pause_seconds",
        question=Question.SURVIVES,
        kind="histogram",
        unit="seconds",
        meaning="From the moment at which a stream's endpoint was given up to the first token from another one.",
        buckets=WAIT_SECONDS,
        part="router",
    ),
    Metric(
        name="continuation_bytes_held",
        question=Question.LEFT_BEHIND,
        kind="gauge",
        unit="bytes",
        meaning="Kept of the streams that run, so that another endpoint can go on with them.",
        part="router",
    ),
    Metric(
        name="endpoint_load_reports_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="reports",
        meaning="Loads that endpoints have told, by whether they were asked or sent it by themselves.",
        labels=(Label("how", ("asked", "pushed")),),
        part="router",
    ),
    Metric(
        name="pairs_total",
        question=Question.TRANSFERS,
        kind="counter",
        unit="requests",
        meaning="Requests that were to have their prompt computed at one endpoint and their response made at another, "
        "by what became of that.",
        labels=(Label("outcome", tuple(outcome.value for outcome in PairOutcome)),),
        part="router",
    ),
    Metric(
        name="pair_handover_seconds",
        question=Question.TRANSFERS,
        kind="histogram",
        unit="seconds",
        meaning="From the end of the prompt at one endpoint to the first token at another, of such streamed requests.",
        buckets=WAIT_SECONDS,
        part="router",
    ),
    Metric(
        name="endpoint_leases",
        question=Question.LOAD,
        kind="gauge",
        unit="sequences",
        meaning="Sequences that hold a lease at the endpoint.",
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
        meaning="Whether the endpoint gets requests.",
        labels=(Label("endpoint"),),
        vllm=True,
        part="router",
    ),
    Metric(
        name="endpoint_resident_blocks",
        question=Question.CACHE,
        kind="gauge",
        unit="blocks",
        meaning="Blocks in the endpoint's prefix cache, as it tells; not shown while that is unknown.",
        labels=(Label("endpoint"),),
        part="router",
    ),
    Metric(
        name="endpoint_ejections_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="ejections",
        meaning="Times the endpoint was left out because it failed.",
        labels=(Label("endpoint"),),
        vllm=True,
        part="router",
    ),
    Metric(
        name="endpoint_failures_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="requests",
        meaning=(
            "Requests that the endpoint failed, by the reason: a fault (broke, unreachable, hung), a status, or what "
            "it sent that no inference server sends (html, redirect, content_type, not_json, not_http, empty, shape, "
            "event, no_end, key_refused)."
        ),
        labels=(Label("endpoint"), Label("reason")),
        part="router",
    ),
    Metric(
        name="endpoint_hangs_total",
        question=Question.ENDPOINTS,
        kind="counter",
        unit="hangs",
        meaning="Times the endpoint was left out because nothing came from it, or its step did not end.",
        labels=(Label("endpoint"),),
        part="router",
    ),
    # --- of an engine that makes pictures ---
    Metric(
        name="images_total",
        question=Question.PICTURES,
        kind="counter",
        unit="pictures",
        meaning="Pictures that were made.",
        part="images",
    ),
    Metric(
        name="denoising_steps_total",
        question=Question.PICTURES,
        kind="counter",
        unit="steps",
        meaning="Denoising steps of all pictures, also of those that nobody waited for to the end.",
        part="images",
    ),
    Metric(
        name="latent_slots",
        question=Question.PICTURES,
        kind="gauge",
        unit="slots",
        meaning="Slots for what pictures have between two steps: of those that are worked on (free, used), and of "
        "those that had to leave theirs to a better priority (kept_free, kept_used).",
        labels=(Label("state", ("free", "used", "kept_free", "kept_used")),),
        part="images",
    ),
    Metric(
        name="time_to_first_picture_seconds",
        question=Question.PICTURES,
        kind="histogram",
        unit="seconds",
        meaning="From a request's arrival to the first that could be seen of a picture: a partial result, or the "
        "whole. That of the whole is e2e_request_latency_seconds.",
        buckets=WAIT_SECONDS,
        part="images",
    ),
    Metric(
        name="step_work",
        question=Question.PICTURES,
        kind="histogram",
        unit="units of work",
        meaning="What one step computed, in the units that bound a step, by what it did.",
        labels=(_STEP_PHASE,),
        buckets=STEP_TOKENS,
        part="images",
    ),
    # --- what outlives its request ---
    Metric(
        name="store_bytes_used",
        question=Question.LASTING,
        kind="gauge",
        unit="bytes",
        meaning="What is stored: responses, files and the like, each with its row.",
    ),
    Metric(
        name="store_objects",
        question=Question.LASTING,
        kind="gauge",
        unit="objects",
        meaning="How many of them there are.",
    ),
    Metric(
        name="store_evicted_total",
        question=Question.LASTING,
        kind="counter",
        unit="objects",
        meaning="Objects that made room for others before their time was over.",
    ),
    Metric(
        name="store_refused_total",
        question=Question.LASTING,
        kind="counter",
        unit="writes",
        meaning="Writes for which there was no room.",
    ),
    Metric(
        name="store_write_failures_total",
        question=Question.LASTING,
        kind="counter",
        unit="writes",
        meaning="Writes that the disk of the store refused: it was full, read-only or broken. Each retry counts.",
    ),
    Metric(
        name="store_unwritten_bytes",
        question=Question.LASTING,
        kind="gauge",
        unit="bytes",
        meaning="Final states and results that are in memory until the disk of the store takes them.",
    ),
    Metric(
        name="background_responses",
        question=Question.LASTING,
        kind="gauge",
        unit="responses",
        meaning="Responses that live in the background at this moment.",
    ),
    Metric(
        name="detached_streams",
        question=Question.LASTING,
        kind="gauge",
        unit="streams",
        meaning="Streams that go on while nobody reads them.",
    ),
    Metric(
        name="detached_bytes_held",
        question=Question.LASTING,
        kind="gauge",
        unit="bytes",
        meaning="Events that are kept of streams that may be detached.",
    ),
    Metric(
        name="router_streams",
        question=Question.SURVIVES,
        kind="gauge",
        unit="streams",
        meaning="Streams that go on while the router that asked for them is gone.",
    ),
    Metric(
        name="router_stream_bytes_held",
        question=Question.SURVIVES,
        kind="gauge",
        unit="bytes",
        meaning="Events that are kept of streams for whose routers another one may stand in.",
    ),
    Metric(
        name="router_streams_taken_over_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="streams",
        meaning="Times that another router, or the same one again, went on reading such a stream.",
    ),
    Metric(
        name="router_streams_expired_total",
        question=Question.SURVIVES,
        kind="counter",
        unit="streams",
        meaning="Such streams that were ended since nobody went on reading them in time.",
    ),
)
