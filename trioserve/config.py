"""Options of the server. A file, environment variables and flags become one frozen Config.

The field `max_model_len` is the flag `--max-model-len`, the variable `TRIOSERVE_MAX_MODEL_LEN`, and
`max_model_len = 4096` in a TOML file. A flag overrides a variable, and a variable overrides the file. In a variable,
the items of a list are separated by commas or blanks.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec
from msgspec import Meta

from trioserve.api.limits import ROUTER_GRACE, BackgroundSettings, BatchSettings, DetachSettings
from trioserve.connectors.settings import connector_settings
from trioserve.contracts.endpoint import CONTINUATION_BYTES_MAX, DISAGGREGATED_PROMPT_TOKENS_MIN
from trioserve.contracts.errors import StartupError
from trioserve.contracts.image_generation import ImageRequestLimits
from trioserve.contracts.images import ImageLimits
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.spelling import closest_name
from trioserve.core.settings import check_overlap
from trioserve.engine.settings import RESTARTS_MAX, EngineSettings, deadlines_of
from trioserve.http.limits import KEEP_ALIVE_SECONDS, RESPONSE_BYTES_MAX, RESPONSES_BYTES_MAX, FrontendLimits
from trioserve.model.drafts.settings import DRAFT_TOKENS_MAX, DraftSettings, draft_settings
from trioserve.model.loading.settings import generation_settings, lora_modules
from trioserve.router.settings import SilenceSettings
from trioserve.store.settings import StoreSettings

__all__ = [
    "Config",
    "RouteConfig",
    "ServerConfig",
    "add_arguments",
    "config_from",
    "drafts_of",
    "engine_settings",
    "image_limits",
    "make_config",
]

ENVIRONMENT_PREFIX = "TRIOSERVE_"
OTHER_VARIABLE = re.compile(r"NATIVE|URL|CLIENTS|QWEN_CODER|KV_KEY_DIRECTORY")
"""Variables of trioserve that are not options."""

KUBERNETES_VARIABLE = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
"""Variables that Kubernetes sets for each service of a namespace. A service may be called trioserve or trioserve-kv."""

RANKS_MAX = 64  # no supported model has more key and value heads to distribute
ROUTER_PROCESSES_MAX = 64  # same as PEERS_MAX, the limit of routers before the same endpoints

TOKEN_COUNTS = frozenset({"max_model_len", "max_num_batched_tokens"})
"""Options with large numbers of tokens, which may end in k or K."""


def _about(description: str, unit: str | None = None, **bounds: float) -> Meta:
    # mypy does not accept Meta with bounds from a dict. Meta checks them itself.
    return Meta(title=unit, description=description, **bounds)  # type: ignore[call-overload, no-any-return]


Seconds = Annotated[float, Meta(gt=0)] | None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every server. Names and meanings are those of vLLM where vLLM has the option."""

    # fmt: off
    host: Annotated[str, _about("address to listen at", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, _about("TCP port; 0 takes a free one", "PORT", ge=0, le=65535)] = 8000
    uds: Annotated[str | None, _about(
        "path of a Unix domain socket to listen at, instead of --host and --port; native front end only; default: none",
        "PATH")] = None
    root_path: Annotated[str, _about(
        "path prefix of requests, such as /llm, if a proxy in front does not remove it; default: no prefix",
        "PATH")] = ""
    api_key: Annotated[tuple[str, ...], _about(
        "keys that clients must send as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'; default: none", "KEY")] = ()
    admin_api_key: Annotated[str | None, _about(
        "API key of the administrator: it may see and abort the requests of all keys, and its priority, tenant and "
        "cache_salt are accepted as sent; default: none", "KEY")] = None
    gateway_api_key: Annotated[tuple[str, ...], _about(
        "API keys of trusted gateways: the server accepts their --tenant-header and priority, and each of their "
        "tenants has its own cached prompts; default: none", "KEY")] = ()
    priority_min: Annotated[Annotated[int, Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)] | None, _about(
        "lowest priority number that a request may ask for (a lower number runs sooner); a lower number is refused "
        "with 400, except for admin and gateway keys; default: 0 with API keys, no limit without", "N")] = None
    share_prefix_cache: Annotated[bool, _about(
        "let requests of all API keys share cached prompts: a common system prompt is computed once, but a key can "
        "find out, from cached_tokens or response times, whether another key has sent a text that it guesses")] = False
    metrics_need_key: Annotated[bool, _about(
        "show /metrics, which counts the requests of all callers, only to the admin's API key")] = False
    load_needs_key: Annotated[bool, _about(
        "refuse /load without an API key; a router before this server then needs --endpoint-api-key")] = False
    ssl_certfile: Annotated[str | None, _about(
        "file with the certificate chain in PEM; turns TLS on; default: no TLS", "FILE")] = None
    ssl_keyfile: Annotated[str | None, _about(
        "file with the certificate's key in PEM; default: the key is in --ssl-certfile", "FILE")] = None
    ssl_ca_certs: Annotated[str | None, _about(
        "file with CA certificates in PEM that sign client certificates; default: none", "FILE")] = None
    ssl_client_certs: Annotated[Literal["none", "optional", "required"], _about(
        "whether clients must (required) or may (optional) show a certificate; needs --ssl-ca-certs")] = "none"
    cors_origin: Annotated[tuple[str, ...], _about(
        "origins of web pages that may call the API from browsers, such as https://chat.example.org, or * for all; "
        "default: none", "ORIGIN")] = ()
    allowed_host: Annotated[tuple[str, ...], _about(
        "names that clients may send in the Host header, besides IP addresses, localhost and --host; *.example.org "
        "allows all names below it, and * every name; with API keys every name is allowed; default: none", "NAME")] = ()
    allow_operator_without_key: Annotated[bool, _about(
        "let every client use the operator's endpoints (pause, sleep, weights, adapters, endpoints, list of requests, "
        "debugging) although the server has no API keys and listens at an address that other machines reach")] = False
    max_connections: Annotated[int, _about(
        "client connections at a time; a further connection replaces an idle one, or waits; the limit of open files "
        "may lower this number. With API keys, a quarter is reserved for connections that have shown a key",
        "N", ge=1, le=1000000)] = FrontendLimits().connections_max
    max_connections_per_address: Annotated[Annotated[int, Meta(ge=1, le=1000000)] | None, _about(
        "of these, connections from one address (IPv6: one /64) that have shown no API key; does not apply to Unix "
        "sockets; default: all but one in 64", "N")] = None
    max_body_bytes: Annotated[int, _about(
        "largest size of a request's body; a larger one is refused with 413",
        "BYTES", ge=1024, le=2**31 - 1)] = FrontendLimits().body_bytes_max
    body_timeout: Annotated[Seconds, _about(
        "seconds in which a request's whole body must arrive, otherwise the request is refused with 408; default: 600, "
        "or the time for --max-body-bytes at half a Mbit/s if that is longer", "SECONDS")] = None
    max_response_bytes: Annotated[int, _about(
        "largest size of a whole (not streamed) response, estimated from its request: choices x tokens x (log "
        "probabilities + 1), repeated prompts, vectors x dimensions; a larger one is refused with 400. Streams have no "
        "such limit, because they are sent piece by piece", "BYTES", ge=1024, le=2**31 - 1)] = RESPONSE_BYTES_MAX
    max_responses_bytes: Annotated[int, _about(
        "memory for the whole (not streamed) responses of all clients, counted as they grow; a response that does not "
        "fit is refused with 429. Responses below 64 KiB are not counted",
        "BYTES", ge=1024, le=2**40)] = RESPONSES_BYTES_MAX
    stall_timeout: Annotated[float, _about(
        "seconds after which a client that reads nothing of its response is cancelled",
        "SECONDS", gt=0, le=86400)] = FrontendLimits().stall_seconds_max
    keep_alive_timeout: Annotated[float, _about(
        "seconds after which a connection without a running request is closed; set it longer than the timeout of "
        "proxies in front", "SECONDS", gt=0, le=86400)] = FrontendLimits().idle_seconds_max
    keep_alive_comments: Annotated[float, _about(
        "seconds of silence after which a stream gets a comment, which clients skip, so that proxies keep its "
        "connection open; a request that waits longer in the queue gets status 200 at that time, and a later error is "
        "sent as an event", "SECONDS", ge=1, le=86400)] = KEEP_ALIVE_SECONDS
    keep_alive_json: Annotated[bool, _about(
        "keep connections of whole (not streamed) JSON responses open, too: after --keep-alive-comments seconds the "
        "client gets status 200 and white space, which JSON parsers skip, and a later error is sent as the body. With "
        "a router, set this at the router and not at its endpoints")] = False
    ping_interval: Annotated[float, _about(
        "seconds of silence after which an HTTP/2 client with running streams gets a PING, to see whether it still "
        "reads", "SECONDS", gt=0, le=86400)] = FrontendLimits().ping_seconds
    ping_timeout: Annotated[float, _about(
        "seconds after which an HTTP/2 client that does not answer a PING loses its streams; this detects clients, "
        "such as httpx, that leave a stream without notice; 86400 lets such streams run",
        "SECONDS", gt=0, le=86400)] = FrontendLimits().ping_answer_seconds_max
    vanished_timeout: Annotated[float, _about(
        "seconds after which TCP keepalive detects that a client's machine or network is gone; the client's requests "
        "end then", "SECONDS", ge=6, le=86400)] = FrontendLimits().vanished_seconds_max
    require_model: Annotated[bool, _about(
        "refuse a request that names no model with 400, as OpenAI's API does; otherwise it gets the first model",
        )] = False
    tenant_header: Annotated[str, _about(
        "header that names the tenant of a request; tenants share the queue fairly. With API keys, each key is a "
        "tenant, and the header is accepted only from gateway and admin keys; without keys it is accepted from every "
        "client", "NAME")] = "x-tenant-id"
    max_queued_requests: Annotated[int, _about(
        "requests that may wait for one model; further requests are refused with 429", "N", ge=0)] = 256
    max_queued_tokens: Annotated[int, _about("prompt tokens that may wait for one model", "TOKENS", ge=1)] = 1_000_000
    max_queue_wait: Annotated[float, _about(
        "longest time that any request may wait in the queue, in seconds", "SECONDS", gt=0, le=86400)] = 300.0
    queue_timeout: Annotated[Seconds, _about(
        "seconds that a request may wait before it runs, unless the request sets its own timeout; default: no limit",
        "SECONDS")] = None
    ttft_timeout: Annotated[Seconds, _about(
        "seconds until the first token of a request, unless the request sets its own timeout; default: no limit",
        "SECONDS")] = None
    request_timeout: Annotated[Seconds, _about(
        "seconds until the response of a request is complete, unless the request sets its own timeout; default: no "
        "limit", "SECONDS")] = None
    max_queue_timeout: Annotated[Seconds, _about(
        "highest queue timeout that a request may set, in seconds; default: no limit", "SECONDS")] = None
    max_ttft_timeout: Annotated[Seconds, _about(
        "highest timeout for the first token that a request may set, in seconds; default: no limit", "SECONDS")] = None
    max_request_timeout: Annotated[Seconds, _about(
        "highest timeout for the whole response that a request may set, in seconds; default: no limit",
        "SECONDS")] = None
    ui: Annotated[bool, _about("serve a status page for browsers at /; with API keys, its data needs a key")] = True
    drain_timeout: Annotated[float, _about(
        "seconds that running requests get after Ctrl-C or SIGTERM", "SECONDS", ge=0, le=86400)] = 30.0
    drain_delay: Annotated[float, _about(
        "shortest time in seconds that the server still answers after SIGTERM, with 503 for /ready and new requests, "
        "so that load balancers notice; the server always answers until the last request has ended, and never longer "
        "than --drain-timeout; Ctrl-C has no such delay", "SECONDS", ge=0, le=86400)] = 2.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _about(
        "lowest level of messages that are logged to stderr")] = "info"
    log_format: Annotated[Literal["text", "json"], _about(
        "format of log lines; json has the fields request, tenant and trace")] = "text"
    access_log: Annotated[bool, _about(
        "log a line for each request, with status, tokens, seconds and the way it ended; frequent polls, such as "
        "/health and /metrics, are logged only at --log-level debug")] = True
    otlp_endpoint: Annotated[str | None, _about(
        "OpenTelemetry collector that gets a trace of each request, by OTLP over HTTP, such as http://127.0.0.1:4318; "
        "needs the extra otel; default: OTEL_EXPORTER_OTLP_ENDPOINT, or no traces", "URL")] = None
    trace_sample: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, _about(
        "share of requests that are traced, if the client does not decide it; default: OTEL_TRACES_SAMPLER, or all",
        "SHARE")] = None
    # fmt: on


