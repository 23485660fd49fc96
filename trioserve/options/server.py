"""Options of every server: the queue, the connections, keys and logs, and objects that outlive a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from trioserve.api.limits import (
    ROUTER_GRACE,
    BackgroundSettings,
    BatchSettings,
    ConnectionSettings,
    DetachSettings,
)
from trioserve.contracts.deadlines import StoppingSettings
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.engine.settings import EngineSettings, deadlines_of
from trioserve.http.limits import KEEP_ALIVE_SECONDS, RESPONSE_BYTES_MAX, RESPONSES_BYTES_MAX, FrontendLimits
from trioserve.options.option import about
from trioserve.store.settings import StoreSettings

__all__ = ["ConnectionOptions", "QueueOptions", "ServerOptions", "StorageOptions"]


QUEUE, STOPPING, FRONTEND = EngineSettings(), StoppingSettings(), FrontendLimits()
Seconds = Annotated[float, Meta(gt=0)] | None


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """Options of waiting requests, of every engine and server."""

    # fmt: off
    max_queued_requests: Annotated[int, about(
        "requests that may wait for one model; further requests are refused with 429",
        "N", ge=0)] = QUEUE.waiting_requests_max
    max_queued_tokens: Annotated[int, about(
        "prompt tokens that may wait for one model", "TOKENS", ge=1)] = QUEUE.waiting_prompt_tokens_max
    max_queue_wait: Annotated[float, about(
        "longest time that any request may wait in the queue, in seconds",
        "SECONDS", gt=0, le=86400)] = QUEUE.waiting_seconds_max
    queue_timeout: Annotated[Seconds, about(
        "seconds that a request may wait before it runs, unless the request sets its own timeout; default: no limit",
        "SECONDS")] = None
    ttft_timeout: Annotated[Seconds, about(
        "seconds until the first token of a request, unless the request sets its own timeout; default: no limit",
        "SECONDS")] = None
    request_timeout: Annotated[Seconds, about(
        "seconds until the response of a request is complete, unless the request sets its own timeout; default: no "
        "limit", "SECONDS")] = None
    max_queue_timeout: Annotated[Seconds, about(
        "highest queue timeout that a request may set, in seconds; default: no limit", "SECONDS")] = None
    max_ttft_timeout: Annotated[Seconds, about(
        "highest timeout for the first token that a request may set, in seconds; default: no limit", "SECONDS")] = None
    max_request_timeout: Annotated[Seconds, about(
        "highest timeout for the whole response that a request may set, in seconds; default: no limit",
        "SECONDS")] = None
    # fmt: on

    def engine_settings(self) -> EngineSettings:
        """Return the limits of the queue, and the deadlines.

        Raises:
            StartupError: a deadline is out of range.
        """
        return EngineSettings(
            waiting_requests_max=self.max_queued_requests,
            waiting_prompt_tokens_max=self.max_queued_tokens,
            waiting_seconds_max=self.max_queue_wait,
            deadlines=deadlines_of(self.queue_timeout, self.ttft_timeout, self.request_timeout),
            deadlines_max=deadlines_of(self.max_queue_timeout, self.max_ttft_timeout, self.max_request_timeout),
        )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(QueueOptions):
    """Options of every server. Names and meanings are those of vLLM where vLLM has the option."""

    # fmt: off
    host: Annotated[str, about("address to listen at", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, about("TCP port; 0 takes a free one", "PORT", ge=0, le=65535)] = 8000
    uds: Annotated[str | None, about(
        "path of a Unix domain socket to listen at, instead of --host and --port; native front end only; default: none",
        "PATH")] = None
    root_path: Annotated[str, about(
        "path prefix of requests, such as /llm, if a proxy in front does not remove it; default: no prefix",
        "PATH")] = ""
    api_key: Annotated[tuple[str, ...], about(
        "keys that clients must send as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'; default: none", "KEY")] = ()
    admin_api_key: Annotated[str | None, about(
        "API key of the administrator: it may see and abort the requests of all keys, and its priority, tenant and "
        "cache_salt are accepted as sent; default: none", "KEY")] = None
    gateway_api_key: Annotated[tuple[str, ...], about(
        "API keys of trusted gateways: the server accepts their --tenant-header and priority, and each of their "
        "tenants has its own cached prompts; default: none", "KEY")] = ()
    priority_min: Annotated[Annotated[int, Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)] | None, about(
        "lowest priority number that a request may ask for (a lower number runs sooner); a lower number is refused "
        "with 400, except for admin and gateway keys; default: 0 with API keys, no limit without", "N")] = None
    share_prefix_cache: Annotated[bool, about(
        "let requests of all API keys share cached prompts: a common system prompt is computed once, but a key can "
        "find out, from cached_tokens or response times, whether another key has sent a text that it guesses")] = False
    metrics_need_key: Annotated[bool, about(
        "show /metrics, which counts the requests of all callers, only to the admin's API key")] = False
    load_needs_key: Annotated[bool, about(
        "refuse /load without an API key; a router before this server then needs --endpoint-api-key")] = False
    ssl_certfile: Annotated[str | None, about(
        "file with the certificate chain in PEM; turns TLS on; default: no TLS", "FILE")] = None
    ssl_keyfile: Annotated[str | None, about(
        "file with the certificate's key in PEM; default: the key is in --ssl-certfile", "FILE")] = None
    ssl_ca_certs: Annotated[str | None, about(
        "file with CA certificates in PEM that sign client certificates; default: none", "FILE")] = None
    ssl_client_certs: Annotated[Literal["none", "optional", "required"], about(
        "whether clients must (required) or may (optional) show a certificate; needs --ssl-ca-certs")] = "none"
    cors_origin: Annotated[tuple[str, ...], about(
        "origins of web pages that may call the API from browsers, such as https://chat.example.org, or * for all; "
        "default: none", "ORIGIN")] = ()
    allowed_host: Annotated[tuple[str, ...], about(
        "names that clients may send in the Host header, besides IP addresses, localhost and --host; *.example.org "
        "allows all names below it, and * every name; with API keys every name is allowed; default: none", "NAME")] = ()
    allow_operator_without_key: Annotated[bool, about(
        "let every client use the operator's endpoints (pause, sleep, weights, adapters, endpoints, list of requests, "
        "debugging) although the server has no API keys and listens at an address that other machines reach")] = False
    max_connections: Annotated[int, about(
        "client connections at a time; a further connection replaces an idle one, or waits; the limit of open files "
        "may lower this number. With API keys, a quarter is reserved for connections that have shown a key",
        "N", ge=1, le=1000000)] = FRONTEND.connections_max
    max_connections_per_address: Annotated[Annotated[int, Meta(ge=1, le=1000000)] | None, about(
        "of these, connections from one address (IPv6: one /64) that have shown no API key; does not apply to Unix "
        "sockets; default: all but one in 64", "N")] = None
    max_websockets: Annotated[int, about(
        "open websockets at a time, each with its own connection or HTTP/2 stream; further ones are refused with 503. "
        "An idle websocket does not count as a running request", "N", ge=1, le=1000000)] = FRONTEND.websockets_max
    max_websockets_per_caller: Annotated[int, about(
        "of these, websockets of one API key, or of one address that has shown none; further ones are refused with "
        "429. If there are several keys, at most half of --max-websockets", "N",
        ge=1, le=1000000)] = FRONTEND.websockets_per_caller_max
    websocket_idle_timeout: Annotated[float, about(
        "seconds without a message in either direction after which a websocket is closed with the code 1001; pings do "
        "not count", "SECONDS", gt=0, le=86400)] = FRONTEND.websocket_idle_seconds_max
    max_body_bytes: Annotated[int, about(
        "largest size of a request's body; a larger one is refused with 413",
        "BYTES", ge=1024, le=2**31 - 1)] = FRONTEND.body_bytes_max
    body_timeout: Annotated[Seconds, about(
        "seconds in which a request's whole body must arrive, otherwise the request is refused with 408; default: 600, "
        "or the time for --max-body-bytes at half a Mbit/s if that is longer", "SECONDS")] = None
    max_response_bytes: Annotated[int, about(
        "largest size of a whole (not streamed) response, estimated from its request: choices x tokens x (log "
        "probabilities + 1), repeated prompts, vectors x dimensions; a larger one is refused with 400. Streams have no "
        "such limit, because they are sent piece by piece", "BYTES", ge=1024, le=2**31 - 1)] = RESPONSE_BYTES_MAX
    max_responses_bytes: Annotated[int, about(
        "memory for the whole (not streamed) responses of all clients, counted as they grow; a response that does not "
        "fit is refused with 429. Responses below 64 KiB are not counted",
        "BYTES", ge=1024, le=2**40)] = RESPONSES_BYTES_MAX
    stall_timeout: Annotated[float, about(
        "seconds after which a client that reads nothing of its response is cancelled",
        "SECONDS", gt=0, le=86400)] = FRONTEND.stall_seconds_max
    keep_alive_timeout: Annotated[float, about(
        "seconds after which a connection without a running request is closed; set it longer than the timeout of "
        "proxies in front", "SECONDS", gt=0, le=86400)] = FRONTEND.idle_seconds_max
    keep_alive_comments: Annotated[float, about(
        "seconds of silence after which a stream gets a comment, which clients skip, so that proxies keep its "
        "connection open; a request that waits longer in the queue gets status 200 at that time, and a later error is "
        "sent as an event", "SECONDS", ge=1, le=86400)] = KEEP_ALIVE_SECONDS
    keep_alive_json: Annotated[bool, about(
        "keep connections of whole (not streamed) JSON responses open, too: after --keep-alive-comments seconds the "
        "client gets status 200 and white space, which JSON parsers skip, and a later error is sent as the body. With "
        "a router, set this at the router and not at its endpoints")] = False
    ping_interval: Annotated[float, about(
        "seconds of silence after which an HTTP/2 client with running streams gets a PING, to see whether it still "
        "reads", "SECONDS", gt=0, le=86400)] = FRONTEND.ping_seconds
    ping_timeout: Annotated[float, about(
        "seconds after which an HTTP/2 client that does not answer a PING loses its streams; this detects clients, "
        "such as httpx, that leave a stream without notice; 86400 lets such streams run",
        "SECONDS", gt=0, le=86400)] = FRONTEND.ping_answer_seconds_max
    vanished_timeout: Annotated[float, about(
        "seconds after which TCP keepalive detects that a client's machine or network is gone; the client's requests "
        "end then", "SECONDS", ge=6, le=86400)] = FRONTEND.vanished_seconds_max
    require_model: Annotated[bool, about(
        "refuse a request that names no model with 400, as OpenAI's API does; otherwise it gets the first model",
        )] = False
    tenant_header: Annotated[str, about(
        "header that names the tenant of a request; tenants share the queue fairly. With API keys, each key is a "
        "tenant, and the header is accepted only from gateway and admin keys; without keys it is accepted from every "
        "client", "NAME")] = "x-tenant-id"
    ui: Annotated[bool, about("serve a status page for browsers at /; with API keys, its data needs a key")] = True
    drain_timeout: Annotated[float, about(
        "seconds that running requests get after Ctrl-C or SIGTERM",
        "SECONDS", ge=0, le=86400)] = STOPPING.drain_seconds_max
    drain_delay: Annotated[float, about(
        "shortest time in seconds that the server still answers after SIGTERM, with 503 for /ready and new requests, "
        "so that load balancers notice; the server always answers until the last request has ended, and never longer "
        "than --drain-timeout; Ctrl-C has no such delay", "SECONDS", ge=0, le=86400)] = STOPPING.drain_delay_seconds
    log_level: Annotated[Literal["debug", "info", "warning", "error"], about(
        "lowest level of messages that are logged to stderr")] = "info"
    log_format: Annotated[Literal["text", "json"], about(
        "format of log lines; json has the fields request, tenant and trace")] = "text"
    access_log: Annotated[bool, about(
        "log a line for each request, with status, tokens, seconds and the way it ended; frequent polls, such as "
        "/health and /metrics, are logged only at --log-level debug")] = True
    otlp_endpoint: Annotated[str | None, about(
        "OpenTelemetry collector that gets a trace of each request, by OTLP over HTTP, such as http://127.0.0.1:4318; "
        "needs the extra otel; default: OTEL_EXPORTER_OTLP_ENDPOINT, or no traces", "URL")] = None
    trace_sample: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, about(
        "share of requests that are traced, if the client does not decide it; default: OTEL_TRACES_SAMPLER, or all",
        "SHARE")] = None
    # fmt: on

    def stopping_settings(self) -> StoppingSettings:
        """Return the time limits of stopping.

        Raises:
            StartupError: a limit is out of range.
        """
        return StoppingSettings(drain_seconds_max=self.drain_timeout, drain_delay_seconds=self.drain_delay)


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Options of websocket connections of the Responses API, at servers with an engine and at routers."""

    # fmt: off
    responses_connection_timeout: Annotated[float, about(
        "highest age of a websocket connection of the Responses API in seconds; clients then open a new one",
        "SECONDS", gt=0, le=86400)] = ConnectionSettings().seconds_max
    responses_connection_max_bytes: Annotated[int, about(
        "highest size of the responses that all such connections keep in memory, at most 16 MiB of them for one "
        "connection; above it, the largest connection loses its oldest responses",
        "BYTES", ge=0)] = ConnectionSettings().all_kept_bytes_max
    # fmt: on

    def connection_settings(self) -> ConnectionSettings:
        """Return the limits of websocket connections of the Responses API."""
        return ConnectionSettings(
            seconds_max=self.responses_connection_timeout, all_kept_bytes_max=self.responses_connection_max_bytes
        )


