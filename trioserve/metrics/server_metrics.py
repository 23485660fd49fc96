"""Metrics of the server around an engine: connections, responses, stored objects and detached streams."""

from __future__ import annotations

from typing import Annotated

from prometheus_client import Counter, Gauge

from trioserve.metrics.metric import HTTP_SECONDS, HTTP_SECONDS_FINE, Label, Metric, PlainHistogram, Question

__all__ = ["ServerMetrics"]


class ServerMetrics:
    """Metrics of the front end, and of objects and streams that outlive a request."""

    resumed_requests_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "requests",
            "Requests that resumed a response that began elsewhere, or in an engine that failed.",
        ),
    ]
    resumed_tokens_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "tokens",
            "Known tokens of resumed responses. They are computed like a prompt and not sampled again.",
        ),
    ]
    ignored_request_fields_total: Annotated[
        Counter,
        Metric(
            Question.CLIENTS,
            "fields",
            "Fields of request bodies that were ignored. X-Trioserve-Ignored in the response names them.",
            part="frontend",
        ),
    ]
    connections_open: Annotated[
        Gauge, Metric(Question.LOAD, "connections", "Open client connections.", part="frontend")
    ]
    connections_known_open: Annotated[
        Gauge,
        Metric(
            Question.LOAD,
            "connections",
            "Open client connections that have sent a valid API key. Some places are reserved for them.",
            part="frontend",
        ),
    ]
    connections_max: Annotated[
        Gauge,
        Metric(
            Question.LOAD,
            "connections",
            "Limit of open client connections: --max-connections, or what the limit of open files allows.",
            part="frontend",
        ),
    ]
    accepts_failed_total: Annotated[
        Counter,
        Metric(
            Question.REFUSED,
            "connections",
            "Client connections that could not be accepted at first, for lack of open files or memory.",
            part="frontend",
        ),
    ]
    connections_total: Annotated[
        Counter, Metric(Question.LOAD, "connections", "Client connections that were accepted.", part="frontend")
    ]
    connections_refused_total: Annotated[
        Counter,
        Metric(
            Question.REFUSED,
            "connections",
            "Client connections that were ended because a limit was reached, by limit.",
            labels=(Label("reason"),),
            part="frontend",
        ),
    ]
    streams_refused_total: Annotated[
        Counter,
        Metric(
            Question.REFUSED,
            "requests",
            "HTTP requests that were refused before their handler because a limit was reached, by limit.",
            labels=(Label("reason"),),
            part="frontend",
        ),
    ]
    clients_left_total: Annotated[
        Counter,
        Metric(
            Question.CLIENTS,
            "requests",
            "HTTP requests that were cancelled because their client left.",
            part="frontend",
        ),
    ]
    clients_stalled_total: Annotated[
        Counter,
        Metric(
            Question.CLIENTS,
            "requests",
            "HTTP requests that were cancelled because their client read nothing, or too little, for too long.",
            part="frontend",
        ),
    ]
    clients_slow: Annotated[
        Gauge,
        Metric(
            Question.CLIENTS,
            "requests",
            "HTTP requests whose client reads more slowly than its response is produced, so that bytes are buffered.",
            part="frontend",
        ),
    ]
    answer_bytes_held: Annotated[
        Gauge,
        Metric(
            Question.CLIENTS,
            "bytes",
            "Bytes buffered for clients that read more slowly than their responses are produced.",
            part="frontend",
        ),
    ]
    request_body_bytes_held: Annotated[
        Gauge, Metric(Question.LEAKS, "bytes", "Bytes of the bodies of current requests.", part="frontend")
    ]
    request_body_bytes_total: Annotated[
        Counter, Metric(Question.SIZES, "bytes", "Bytes of request bodies that were read.", part="frontend")
    ]
    websockets_open: Annotated[Gauge, Metric(Question.LOAD, "websockets", "Open websockets.", part="frontend")]
    websockets_max: Annotated[
        Gauge, Metric(Question.LOAD, "websockets", "Limit of open websockets: --max-websockets.", part="frontend")
    ]
    websockets_total: Annotated[
        Counter, Metric(Question.LOAD, "websockets", "Websockets that were accepted.", part="frontend")
    ]
    websocket_messages_received_total: Annotated[
        Counter, Metric(Question.LOAD, "messages", "Whole messages of websockets from clients.", part="frontend")
    ]
    websocket_messages_sent_total: Annotated[
        Counter, Metric(Question.LOAD, "messages", "Messages of websockets to clients.", part="frontend")
    ]
    websocket_bytes_received_total: Annotated[
        Counter, Metric(Question.SIZES, "bytes", "Bytes of websocket frames from clients.", part="frontend")
    ]
    websocket_bytes_sent_total: Annotated[
        Counter, Metric(Question.SIZES, "bytes", "Bytes of websocket frames to clients.", part="frontend")
    ]
    streams_open: Annotated[
        Gauge,
        Metric(
            Question.LOAD,
            "requests",
            "HTTP requests whose handler is running: HTTP/2 streams, or HTTP/1.1 requests.",
            part="frontend",
        ),
    ]
    http_requests_total: Annotated[
        Counter,
        Metric(
            Question.ENDS,
            "requests",
            'HTTP requests by route and status. Unknown paths are "other". Status "left": the client left before a '
            "response.",
            labels=(Label("path"), Label("status")),
            part="frontend",
        ),
    ]
    http_requests_by_handler_total: Annotated[
        Counter,
        Metric(
            Question.ENDS,
            "requests",
            'HTTP requests by route, method and class of status. An unknown path is "none", an unknown method '
            '"other". Status "left": the client left before a response. Requests that machines poll, such as '
            "/health and /metrics, are not counted.",
            labels=(Label("handler"), Label("method"), Label("status")),
            shown_as="http_requests_total",
            part="frontend",
        ),
    ]
    http_request_duration_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.LATENCY,
            "seconds",
            "Time from the head of an HTTP request to the end of its response, by route and method. Requests that "
            "machines poll are not counted.",
            labels=(Label("handler"), Label("method")),
            buckets=HTTP_SECONDS,
            shown_as="http_request_duration_seconds",
            part="frontend",
        ),
    ]
    http_request_duration_highr_seconds: Annotated[
        PlainHistogram,
        Metric(
            Question.LATENCY,
            "seconds",
            "Time from the head of an HTTP request to the end of its response, for all routes together, in finer "
            "buckets.",
            buckets=HTTP_SECONDS_FINE,
            shown_as="http_request_duration_highr_seconds",
            part="frontend",
        ),
    ]
    log_lines_dropped_total: Annotated[
        Counter,
        Metric(
            Question.TELEMETRY,
            "lines",
            "Log lines that were dropped because too many waited for a blocked terminal, pipe or disk.",
            part="frontend",
        ),
    ]
    trace_spans_total: Annotated[
        Counter,
        Metric(
            Question.TELEMETRY,
            "spans",
            "Trace spans: accepted by the collector, not accepted, or dropped because too many were waiting.",
            labels=(Label("outcome", ("exported", "failed", "dropped")),),
            part="frontend",
        ),
    ]
    batches_live: Annotated[
        Gauge,
        Metric(
            Question.STORED,
            "batches",
            "Batches that have not ended, including those that wait for their turn.",
            part="frontend",
        ),
    ]
    batch_lines_total: Annotated[
        Counter,
        Metric(
            Question.STORED,
            "lines",
            "Finished lines of batches, by the file that their result was written to.",
            labels=(Label("file", ("output", "error")),),
            part="frontend",
        ),
    ]
    store_bytes_used: Annotated[
        Gauge,
        Metric(
            Question.STORED,
            "bytes",
            "Bytes of stored responses, files and similar objects, including their database rows.",
        ),
    ]
    store_objects: Annotated[Gauge, Metric(Question.STORED, "objects", "Number of stored objects.")]
    store_evicted_total: Annotated[
        Counter,
        Metric(
            Question.STORED,
            "objects",
            "Stored objects that were evicted before their expiry to make room for others.",
        ),
    ]
    store_refused_total: Annotated[
        Counter, Metric(Question.STORED, "writes", "Writes to the store that were refused for lack of room.")
    ]
    store_write_failures_total: Annotated[
        Counter,
        Metric(
            Question.STORED,
            "writes",
            "Writes that the store's disk refused because it was full, read-only or broken. Each retry counts.",
        ),
    ]
    store_unwritten_bytes: Annotated[
        Gauge,
        Metric(
            Question.STORED,
            "bytes",
            "Bytes of final states and results that stay in memory until the store's disk accepts them.",
        ),
    ]
    sessions_ended_total: Annotated[
        Counter,
        Metric(
            Question.STORED,
            "sessions",
            "Sessions that ended, by reason: their scope or connection was left, their owner deleted them, they were "
            "idle for too long, or a newer session took their place.",
            labels=(Label("reason", ("left", "deleted", "idle", "displaced")),),
        ),
    ]
    sessions_refused_total: Annotated[
        Counter,
        Metric(
            Question.REFUSED,
            "requests",
            "Requests that were served without the session that they named, because too many sessions were open.",
        ),
    ]
    session_turns_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "turns",
            "Turns of sessions that keep their history, by the beginning of the prompt: first turns, turns whose "
            "prompt begins with the whole history, and turns whose history the chat template wrote differently.",
            labels=(Label("prompt", ("first", "appended", "rewritten")),),
        ),
    ]
    session_rewritten_tokens_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "tokens",
            "Tokens of such histories that could not be reused, because the chat template wrote them differently.",
        ),
    ]
    background_responses: Annotated[
        Gauge, Metric(Question.STORED, "responses", "Background responses that are running.")
    ]
    connection_bytes_held: Annotated[
        Gauge,
        Metric(
            Question.STORED,
            "bytes",
            "Bytes of responses that websocket connections keep for their clients.",
        ),
    ]
    detached_streams: Annotated[Gauge, Metric(Question.STORED, "streams", "Streams that run without a reader.")]
    detached_bytes_held: Annotated[
        Gauge, Metric(Question.STORED, "bytes", "Bytes of events kept for streams that may be detached.")
    ]
    router_streams: Annotated[
        Gauge, Metric(Question.SURVIVAL, "streams", "Streams that run on although their router is gone.")
    ]
    router_stream_bytes_held: Annotated[
        Gauge, Metric(Question.SURVIVAL, "bytes", "Bytes of events kept for streams that another router may take over.")
    ]
    router_streams_taken_over_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "streams",
            "Times that another router, or the same one again, resumed reading a stream whose router was gone.",
        ),
    ]
    router_streams_expired_total: Annotated[
        Counter,
        Metric(
            Question.SURVIVAL,
            "streams",
            "Streams whose router was gone and that were ended because no router resumed reading them in time.",
        ),
    ]