class RouteConfig(ServerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a router: a server without an engine."""

    # fmt: off
    endpoint: Annotated[tuple[str, ...], _about(
        "servers to route to, such as http://10.0.0.7:8000 or name=http://10.0.0.7:8000; default: none", "URL")] = ()
    prefill_endpoint: Annotated[tuple[str, ...], _about(
        "servers that compute prompts and pass the KV on to a decode endpoint; default: the other endpoints that "
        "report this role", "URL")] = ()
    decode_endpoint: Annotated[tuple[str, ...], _about(
        "servers that receive the KV of a prompt and generate the response; default: the other endpoints that report "
        "this role", "URL")] = ()
    split_min_tokens: Annotated[int, _about(
        "length of a prompt in tokens, estimated from its text, from which on a request goes to a prefill endpoint and "
        "then to a decode endpoint, if there are both", "TOKENS", ge=1)] = DISAGGREGATED_PROMPT_TOKENS_MIN
    endpoints_file: Annotated[str | None, _about(
        "TOML or JSON file with a list 'endpoints'; the router watches it for changes; default: none", "FILE")] = None
    endpoints_dns: Annotated[str | None, _about(
        "name whose addresses are endpoints, such as llm.example.org:8000, or a service, such as "
        "_http._tcp.llm.example.org; default: none", "NAME")] = None
    endpoints_kubernetes: Annotated[str | None, _about(
        "Kubernetes service whose ready endpoints are used, as [NAMESPACE/]SERVICE[:PORT]; default: none",
        "SERVICE")] = None
    endpoints_ray: Annotated[str | None, _about(
        "group of engines that `trioserve ray up` has started; needs the extra ray; default: none", "GROUP")] = None
    ray_address: Annotated[str | None, _about(
        "Ray cluster for --endpoints-ray and for the ranks of --distributed-executor-backend ray, such as "
        "10.0.0.7:6379, or ray://10.0.0.7:10001 from outside of the cluster; default: RAY_ADDRESS, or the cluster of "
        "this machine", "ADDRESS")] = None
    endpoint_api_key: Annotated[str | None, _about(
        "API key that the router sends to endpoints; default: the client's key, if this server has no API keys",
        "KEY")] = None
    endpoint_ca_certs: Annotated[str | None, _about(
        "file with CA certificates in PEM for https endpoints; default: the system's", "FILE")] = None
    model_alias: Annotated[tuple[str, ...], _about(
        "names for models, such as gpt-4=smollm2; default: none", "NAME=MODEL")] = ()
    policy: Annotated[str, _about(
        "how an endpoint is chosen: round_robin, least_loaded, power_of_two, session, prefix_aware, kv_aware, or an "
        "installed policy", "NAME")] = "least_loaded"
    tokenizer: Annotated[str | None, _about(
        "the endpoints' model, as in their --model; --policy kv_aware needs its tokenizer; default: none, or the "
        "served model", "MODEL")] = None
    control_tokens_in_text: Annotated[Literal["keep-as-text", "parse"], _about(
        "how control tokens, such as <|im_start|>, are read in the texts of a chat: keep-as-text keeps them as "
        "ordinary text, parse makes them control tokens, so that a text can end its message; prompts outside of chats "
        "are always parsed")] = "keep-as-text"
    session_header: Annotated[str, _about(
        "header that names a conversation, for --policy session", "NAME")] = "x-session-id"
    endpoint_max_requests: Annotated[int, _about("sequences that one endpoint gets at a time", "N", ge=1)] = 64
    max_request_sequences: Annotated[int, _about(
        "responses that one request may ask for (n times its prompts), if requests are routed", "N", ge=1)] = 256
    endpoint_max_waiting: Annotated[int, _about(
        "sequences that may wait inside of one endpoint, as the endpoint reports them", "N", ge=0)] = 4
    lease_until: Annotated[Literal["first_token", "end"], _about(
        "until when a request counts as load of its endpoint")] = "end"
    max_continuation_bytes: Annotated[int, _about(
        "memory that one stream may use so that it can be resumed at another endpoint, about 8 bytes per token; a "
        "longer stream cannot be resumed; 0: no stream can", "BYTES", ge=0, le=2**30)] = CONTINUATION_BYTES_MAX
    router_peers: Annotated[tuple[str, ...], _about(
        "routers before the same endpoints, each as NAME=URL or URL, or all of them as file:FILE or dns:NAME:PORT; "
        "this router may be listed, too. They share the endpoints' limits, and a client whose router dies can resume "
        "at another one; default: none", "ROUTER")] = ()
    router_name: Annotated[str | None, _about(
        "name of this router among --router-peers; default: the name under which it finds itself there", "NAME")] = None
    router_processes: Annotated[int, _about(
        "processes of route that share the port, one per core: connections are spread over them, and queue limits "
        "apply to each; only on Linux, for TCP, without --router-peers", "N", ge=1, le=ROUTER_PROCESSES_MAX)] = 1
    health_interval: Annotated[float, _about(
        "seconds between two health checks of an endpoint", "SECONDS", gt=0, le=3600)] = 2.0
    continuations_per_second: Annotated[float, _about(
        "streams per second that are resumed at another endpoint after theirs has stopped; further streams wait",
        "N", gt=0, le=1e6)] = 100.0
    retry_share: Annotated[float, _about(
        "share of all requests that may be retried at another endpoint because theirs answered with an error or was "
        "full; requests whose endpoint was lost are not counted", "SHARE", ge=0, le=1)] = 0.2
    retries_per_second: Annotated[float, _about(
        "retries per second that are allowed in addition to --retry-share, and ten times as many in a burst",
        "N", ge=0, le=1e6)] = 3.0
    max_request_attempts: Annotated[int, _about(
        "endpoints that may answer one request with an error before its first token, or be lost with it, until the "
        "router treats the request as the cause; twice as many if the lost endpoints had other such requests, too",
        "N", ge=1, le=100)] = 3
    hang_timeout: Annotated[float, _about(
        "seconds without any answer after which an endpoint is treated as lost, and its streams resume at others",
        "SECONDS", gt=0, le=3600)] = 6.0
    heartbeat_interval: Annotated[float, _about(
        "seconds between two heartbeat bytes that an endpoint sends within a response, so that a silent connection is "
        "noticed; 0: no heartbeats", "SECONDS", ge=0, le=3600)] = SilenceSettings().beat_seconds
    silence_timeout: Annotated[float, _about(
        "seconds without a byte after which a response is taken from an endpoint that sends heartbeats; at least three "
        "intervals, or two intervals and 1 s", "SECONDS", ge=1, le=86400)] = SilenceSettings().silent_seconds_max
    stalled_timeout: Annotated[float, _about(
        "seconds without a byte after which a begun response is taken from an endpoint that sends no heartbeats, such "
        "as vLLM; 0: no limit", "SECONDS", ge=0, le=86400)] = SilenceSettings().stalled_seconds_max
    move_timeout: Annotated[float, _about(
        "seconds in which the streams of an endpoint that stops, or that is no longer found, are resumed at others; 0: "
        "its streams end there", "SECONDS", ge=0, le=86400)] = 30.0
    load_interval: Annotated[float, _about(
        "seconds between two requests for an endpoint's load", "SECONDS", gt=0, le=3600)] = 0.25
    # fmt: on


class Config(RouteConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a server with an engine. It also routes if there are other endpoints.

    The defaults fit a small machine without a GPU.
    """

    # fmt: off
    model: Annotated[str, _about(
        "model to serve: smollm2, a directory with safetensors, a .gguf file, or a hub name", "MODEL")] = "smollm2"
    tokenizer: Annotated[str | None, _about(
        "tokenizer and chat template to use: a directory, a .gguf file or a hub name; default: the model's own",
        "MODEL")] = None
    revision: Annotated[str | None, _about(
        "branch, tag or commit of a hub model; default: its main branch", "NAME")] = None
    chat_template: Annotated[str | None, _about(
        "file with a chat template, or the template itself, to use instead of the model's; default: the model's",
        "FILE")] = None
    served_model_name: Annotated[tuple[str, ...], _about(
        "model names that requests may use; default: the last part of --model", "NAME")] = ()
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], _about(
        "data type of weights and KV cache; auto uses the checkpoint's")] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], _about(
        "device that computes; auto uses a GPU if there is one")] = "auto"
    threads: Annotated[Annotated[int, Meta(ge=1, le=1024)] | None, _about(
        "CPU threads of a forward pass; default: one per core", "N")] = None
    cpu_kernels: Annotated[Literal["auto", "native", "torch"], _about(
        "kernels for the CPU; auto uses native kernels, compiled at the first start, if possible")] = "auto"
    gpu_kernels: Annotated[Literal["torch", "triton"], _about(
        "kernels for the GPU; triton records decode steps as CUDA graphs, and has not been tried on a GPU yet",
        )] = "torch"
    quantization: Annotated[Literal["auto", "none", "file", "int8", "int4"], _about(
        "how native kernels store weights: file keeps the bits of a quantized file, int8 and int4 quantize any "
        "checkpoint, none uses --dtype; auto uses file if possible, otherwise none")] = "auto"
    kv_cache_dtype: Annotated[Literal["auto", "int8", "fp8"], _about(
        "data type of keys and values; int8 and fp8 (e4m3) store twice as many tokens in the same memory; auto uses "
        "--dtype")] = "auto"
    max_model_len: Annotated[Annotated[int, Meta(ge=2)] | None, _about(
        "most tokens of prompt and response together, such as 8192, 32k or 32K; auto and default: as many as the model "
        "supports and the KV cache holds", "TOKENS")] = None
    max_num_seqs: Annotated[int, _about("sequences that run at a time", "N", ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, _about(
        "tokens computed in one step; longer prompts are computed in chunks", "TOKENS", ge=1)] = 512
    wide_prompt_stretch: Annotated[float, _about(
        "how much longer a step may take while it computes a part of a long prompt and other requests get tokens: a "
        "smaller factor gives these a steadier pace, a larger factor computes the prompt sooner",
        "FACTOR", gt=1, le=1000)] = 1.5
    block_size: Annotated[int, _about(
        "tokens in one KV block", "TOKENS", ge=1, le=256)] = 16
    kv_cache_memory: Annotated[Annotated[float, Meta(gt=0)] | None, _about(
        "memory for the KV cache in GiB; default: at most 4 on a CPU, the free memory on a GPU", "GIB")] = None
    gpu_memory_utilization: Annotated[float, _about(
        "share of the GPU's memory for weights and KV cache, above 0 and up to 1", "SHARE", gt=0, le=1)] = 0.9
    enforce_eager: Annotated[bool, _about(
        "launch every kernel of a step separately, without CUDA graphs; saves their memory, and seconds at the start",
        )] = False
    batch_invariant: Annotated[bool, _about(
        "make the bits of a response depend only on its own tokens and the weights, not on other requests of the "
        "batch; the server refuses to start if this is not possible")] = False
    enable_prefix_caching: Annotated[bool, _about(
        "keep full blocks, so that prompts with the same beginning share them")] = True
    overlap_steps: Annotated[bool, _about(
        "plan the next step while one is computed; shortens the gap between two forward passes, but the end of a "
        "response is noticed one step later; not with --speculative-ngram; with --pipeline-parallel-size, two steps of "
        "different requests are computed at a time")] = False
    speculative_ngram: Annotated[int, _about(
        "draft tokens per request and step that are taken from the request's own text; speeds up a few streams that "
        "repeat parts of their prompts; 0: off", "TOKENS", ge=0, le=15)] = 0
    speculative_model: Annotated[str | None, _about(
        "small model with the same vocabulary that proposes draft tokens, which the model verifies in a step; named as "
        "--model, or mtp for the model's own prediction layer; default: none", "NAME")] = None
    speculative_tokens: Annotated[int, _about(
        "draft tokens per request and step; fewer or none are drafted if more do not pay off",
        "TOKENS", ge=1, le=DRAFT_TOKENS_MAX)] = 4
    speculative_quantization: Annotated[Literal["auto", "none", "file", "int8", "int4"], _about(
        "how the weights of --speculative-model are stored, as --quantization")] = "auto"
    speculative_config: Annotated[str | dict[str, Any] | None, _about(
        """JSON as in vLLM, instead of the other --speculative flags, such as {"model": "NAME", """
        """"num_speculative_tokens": 4}; default: none""", "JSON")] = None
    step_timeout: Annotated[Annotated[float, Meta(ge=0, le=86400)] | None, _about(
        "longest time of one step in seconds; during a longer step /ready fails and new requests are refused, and "
        "after five times as long /health fails, too; 0: no limit; default: 60, or ten times the longest step so far "
        "if that is more", "SECONDS")] = None
    engine_restarts: Annotated[int, _about(
        "how often within ten minutes the engine is reopened after a fault; its streams pause and resume; 0: the first "
        "fault ends the server", "N", ge=0, le=RESTARTS_MAX)] = 3
    tool_call_parser: Annotated[str, _about(
        "format in which the model writes tool calls: auto uses the format of its chat template, none leaves tool "
        "calls as text, otherwise a family, such as hermes, mistral or llama3_json", "NAME")] = "auto"
    tool_call_leniency: Annotated[Literal["strict", "lenient"], _about(
        "texts that are read as tool calls: strict reads those that the model's format marks; lenient also reads bare "
        "or fenced JSON if the response contains nothing else, for models that forget the marks; then an example that "
        "a user asks for may run as a call", "NAME")] = "strict"
    reasoning_parser: Annotated[str, _about(
        "format in which the model writes its reasoning: auto uses the format of its chat template, none leaves "
        "reasoning in the text, otherwise a family, such as qwen3 or deepseek_r1", "NAME")] = "auto"
    generation_config: Annotated[str, _about(
        "sampling options of requests that set none: auto uses the recommendation of the model's makers, vllm the "
        "neutral temperature 1, otherwise a directory with a generation_config.json, whose max_new_tokens also limits "
        "every request", "DIR")] = "auto"
    override_generation_config: Annotated[str | dict[str, Any] | None, _about(
        """JSON with fields of the generation config to replace, such as {"temperature": 0.5}; default: none""",
        "JSON")] = None
    allowed_media_domains: Annotated[tuple[str, ...], _about(
        "hosts, with all their subdomains, from which the server fetches images that a request names by an http or "
        "https URL; default: nothing is fetched", "HOST")] = ()
    limit_mm_per_prompt: Annotated[str | dict[str, int] | None, _about(
        """JSON as in vLLM: most images per prompt, for models that read images, such as {"image": 4}; default: 8""",
        "JSON")] = None
    image_decode_timeout: Annotated[float, _about(
        "longest time in seconds to decode one image of a request; after that the request fails with 400, and the "
        "decoding process is killed", "SECONDS", gt=0, le=3600)] = ImageLimits().decode_seconds_max
    max_image_pixels: Annotated[int, _about(
        "highest width times height of a generated image", "PIXELS", ge=1)] = ImageRequestLimits().pixels_max
    max_image_steps: Annotated[int, _about(
        "highest number of denoising steps of a request for images", "N", ge=1)] = ImageRequestLimits().steps_max
    max_images: Annotated[int, _about(
        "highest number of images (n) of a request", "N", ge=1)] = ImageRequestLimits().n_max
    seed: Annotated[int | None, _about(
        "source of the seeds of requests that set none: equal requests in equal order get equal seeds; default: random",
        "N")] = None
    tensor_parallel_size: Annotated[int, _about(
        "processes, called ranks, that compute the model together, each with a part of every layer: one per GPU, or on "
        "a CPU one per group of cores", "N", ge=1, le=RANKS_MAX)] = 1
    pipeline_parallel_size: Annotated[int, _about(
        "stages into which the model's layers are split; the stages compute one after the other, each with "
        "--tensor-parallel-size ranks", "N", ge=1, le=RANKS_MAX)] = 1
    enable_expert_parallel: Annotated[bool, _about(
        "give each rank whole experts of a mixture of experts, instead of a part of each")] = False
    distributed_executor_backend: Annotated[Literal["mp", "ray"], _about(
        "how ranks are started: mp starts them on this machine and on those of --nnodes, ray on free nodes of a Ray "
        "cluster; ray needs the extra ray")] = "mp"
    nnodes: Annotated[int, _about(
        "number of machines with ranks, each with the same number of ranks; start serve --headless on all but one",
        "N", ge=1, le=RANKS_MAX)] = 1
    node_rank: Annotated[int, _about(
        "number of this machine among --nnodes; the server is 0, and has the first ranks",
        "N", ge=0, le=RANKS_MAX - 1)] = 0
    master_addr: Annotated[str, _about(
        "address or name of the server's machine for ranks on other machines; with a name, the server listens for them "
        "at all of its addresses", "ADDRESS")] = "127.0.0.1"
    master_port: Annotated[int, _about(
        "TCP port of the server for ranks; torch.distributed uses the next port, too", "PORT", ge=1, le=65534)] = 29500
    ranks_key: Annotated[str | None, _about(
        "shared secret of the server and its ranks on other machines; default: none, and ranks on other machines are "
        "refused", "KEY")] = None
    headless: Annotated[bool, _about(
        "run only ranks of this machine, for the server at --master-addr, and no HTTP server")] = False
    enable_auto_tool_choice: Annotated[bool, _about(
        "accepted for command lines of vLLM, and ignored: tool_choice auto is always on")] = False
    enable_lora: Annotated[bool, _about(
        "accept LoRA adapters, which requests choose by their model name; on if --lora-modules is set")] = False
    lora_modules: Annotated[tuple[str, ...], _about(
        """adapters to load at the start, as NAME=PATH or as JSON: {"name": NAME, "path": PATH}; PATH is a directory """
        "in the format of peft; default: none", "NAME=PATH")] = ()
    max_loras: Annotated[int, _about(
        "adapters that may be loaded; one step may use any number of them", "N", ge=1, le=4096)] = 64
    max_cpu_loras: Annotated[Annotated[int, Meta(ge=1, le=4096)] | None, _about(
        "vLLM's other name for --max-loras: the larger of both applies, because adapters are not kept in two kinds of "
        "memory here; default: --max-loras", "N")] = None
    max_lora_rank: Annotated[int, _about("highest rank of an adapter", "N", ge=1, le=1024)] = 256
    allow_runtime_lora_updating: Annotated[bool, _about(
        "let the admin load and unload adapters at /v1/load_lora_adapter and /v1/unload_lora_adapter")] = False
    allowed_lora_path: Annotated[tuple[str, ...], _about(
        "directories from which the admin may load adapters; default: any directory", "DIR")] = ()
    kv_events: Annotated[bool, _about(
        "publish at /kv_events which blocks the prefix cache holds, for a router with --policy kv_aware")] = False
    kv_transfer_config: Annotated[str | dict[str, Any] | None, _about(
        """JSON as in vLLM: how KV blocks move to and from other engines, such as {"kv_connector": "tcp", "kv_role": """
        """"kv_both"}; default: no transfer""", "JSON")] = None
    role: Annotated[Literal["prefill", "decode", "both"], _about(
        "role of this engine, for routers; prefill or decode without --kv-transfer-config uses the connector tcp",
        )] = "both"
    kv_hold_timeout: Annotated[float, _about(
        "seconds that KV blocks of a finished request are held for another engine that does not contact this one",
        "SECONDS", gt=0, le=3600)] = 10.0
    kv_load_timeout: Annotated[float, _about(
        "seconds that a request waits for KV from another engine, before kv_load_failure_policy of "
        "--kv-transfer-config applies", "SECONDS", gt=0, le=3600)] = 10.0
    kv_held_share: Annotated[float, _about(
        "share of the KV cache that may be held for other engines; above it, responses have no kv_transfer_params",
        "SHARE", gt=0, le=1)] = 0.5
    data_dir: Annotated[str | None, _about(
        "directory for data that outlives a request, such as stored responses; the data survives a restart; default: "
        "in memory", "DIR")] = None
    store_max_bytes: Annotated[int, _about(
        "highest size of the stored data; above it, the oldest responses of the largest user are deleted, and data for "
        "which nothing can be deleted is refused with 507", "BYTES", ge=65536)] = StoreSettings().bytes_max
    store_max_objects: Annotated[int, _about(
        "highest number of stored responses, files and other objects; above it, objects are deleted as for "
        "--store-max-bytes", "N", ge=1)] = StoreSettings().objects_max
    store_ttl: Annotated[float, _about(
        "seconds that a response is stored", "SECONDS", gt=0, le=3.2e9)] = StoreSettings().seconds_max
    max_background_responses: Annotated[int, _about(
        "background responses at a time, at most half of them of one caller; further ones are refused with 429",
        "N", ge=0)] = BackgroundSettings().responses_max
    background_timeout: Annotated[float, _about(
        "longest time of a background response in seconds",
        "SECONDS", gt=0, le=86400)] = BackgroundSettings().seconds_max
    max_batches: Annotated[int, _about(
        "unfinished batches at a time, at most a quarter of them of one caller; further ones are refused with 429",
        "N", ge=0)] = BatchSettings().batches_max
    batch_concurrency: Annotated[int, _about(
        "requests of batches that run at a time; at most half of --max-num-seqs",
        "N", ge=1, le=1024)] = BatchSettings().lines_at_once
    detach_timeout_max: Annotated[float, _about(
        "highest X-Detach-Timeout in seconds: how long a streamed response continues after its client has left, if the "
        "request sends X-Session-Id and X-Detach-Timeout; 0: no response continues",
        "SECONDS", ge=0, le=86400)] = DetachSettings().seconds_max
    max_detached_streams: Annotated[int, _about(
        "streams at a time that may continue without their client, at most half of them of one caller; further ones "
        "are refused with 429", "N", ge=1)] = DetachSettings().streams_max
    router_grace: Annotated[float, _about(
        "seconds that a stream continues after its router has died, so that another router can take it over; only for "
        "routers with --router-peers; 0: the stream ends at once", "SECONDS", ge=0, le=60)] = ROUTER_GRACE.seconds_max
    max_router_streams: Annotated[int, _about(
        "streams of such routers at a time that can be taken over; further streams end with their router",
        "N", ge=1, le=4096)] = ROUTER_GRACE.streams_max
    frontend: Annotated[Literal["native", "hypercorn"], _about(
        "HTTP implementation; hypercorn detects fewer ways in which clients leave")] = "native"
    profile: Annotated[str | None, _about(
        "directory for a file with the last 1,000 steps, written at each SIGUSR2, in the format of GET /debug/steps, "
        "for ui.perfetto.dev; default: none", "DIR")] = None
    trust_request_chat_template: Annotated[bool, _about("let requests bring their own chat template")] = False
    # fmt: on

    def __post_init__(self) -> None:
        # Check now, before the model is loaded.
        if self.router_processes != 1:
            raise StartupError(
                f"router_processes is {self.router_processes}, but the engine of serve runs in one process: leave it "
                "out, or start `route --router-processes` before this server"
            )
        if self.router_peers:
            raise StartupError(
                "router_peers is for routers that share endpoints, but serve does not share its engine: start "
                "`route --router-peers` beside it, with this server as an endpoint"
            )
        check_ranks(self)
        drafts = drafts_of(self)
        if drafts is not None:
            check_overlap(self.overlap_steps, drafts.token_count, "head" if drafts.source == "mtp" else drafts.source)
        connector_settings(self.kv_transfer_config, self.role)
        generation_settings(self.generation_config, self.override_generation_config)
        image_limits(self)
        lora_modules(self.lora_modules)

    @property
    def rank_count(self) -> int:
        """Number of processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_at_once(self) -> int:
        """Number of ranks on one machine that compute at the same time: all of them, or those of one stage."""
        here = self.rank_count // self.nnodes
        return here if self.overlap_steps else min(here, self.tensor_parallel_size)


def check_ranks(config: Config) -> None:
    """Check the options of ranks.

    Args:
        config: the options.

    Raises:
        StartupError: these options cannot be combined.
    """
    size = config.rank_count
    if config.pipeline_parallel_size > 1:
        check_stages(config)
    if config.distributed_executor_backend == "ray":
        check_ranks_of_ray(config)
    if config.nnodes > 1 or config.headless:
        if size % config.nnodes or size == 1:
            raise StartupError(
                f"--nnodes is {config.nnodes}, and there are {size} ranks: give each machine the same number of ranks, "
                f"such as {config.nnodes} in all"
            )
        if config.node_rank >= config.nnodes:
            raise StartupError(f"--node-rank is {config.node_rank}, allowed are 0 to {config.nnodes - 1}: see --nnodes")
        if config.headless != (config.node_rank > 0):
            raise StartupError(
                f"--node-rank is {config.node_rank}, and --headless is {'given' if config.headless else 'not given'}: "
                "the server is node 0, and all others are headless"
            )
        if not config.ranks_key:
            raise StartupError(
                "--ranks-key is not given, so every client that reaches --master-port could act as a rank: give all "
                "machines the same key, better in the variable TRIOSERVE_RANKS_KEY than on the command line"
            )
    if size == 1:
        return
    if not sys.platform.startswith("linux"):
        name, count = "--tensor-parallel-size", config.tensor_parallel_size
        if count == 1:
            name, count = "--pipeline-parallel-size", config.pipeline_parallel_size
        raise StartupError(f"{name} is {count}, but ranks need Linux, which ends them with the server: leave it out")


def check_stages(config: Config) -> None:
    """Check the options of pipeline stages.

    Args:
        config: the options.

    Raises:
        StartupError: these options cannot be combined.
    """
    asked = f"--pipeline-parallel-size is {config.pipeline_parallel_size}"
    if config.rank_count > RANKS_MAX:
        raise StartupError(
            f"{asked} and --tensor-parallel-size {config.tensor_parallel_size}, which are {config.rank_count} ranks: "
            f"at most {RANKS_MAX} are allowed"
        )
    if config.pipeline_parallel_size % config.nnodes:
        raise StartupError(
            f"{asked} and --nnodes {config.nnodes}, but each machine must have the same number of stages: use a "
            f"multiple of {config.nnodes}"
        )
    drafts = drafts_of(config)
    if drafts is not None and drafts.source != "text":
        raise StartupError(
            f"{asked}, but {drafts.model or drafts.source} can draft only for a model in one stage: leave one of them "
            "out, or use --speculative-ngram"
        )


def check_ranks_of_ray(config: Config) -> None:
    """Check the options of ranks that Ray places.

    Args:
        config: the options.

    Raises:
        StartupError: these options cannot be combined.
    """
    asked = "--distributed-executor-backend is ray, and"
    if config.nnodes > 1 or config.headless:
        raise StartupError(f"{asked} Ray itself chooses machines: leave out --nnodes, --node-rank and --headless")
    if config.rank_count == 1:
        raise StartupError(
            f"{asked} there is only one rank, which always runs in the server: leave the backend out, or let Ray place "
            "the whole server (`trioserve ray up`)"
        )
    drafts = drafts_of(config)
    if drafts is not None and drafts.model is not None:
        raise StartupError(
            f"{asked} {drafts.model} would draft, but it is read only on the server's machine: leave one of them out, "
            "or use --speculative-ngram"
        )


def drafts_of(config: Config) -> DraftSettings | None:
    """Return the settings of draft tokens.

    Args:
        config: the options.

    Returns:
        The settings, or None if there are no draft tokens.

    Raises:
        StartupError: the options cannot be combined.
    """
    return draft_settings(
        ngram=config.speculative_ngram,
        model=config.speculative_model,
        token_count=config.speculative_tokens,
        quantization=config.speculative_quantization,
        given=config.speculative_config,
    )


ConfigType = TypeVar("ConfigType", bound=ServerConfig)


def make_config(**values: object) -> Config:
    """Make a Config from Python values.

    Args:
        values: options by their names.

    Raises:
        StartupError: an option is unknown or has a wrong value. The message says what is allowed.
    """
    return _convert(Config, {name: (name, value) for name, value in values.items()}, strict=True)


def image_limits(config: Config) -> ImageLimits:
    """Return the limits of images in prompts.

    Args:
        config: the options.

    Raises:
        StartupError: `limit_mm_per_prompt` has a wrong format.
    """
    given: object = config.limit_mm_per_prompt
    seconds = config.image_decode_timeout
    if given is None:
        return ImageLimits(decode_seconds_max=seconds)
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise StartupError(
                f"""--limit-mm-per-prompt is not JSON ({error}): write it like {{"image": 4}}"""
            ) from None
    count = given.get("image") if isinstance(given, Mapping) and set(given) == {"image"} else None
    if not isinstance(count, int) or isinstance(count, bool):
        raise StartupError(
            f"""--limit-mm-per-prompt is {given!r}, it must be like {{"image": 4}}: images are the only media here"""
        )
    return ImageLimits(images_max=count, decode_seconds_max=seconds)


def engine_settings(config: ServerConfig) -> EngineSettings:
    """Return the settings that engines and routers share.

    Args:
        config: the options.

    Raises:
        StartupError: a deadline is out of range.
    """
    return EngineSettings(
        waiting_requests_max=config.max_queued_requests,
        waiting_prompt_tokens_max=config.max_queued_tokens,
        waiting_seconds_max=config.max_queue_wait,
        drain_seconds_max=config.drain_timeout,
        drain_delay_seconds=config.drain_delay,
        deadlines=deadlines_of(config.queue_timeout, config.ttft_timeout, config.request_timeout),
        deadlines_max=deadlines_of(config.max_queue_timeout, config.max_ttft_timeout, config.max_request_timeout),
    )


def add_arguments(
    parser: argparse.ArgumentParser,
    kind: type[ServerConfig] = Config,
    *,
    only: Collection[str] | None = None,
    groups: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> None:
    """Add a flag with help and default for each option. `config_from` checks the values, not argparse.

    Args:
        parser: gets the flags.
        kind: class whose fields are the options.
        only: names of the options to add. None: all.
        groups: headings of the help, and the options below each. Other options come first, without a heading. Among
            these, the fields of `kind` itself come before inherited fields.
    """
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with any of these options, spelled with - or _ (default: none)"
    )
    inherited = {field.name for field in msgspec.structs.fields(ServerConfig if kind is RouteConfig else RouteConfig)}
    fields = sorted(msgspec.structs.fields(kind), key=lambda field: field.name in inherited)
    wanted = {field.name: field for field in fields if only is None or field.name in only}
    grouped = {name for names in groups.values() for name in names}
    for name, field in wanted.items():
        if name not in grouped:
            _add_argument(parser, kind, field)
    for title, names in groups.items():
        if not wanted.keys().isdisjoint(names):
            group = parser.add_argument_group(title)
            for name in names:
                if name in wanted:
                    _add_argument(group, kind, wanted[name])


def _add_argument(
    place: argparse._ActionsContainer, kind: type[ServerConfig], field: msgspec.structs.FieldInfo
) -> None:
    value_type, meta = _type_of(kind, field.name)
    shown = "" if "default:" in meta.description or field.default is None else _spell_value(field.default)
    help_text = (meta.description + (f" (default: {shown})" if shown else "")).replace("%", "%%")
    flag = _flag(field.name)
    if value_type is bool:
        place.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
    elif typing.get_origin(value_type) is tuple:
        # One flag may have several values, and may be repeated.
        place.add_argument(flag, action="extend", nargs="+", metavar=meta.title, default=None, help=help_text)
    elif typing.get_origin(value_type) is Literal:
        place.add_argument(flag, choices=typing.get_args(value_type), default=None, help=help_text)
    else:
        place.add_argument(flag, metavar=meta.title, default=None, help=help_text)


def config_from(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ, *, kind: type[ConfigType]
) -> ConfigType:
    """Make the options from a file, environment variables and flags.

    Args:
        arguments: parsed flags. `config` is the path of the file, or None.
        environment: environment variables.
        kind: class of the options.

    Raises:
        StartupError: an option is unknown or has a wrong value. The message names it as the user wrote it.
    """
    values: dict[str, tuple[str, object]] = {}  # name: (spelling of the user, value)
    if arguments.config is not None:
        values |= _read_file(Path(arguments.config))
    environment = {
        variable: text
        for variable, text in environment.items()
        if variable.startswith(ENVIRONMENT_PREFIX)
        and not KUBERNETES_VARIABLE.fullmatch(variable)
        and not KUBERNETES_ADDRESS.fullmatch(text)
    }
    _refuse_misspelled(environment)
    for field in msgspec.structs.fields(kind):
        variable = ENVIRONMENT_PREFIX + field.name.upper()
        text = environment.get(variable)
        if text is not None:
            is_list = typing.get_origin(_type_of(kind, field.name)[0]) is tuple
            values[field.name] = variable, re.split(r"[,\s]+", text.strip()) if is_list else text
        flag_value = getattr(arguments, field.name, None)
        if flag_value is not None:
            values[field.name] = _flag(field.name), flag_value
    return _convert(kind, values, strict=False)


def _refuse_misspelled(environment: Mapping[str, str]) -> None:
    """Refuse variables that look like a misspelled option. Other unknown variables may belong to another program."""
    known = {field.name.upper() for field in msgspec.structs.fields(Config)}
    for variable in environment:
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in known or OTHER_VARIABLE.fullmatch(name):
            continue
        closest = closest_name(name, known)
        if closest is not None:
            raise StartupError(f"{variable} is not an option: did you mean {ENVIRONMENT_PREFIX}{closest}?")


def _convert(kind: type[ConfigType], values: Mapping[str, tuple[str, object]], *, strict: bool) -> ConfigType:
    known = {field.name for field in msgspec.structs.fields(kind)}
    converted: dict[str, Any] = {}
    for name, (spelling, value) in values.items():
        if name not in known:
            closest = closest_name(name, known)
            hint = f": did you mean {closest}?" if closest else f"; options are: {', '.join(sorted(known))}"
            raise StartupError(f"{spelling} is not an option{hint}")
        try:
            if name in TOKEN_COUNTS and isinstance(value, str):
                value = _token_count(value)
            converted[name] = msgspec.convert(value, _hints(kind)[name], strict=strict)
        except msgspec.ValidationError:
            raise StartupError(f"{spelling} is {value!r}, allowed is {_allowed(_hints(kind)[name])}") from None
    return kind(**converted)


def _token_count(text: str) -> object:
    """Read a number such as 32k (32,000) or 32K (32,768), as in vLLM. auto and -1 are None. Other texts are kept."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kKmMgG])", text)
    if match is None:
        return text
    base = 1000 if match[2].islower() else 1024
    return int(float(match[1]) * base ** (1 + "kmg".index(match[2].lower())))


