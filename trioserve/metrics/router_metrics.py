"""Metrics of a router."""

from __future__ import annotations

from typing import Annotated

from prometheus_client import Counter, Gauge

from trioserve.contracts.endpoint import PairOutcome
from trioserve.metrics.metric import WAIT_SECONDS, Label, Metric, PlainHistogram, Question

__all__ = ["RouterMetrics"]


class RouterMetrics:
    """Metrics of queues, endpoints, streams that resume at another endpoint, and other routers."""

    queued_requests: Annotated[
        Gauge,
        Metric(
            Question.WAITING,
            "requests",
            "Requests that wait in the queue for an endpoint.",
            vllm=True,
            part="router",
        ),
    ]
    queue_wait_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.WAITING,
            "seconds",
            "Time from the arrival of a request to its lease at an endpoint, or to its refusal in the queue.",
            buckets=WAIT_SECONDS,
            vllm=True,
            part="router",
        ),
    ]
    admissions_total: Annotated[
        Counter,
        Metric(
            Question.LOAD,
            "leases",
            "Leases that were granted. A retried request gets another lease.",
            vllm=True,
            part="router",
        ),
    ]
    rejections_total: Annotated[
        Counter,
        Metric(
            Question.REFUSED,
            "requests",
            "Requests that were refused, by the reason that was sent to the client.",
            labels=(Label("reason"),),
            vllm=True,
            part="router",
        ),
    ]
    retries_total: Annotated[
        Counter,
        Metric(
            Question.ENDPOINTS,
            "requests",
            "Requests that were retried because an endpoint failed them, or was lost, before their first token.",
            vllm=True,
            part="router",
        ),
    ]
    peers: Annotated[
        Gauge, Metric(Question.PEERS, "routers", "Other routers that use the same endpoints.", part="router")
    ]
    peers_well: Annotated[Gauge, Metric(Question.PEERS, "routers", "Other routers that answer.", part="router")]
    peers_lost_total: Annotated[
        Counter,
        Metric(
            Question.PEERS,
            "routers",
            "Times that a router which had answered stopped answering.",
            part="router",
        ),
    ]
    streams_found_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "streams",
            "Client retries whose stream was still running at an endpoint and was resumed.",
            part="router",
        ),
    ]
    streams_recomputed_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "streams",
            "Client retries whose stream was no longer running anywhere and was computed again.",
            part="router",
        ),
    ]
    hosted_model_loaded: Annotated[
        Gauge,
        Metric(
            Question.SURVIVAL,
            "models",
            "1 if a model that is loaded on demand is loaded, 0 if it is not.",
            labels=(Label("hosted_model"),),
            part="router",
        ),
    ]
    hosted_model_sleeping: Annotated[
        Gauge,
        Metric(
            Question.SURVIVAL,
            "models",
            "1 if a model that is loaded on demand sleeps without its KV cache, 0 if it does not.",
            labels=(Label("hosted_model"),),
            part="router",
        ),
    ]
    hosted_model_waiting_requests: Annotated[
        Gauge,
        Metric(
            Question.WAITING,
            "requests",
            "Requests that wait for a model to be loaded, or for a free slot of it.",
            labels=(Label("hosted_model"),),
            part="router",
        ),
    ]
    hosted_models_bytes: Annotated[
        Gauge,
        Metric(
            Question.WAITING,
            "bytes",
            "Memory that the hosted models may use that are loaded, being loaded or being unloaded.",
            part="router",
        ),
    ]
    hosted_model_loads_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "loads",
            "Loads of hosted models by outcome: loaded, failed (also crashes later), or unloaded after it was loaded.",
            labels=(Label("hosted_model"), Label("outcome")),
            part="router",
        ),
    ]
    hosted_model_load_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.WAITING,
            "seconds",
            "Time from the start of a hosted model's process until it accepts requests.",
            buckets=WAIT_SECONDS,
            part="router",
        ),
    ]
    farewells_dropped_total: Annotated[
        Counter,
        Metric(
            Question.PEERS,
            "notices",
            "Notices to endpoints that a client has left its stream or its connection, which were dropped because too "
            "many were waiting.",
            part="router",
        ),
    ]
    stream_continuations_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "streams",
            "Times that a stream that broke off got a lease to resume with.",
            part="router",
        ),
    ]
    stream_continuations_refused_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "requests",
            "Streams that broke off and were not allowed to resume elsewhere, and requests without a token that are"
            " held to be the cause of their endpoints' failures.",
            labels=(Label("reason", ("poisoned", "too_many", "no_endpoint")),),
            part="router",
        ),
    ]
    stream_moves_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "streams",
            "Streams that got a lease at another endpoint in order to leave one that is being emptied.",
            part="router",
        ),
    ]
    moving_requests: Annotated[
        Gauge,
        Metric(
            Question.SURVIVAL,
            "requests",
            "Streams at endpoints that are being emptied, which run there until another endpoint has room.",
            part="router",
        ),
    ]
    continuing_requests: Annotated[
        Gauge,
        Metric(
            Question.SURVIVAL,
            "requests",
            "Streams that broke off and wait for an endpoint to resume at.",
            part="router",
        ),
    ]
    streams_continued_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "streams",
            "Streams that got a token from another endpoint after one had failed, by the failure.",
            labels=(Label("reason", ("broke", "hung", "leaving", "unreachable", "busy", "transfer")),),
            part="router",
        ),
    ]
    silent_responses_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "responses",
            "Responses that were given up because nothing arrived over an open connection, by sign: no heartbeat, "
            "another process at the address, nothing acknowledged, or, for endpoints without heartbeats, load "
            "reports or elapsed time.",
            labels=(Label("reason", ("silent", "replaced", "unacknowledged", "not_running", "overtaken", "stalled")),),
            part="router",
        ),
    ]
    streams_not_resumable_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "streams",
            "Streams that broke off and that no other endpoint could resume, by reason.",
            labels=(Label("reason", ("not_resumable", "bytes_max", "malformed", "mismatch", "refused")),),
            part="router",
        ),
    ]
    stream_pause_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.SURVIVAL,
            "seconds",
            "Time from giving up a stream's endpoint to the first token from another one.",
            buckets=WAIT_SECONDS,
            part="router",
        ),
    ]
    continuation_bytes_held: Annotated[
        Gauge,
        Metric(
            Question.LEAKS,
            "bytes",
            "Bytes kept of running streams so that another endpoint can resume them.",
            part="router",
        ),
    ]
    endpoint_load_reports_total: Annotated[
        Counter,
        Metric(
            Question.ENDPOINTS,
            "reports",
            "Load reports of endpoints, by whether the router asked or the endpoint sent them by itself.",
            labels=(Label("how", ("asked", "pushed")),),
            part="router",
        ),
    ]
    pairs_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "requests",
            "Requests whose prompt and response should be computed at different endpoints, by outcome.",
            labels=(Label("outcome", tuple(outcome.value for outcome in PairOutcome)),),
            part="router",
        ),
    ]
    pair_handover_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.TRANSFERS,
            "seconds",
            "Time from the end of the prompt at one endpoint to the first token at another one, for disaggregated "
            "streamed requests.",
            buckets=WAIT_SECONDS,
            part="router",
        ),
    ]
    endpoint_leases: Annotated[
        Gauge,
        Metric(
            Question.LOAD,
            "sequences",
            "Sequences that have a lease at the endpoint.",
            labels=(Label("endpoint"),),
            vllm=True,
            part="router",
        ),
    ]
    endpoint_in_flight: Annotated[
        Gauge,
        Metric(
            Question.LOAD,
            "sequences",
            "Sequences that were sent to the endpoint and have not ended.",
            labels=(Label("endpoint"),),
            vllm=True,
            part="router",
        ),
    ]
    endpoint_healthy: Annotated[
        Gauge,
        Metric(
            Question.ENDPOINTS,
            "0 or 1",
            "1 if the endpoint gets requests.",
            labels=(Label("endpoint"),),
            vllm=True,
            part="router",
        ),
    ]
    endpoint_resident_blocks: Annotated[
        Gauge,
        Metric(
            Question.CACHE,
            "blocks",
            "Blocks in the endpoint's prefix cache, as reported by the endpoint. Not shown while unknown.",
            labels=(Label("endpoint"),),
            part="router",
        ),
    ]
    endpoint_ejections_total: Annotated[
        Counter,
        Metric(
            Question.ENDPOINTS,
            "ejections",
            "Times that the endpoint stopped getting requests because it failed.",
            labels=(Label("endpoint"),),
            vllm=True,
            part="router",
        ),
    ]
    endpoint_failures_total: Annotated[
        Counter,
        Metric(
            Question.ENDPOINTS,
            "requests",
            "Requests that the endpoint failed, by reason: a fault (broke, unreachable, hung), a status, or a "
            "response that no inference server sends (html, redirect, content_type, not_json, not_http, empty, "
            "shape, event, no_end, key_refused).",
            labels=(Label("endpoint"), Label("reason")),
            part="router",
        ),
    ]
    endpoint_hangs_total: Annotated[
        Counter,
        Metric(
            Question.ENDPOINTS,
            "hangs",
            "Times that the endpoint stopped getting requests because it sent nothing or its step did not end.",
            labels=(Label("endpoint"),),
            part="router",
        ),
    ]
