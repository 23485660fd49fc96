"""Options of a router: the endpoints, and how the router selects an endpoint for a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from trioserve.contracts.endpoint import CONTINUATION_BYTES_MAX, DISAGGREGATED_PROMPT_TOKENS_MIN
from trioserve.options.option import about
from trioserve.options.server import ConnectionOptions, ServerOptions
from trioserve.router.settings import RouterSettings, SilenceSettings

__all__ = ["ChatOptions", "ClusterOptions", "RouterOptions"]

ROUTER, SILENCE = RouterSettings(), SilenceSettings()
ROUTER_PROCESSES_MAX = 64  # PEERS_MAX, the limit on routers in front of the same endpoints, has the same value.


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Option of programs that ask a Ray cluster for engines or ranks."""

    # fmt: off
    ray_address: Annotated[str | None, about(
        "Ray cluster for --endpoints-ray and for the ranks of --distributed-executor-backend ray, such as "
        "10.0.0.7:6379, or ray://10.0.0.7:10001 from outside of the cluster; default: RAY_ADDRESS, or the cluster of "
        "this machine", "ADDRESS")] = None
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Option of programs that turn chats into tokens."""

    # fmt: off
    control_tokens_in_text: Annotated[Literal["keep-as-text", "parse"], about(
        "how control tokens, such as <|im_start|>, are read in the texts of a chat: keep-as-text keeps them as "
        "ordinary text, parse makes them control tokens, so that a text can end its message; prompts outside of chats "
        "are always parsed")] = "keep-as-text"
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class RouterOptions(ServerOptions, ClusterOptions, ChatOptions, ConnectionOptions):
    """Options of a router: a server without an engine."""

    # fmt: off
    endpoint: Annotated[tuple[str, ...], about(
        "servers to route to, such as http://10.0.0.7:8000 or name=http://10.0.0.7:8000; default: none", "URL")] = ()
    prefill_endpoint: Annotated[tuple[str, ...], about(
        "servers that compute prompts and pass the KV on to a decode endpoint; default: the other endpoints that "
        "report this role", "URL")] = ()
    decode_endpoint: Annotated[tuple[str, ...], about(
        "servers that receive the KV of a prompt and generate the response; default: the other endpoints that report "
        "this role", "URL")] = ()
    split_min_tokens: Annotated[int, about(
        "length of a prompt in tokens, estimated from its text, from which on a request goes to a prefill endpoint and "
        "then to a decode endpoint, if there are both", "TOKENS", ge=1)] = DISAGGREGATED_PROMPT_TOKENS_MIN
    endpoints_file: Annotated[str | None, about(
        "TOML or JSON file with a list 'endpoints'; the router watches it for changes; default: none", "FILE")] = None
    endpoints_dns: Annotated[str | None, about(
        "name whose addresses are endpoints, such as llm.example.org:8000, or a service, such as "
        "_http._tcp.llm.example.org; default: none", "NAME")] = None
    endpoints_kubernetes: Annotated[str | None, about(
        "Kubernetes service whose ready endpoints are used, as [NAMESPACE/]SERVICE[:PORT]; default: none",
        "SERVICE")] = None
    endpoints_ray: Annotated[str | None, about(
        "group of engines that `trioserve ray up` has started; needs the extra ray; default: none", "GROUP")] = None
    endpoint_api_key: Annotated[str | None, about(
        "API key that the router sends to endpoints; default: the client's key, if this server has no API keys",
        "KEY")] = None
    endpoint_ca_certs: Annotated[str | None, about(
        "file with CA certificates in PEM for https endpoints; default: the system's", "FILE")] = None
    model_alias: Annotated[tuple[str, ...], about(
        "names for models, such as gpt-4=smollm2; default: none", "NAME=MODEL")] = ()
    policy: Annotated[str, about(
        "how an endpoint is chosen: round_robin, least_loaded, power_of_two, session, prefix_aware, kv_aware, or an "
        "installed policy", "NAME")] = "least_loaded"
    tokenizer: Annotated[str | None, about(
        "the endpoints' model, as in their --model; --policy kv_aware needs its tokenizer; default: none, or the "
        "served model", "MODEL")] = None
    session_header: Annotated[str, about(
        "header that names a conversation, for --policy session; without it, prompt_cache_key in the body does",
        "NAME")] = "x-session-id"
    endpoint_max_requests: Annotated[int, about(
        "sequences that one endpoint gets at a time",
        "N", ge=1)] = ROUTER.leases_max
    max_request_sequences: Annotated[int, about(
        "responses that one request may ask for (n times its prompts), if requests are routed",
        "N", ge=1)] = ROUTER.sequences_max
    endpoint_max_waiting: Annotated[int, about(
        "sequences that may wait inside of one endpoint, as the endpoint reports them",
        "N", ge=0)] = ROUTER.waiting_depth_max
    lease_until: Annotated[Literal["first_token", "end"], about(
        "until when a request counts as load of its endpoint")] = ROUTER.lease_until
    max_continuation_bytes: Annotated[int, about(
        "memory that one stream may use so that it can be resumed at another endpoint, about 8 bytes per token; a "
        "longer stream cannot be resumed; 0: no stream can", "BYTES", ge=0, le=2**30)] = CONTINUATION_BYTES_MAX
    router_peers: Annotated[tuple[str, ...], about(
        "routers before the same endpoints, each as NAME=URL or URL, or all of them as file:FILE or dns:NAME:PORT; "
        "this router may be listed, too. They share the endpoints' limits, and a client whose router dies can resume "
        "at another one; default: none", "ROUTER")] = ()
    router_name: Annotated[str | None, about(
        "name of this router among --router-peers; default: the name under which it finds itself there", "NAME")] = None
    router_processes: Annotated[int, about(
        "processes of route that share the port, one per core: connections are spread over them, and queue limits "
        "apply to each; only on Linux, for TCP, without --router-peers", "N", ge=1, le=ROUTER_PROCESSES_MAX)] = 1
    health_interval: Annotated[float, about(
        "seconds between two health checks of an endpoint", "SECONDS", gt=0, le=3600)] = 2.0
    continuations_per_second: Annotated[float, about(
        "streams per second that are resumed at another endpoint after theirs has stopped; further streams wait",
        "N", gt=0, le=1e6)] = ROUTER.continuations_per_second_max
    retry_share: Annotated[float, about(
        "share of all requests that may be retried at another endpoint because theirs answered with an error or was "
        "full; requests whose endpoint was lost are not counted", "SHARE", ge=0, le=1)] = ROUTER.retry_share_max
    retries_per_second: Annotated[float, about(
        "retries per second that are allowed in addition to --retry-share, and ten times as many in a burst",
        "N", ge=0, le=1e6)] = ROUTER.retries_per_second_min
    max_request_attempts: Annotated[int, about(
        "endpoints that may answer one request with an error before its first token, or be lost with it, until the "
        "router treats the request as the cause; twice as many if the lost endpoints had other such requests, too",
        "N", ge=1, le=100)] = ROUTER.attempts_max
    hang_timeout: Annotated[float, about(
        "seconds without any answer after which an endpoint is treated as lost, and its streams resume at others",
        "SECONDS", gt=0, le=3600)] = 6.0
    heartbeat_interval: Annotated[float, about(
        "seconds between two heartbeat bytes that an endpoint sends within a response, so that a silent connection is "
        "noticed; 0: no heartbeats", "SECONDS", ge=0, le=3600)] = SILENCE.beat_seconds
    silence_timeout: Annotated[float, about(
        "seconds without a byte after which a response is taken from an endpoint that sends heartbeats; at least three "
        "intervals, or two intervals and 1 s", "SECONDS", ge=1, le=86400)] = SILENCE.silent_seconds_max
    stalled_timeout: Annotated[float, about(
        "seconds without a byte after which a begun response is taken from an endpoint that sends no heartbeats, such "
        "as vLLM; 0: no limit", "SECONDS", ge=0, le=86400)] = SILENCE.stalled_seconds_max
    move_timeout: Annotated[float, about(
        "seconds in which the streams of an endpoint that stops, or that is no longer found, are resumed at others; 0: "
        "its streams end there", "SECONDS", ge=0, le=86400)] = 30.0
    load_interval: Annotated[float, about(
        "seconds between two requests for an endpoint's load", "SECONDS", gt=0, le=3600)] = 0.25
    # fmt: on

    def router_settings(self) -> RouterSettings:
        """Return the limits of the router.

        Raises:
            StartupError: a limit is out of range.
        """
        return RouterSettings(
            queue_requests_max=self.max_queued_requests,
            queue_prompt_tokens_max=self.max_queued_tokens,
            queue_seconds_max=self.max_queue_wait,
            leases_max=self.endpoint_max_requests,
            sequences_max=self.max_request_sequences,
            waiting_depth_max=self.endpoint_max_waiting,
            lease_until=self.lease_until,
            continuations_per_second_max=self.continuations_per_second,
            sends_probes=True,
            retry_share_max=self.retry_share,
            retries_per_second_min=self.retries_per_second,
            attempts_max=self.max_request_attempts,
            # Several polls of the load may fail before the last known load counts as too old.
            load_seconds_max=max(2.0, 4 * self.load_interval),
        )

    def silence_settings(self) -> SilenceSettings:
        """Return the limits on the time between the bytes of a response.

        Raises:
            StartupError: a limit is out of range.
        """
        return SilenceSettings(
            beat_seconds=self.heartbeat_interval,
            silent_seconds_max=self.silence_timeout,
            stalled_seconds_max=self.stalled_timeout,
        )