def _read_file(path: Path) -> dict[str, tuple[str, object]]:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise StartupError(f"the config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"the config file {path} is not TOML: {error}") from None
    return {name.replace("-", "_"): (f"{name} in {path}", value) for name, value in values.items()}


@functools.cache
def _hints(kind: type[ServerConfig]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _type_of(kind: type[ServerConfig], name: str) -> tuple[Any, Any]:
    """Return the type of a field, without None, and its Meta."""
    annotated = _hints(kind)[name]
    return annotated.__origin__, annotated.__metadata__[-1]


def _allowed(hint: Any) -> str:
    """Return the allowed values of a field, in words."""
    if typing.get_origin(hint) is Annotated:
        low = next((f"{bound:g}" for meta in hint.__metadata__ if (bound := meta.ge) is not None), None)
        above = next((f"{bound:g}" for meta in hint.__metadata__ if (bound := meta.gt) is not None), None)
        high = next((f"{bound:g}" for meta in hint.__metadata__ if (bound := meta.le) is not None), None)
        inner = _allowed(hint.__origin__)
        parts = [
            f"of at least {low}" if low else "",
            f"above {above}" if above else "",
            f"up to {high}" if high else "",
        ]
        return " ".join([inner, " and ".join(filter(None, parts))]).strip()
    if isinstance(hint, types.UnionType):
        return next(_allowed(kind) for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is Union:
        return next(_allowed(kind) for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a list of texts"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _spell_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value == () else str(value)