@dataclass(frozen=True, kw_only=True)
class StorageOptions(ConnectionOptions):
    """Options of data and streams that outlive a request."""

    # fmt: off
    data_dir: Annotated[str | None, about(
        "directory for data that outlives a request, such as stored responses; the data survives a restart; default: "
        "in memory", "DIR")] = None
    store_max_bytes: Annotated[int, about(
        "highest size of the stored data; above it, the oldest responses of the largest user are deleted, and data for "
        "which nothing can be deleted is refused with 507", "BYTES", ge=65536)] = StoreSettings().bytes_max
    store_max_objects: Annotated[int, about(
        "highest number of stored responses, files and other objects; above it, objects are deleted as for "
        "--store-max-bytes", "N", ge=1)] = StoreSettings().objects_max
    store_ttl: Annotated[float, about(
        "seconds that a response is stored", "SECONDS", gt=0, le=3.2e9)] = StoreSettings().seconds_max
    max_background_responses: Annotated[int, about(
        "background responses at a time, at most half of them of one caller; further ones are refused with 429",
        "N", ge=0)] = BackgroundSettings().responses_max
    background_timeout: Annotated[float, about(
        "longest time of a background response in seconds",
        "SECONDS", gt=0, le=86400)] = BackgroundSettings().seconds_max
    max_batches: Annotated[int, about(
        "unfinished batches at a time, at most a quarter of them of one caller; further ones are refused with 429",
        "N", ge=0)] = BatchSettings().batches_max
    batch_concurrency: Annotated[int, about(
        "requests of batches that run at a time; at most half of --max-num-seqs",
        "N", ge=1, le=1024)] = BatchSettings().lines_at_once
    detach_timeout_max: Annotated[float, about(
        "highest X-Detach-Timeout in seconds: how long a streamed response continues after its client has left, if the "
        "request sends X-Session-Id and X-Detach-Timeout; 0: no response continues",
        "SECONDS", ge=0, le=86400)] = DetachSettings().seconds_max
    max_detached_streams: Annotated[int, about(
        "streams at a time that may continue without their client, at most half of them of one caller; further ones "
        "are refused with 429", "N", ge=1)] = DetachSettings().streams_max
    router_grace: Annotated[float, about(
        "seconds that a stream continues after its router has died, so that another router can take it over; only for "
        "routers with --router-peers; 0: the stream ends at once", "SECONDS", ge=0, le=60)] = ROUTER_GRACE.seconds_max
    max_router_streams: Annotated[int, about(
        "streams of such routers at a time that can be taken over; further streams end with their router",
        "N", ge=1, le=4096)] = ROUTER_GRACE.streams_max
    # fmt: on

    def store_settings(self) -> StoreSettings:
        """Return the limits of the store."""
        return StoreSettings(
            bytes_max=self.store_max_bytes, objects_max=self.store_max_objects, seconds_max=self.store_ttl
        )

    def background_settings(self) -> BackgroundSettings:
        """Return the limits of background responses."""
        count = self.max_background_responses
        return BackgroundSettings(
            responses_max=count, responses_of_one_max=(count + 1) // 2, seconds_max=self.background_timeout
        )

    def batch_settings(self) -> BatchSettings:
        """Return the limits of batches."""
        count = self.max_batches
        return BatchSettings(
            batches_max=count, batches_of_one_max=(count + 3) // 4, lines_at_once=self.batch_concurrency
        )

    def router_grace_settings(self) -> DetachSettings:
        """Return the limits of streams whose router has failed."""
        count = self.max_router_streams
        return DetachSettings(seconds_max=self.router_grace, streams_max=count, streams_of_one_max=count)

    def detach_settings(self) -> DetachSettings:
        """Return the limits of detached streams, which continue after their client has disconnected."""
        count = self.max_detached_streams
        return DetachSettings(
            seconds_max=self.detach_timeout_max, streams_max=count, streams_of_one_max=(count + 1) // 2
        )
