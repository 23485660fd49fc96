"""File, environment and flags become one frozen Config. Each field is a flag, an environment variable and a file key.

`max_model_len` is `--max-model-len`, `TRIOSERVE_MAX_MODEL_LEN`, and `max_model_len = 4096` in a TOML file. A flag goes
before the environment, the environment before the file. In a variable, a list is separated by commas or blanks.
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

from trioserve.api.batches.settings import BatchSettings
from trioserve.api.responses.settings import BackgroundSettings
from trioserve.api.streams.settings import ROUTER_GRACE, DetachSettings
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
"""Variables of ours that are no options."""

KUBERNETES_VARIABLE = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
"""What Kubernetes sets for each service of the namespace. Services may be called trioserve, trioserve-kv and so on."""

RANKS_MAX = 64  # no model here has more key and value heads than that to be dealt out
ROUTER_PROCESSES_MAX = 64  # as many as there may be routers before the same endpoints: see PEERS_MAX

TOKEN_COUNTS = frozenset({"max_model_len", "max_num_batched_tokens"})
"""Numbers of tokens that may be long, and so may end in k or K."""


def _about(description: str, unit: str | None = None, **bounds: float) -> Meta:
    # mypy knows no Meta whose bounds come together; Meta checks them itself
    return Meta(title=unit, description=description, **bounds)  # type: ignore[call-overload, no-any-return]


Seconds = Annotated[float, Meta(gt=0)] | None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every server has, whatever it serves. Names and meanings are vLLM's where vLLM has them."""

    # fmt: off
    host: Annotated[str, _about("address to listen at", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, _about("TCP port; 0 takes a free one", "PORT", ge=0, le=65535)] = 8000
    uds: Annotated[str | None, _about(
        "path of a Unix domain socket to listen at instead of --host and --port, by the native front end; default: "
        "none", "PATH")] = None
    root_path: Annotated[str, _about(
        "what stands before the paths of requests where a proxy in front does not take it off, such as /llm; default: "
        "nothing", "PATH",
        )] = ""
    api_key: Annotated[tuple[str, ...], _about(
        "keys that clients must send as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'; default: none", "KEY")] = ()
    admin_api_key: Annotated[str | None, _about(
        "key that sees and aborts the requests of all keys, and whose priority, tenant and cache_salt count as they "
        "are sent; default: none", "KEY")] = None
    gateway_api_key: Annotated[tuple[str, ...], _about(
        "keys like those of --api-key, of gateways that are trusted to say for whom they ask: their --tenant-header "
        "and priority count, and each of their tenants has cached prompts of its own; default: none", "KEY")] = ()
    priority_min: Annotated[Annotated[int, Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)] | None, _about(
        "best priority (a lower number is sooner) that a request may ask for; a better one is refused with 400, but "
        "for admin and gateway keys; default: 0 with API keys, without them no limit", "N")] = None
    share_prefix_cache: Annotated[bool, _about(
        "let requests of all API keys hit the same cached prompts: a common system prompt is computed once, and a key "
        "can find out, by cached_tokens and by time, whether another key has sent a text that it guesses")] = False
    metrics_need_key: Annotated[bool, _about(
        "close /metrics, which counts what all callers do, to all but the admin's API key")] = False
    load_needs_key: Annotated[bool, _about(
        "close /load to callers without an API key; a router before this server then needs --endpoint-api-key")] = False
    ssl_certfile: Annotated[str | None, _about(
        "certificate chain in PEM; turns TLS on; default: no TLS", "FILE")] = None
    ssl_keyfile: Annotated[str | None, _about(
        "its key in PEM; default: in the same file", "FILE")] = None
    ssl_ca_certs: Annotated[str | None, _about(
        "CA certificates in PEM that have signed those of clients; default: none", "FILE")] = None
    ssl_client_certs: Annotated[Literal["none", "optional", "required"], _about(
        "whether clients have to show a certificate, or may; needs --ssl-ca-certs")] = "none"
    cors_origin: Annotated[tuple[str, ...], _about(
        "web pages that browsers may let use the API, such as https://chat.example.org, or *; default: none",
        "ORIGIN")] = ()
    allowed_host: Annotated[tuple[str, ...], _about(
        "names by which clients may call this server in the Host header, besides addresses, localhost and --host; "
        "*.example.org means all names below it, and * every name; with API keys any name will do; default: none",
        "NAME")] = ()
    allow_operator_without_key: Annotated[bool, _about(
        "let everybody who reaches this server operate it, where it has no API keys and listens at an address that "
        "other machines reach: pause, sleep, weights, adapters, endpoints, the list of requests, debugging")] = False
    max_connections: Annotated[int, _about(
        "client connections at a time; the next one takes the place of an idle one, or waits; at most what the limit "
        "of open files allows. Where keys are set, a quarter is kept for connections on which a key was shown", "N",
        ge=1, le=1000000)] = FrontendLimits().connections_max
    max_connections_per_address: Annotated[Annotated[int, Meta(ge=1, le=1000000)] | None, _about(
        "of these, connections from one address (IPv6: one /64) on which no API key was shown; Unix sockets have no "
        "such bound; default: all but one in 64", "N")] = None
    max_body_bytes: Annotated[int, _about(
        "size of a request's body; a larger one is refused with 413", "BYTES", ge=1024, le=2**31 - 1,
        )] = FrontendLimits().body_bytes_max
    body_timeout: Annotated[Seconds, _about(
        "seconds in which a request's whole body must arrive, or the request is refused with 408; default: 600, or the "
        "time that --max-body-bytes take at half a Mbit/s if that is longer", "SECONDS")] = None
    max_response_bytes: Annotated[int, _about(
        "size of a whole response, estimated from its request: choices x tokens x (log probabilities + 1), what it "
        "repeats of its prompts, vectors x dimensions; a larger one is refused with 400. A stream has no such bound, "
        "since it leaves piece by piece", "BYTES", ge=1024, le=2**31 - 1,
        )] = RESPONSE_BYTES_MAX
    max_responses_bytes: Annotated[int, _about(
        "what the whole responses of all clients may hold together, counted as they grow; a response that does not "
        "fit is refused with 429. Responses below 64 KiB are not counted", "BYTES", ge=1024, le=2**40,
        )] = RESPONSES_BYTES_MAX
    stall_timeout: Annotated[float, _about(
        "seconds after which a client that takes nothing of its response is cancelled", "SECONDS", gt=0, le=86400,
        )] = FrontendLimits().stall_seconds_max
    keep_alive_timeout: Annotated[float, _about(
        "seconds after which a connection without a request under way is closed; longer than proxies in front keep "
        "theirs", "SECONDS", gt=0, le=86400)] = FrontendLimits().idle_seconds_max
    keep_alive_comments: Annotated[float, _about(
        "seconds of silence after which a stream gets a comment, which clients skip, so that proxies keep its "
        "connection; a request that waits longer in the queue gets its status 200 then, and an error comes as an event",
        "SECONDS", ge=1, le=86400)] = KEEP_ALIVE_SECONDS
    keep_alive_json: Annotated[bool, _about(
        "whole JSON responses are no longer silent than streams: after --keep-alive-comments seconds a request gets "
        "its status 200 and white space, which JSON parsers skip, and an error comes as the body. With a router, set "
        "it there and not at its endpoints",
        )] = False
    ping_interval: Annotated[float, _about(
        "seconds of silence after which an HTTP/2 client with running streams is asked whether it still reads (PING)",
        "SECONDS", gt=0, le=86400)] = FrontendLimits().ping_seconds
    ping_timeout: Annotated[float, _about(
        "seconds after which an HTTP/2 client that does not answer a PING loses its streams: some clients, httpx among "
        "them, leave a stream without a word; 86400 to let such streams run", "SECONDS", gt=0, le=86400,
        )] = FrontendLimits().ping_answer_seconds_max
    vanished_timeout: Annotated[float, _about(
        "seconds after which a client whose machine or network vanished without a word is noticed, by TCP's keepalive; "
        "its requests end then", "SECONDS", ge=6, le=86400)] = FrontendLimits().vanished_seconds_max
    require_model: Annotated[bool, _about(
        "a request that names no model is refused with 400, as OpenAI's API does; otherwise it gets the first one",
        )] = False
    tenant_header: Annotated[str, _about(
        "header that tells tenants apart; they share the queue fairly. With API keys each key is a tenant, and the "
        "header counts only from gateway and admin keys; without keys it counts from everybody, who may choose it",
        "NAME",
        )] = "x-tenant-id"
    max_queued_requests: Annotated[int, _about(
        "requests that may wait for one model; more are refused with 429", "N", ge=0)] = 256
    max_queued_tokens: Annotated[int, _about(
        "tokens of prompt that may wait for one model", "TOKENS", ge=1)] = 1_000_000
    max_queue_wait: Annotated[float, _about(
        "seconds that any request may wait in the queue", "SECONDS", gt=0, le=86400)] = 300.0
    queue_timeout: Annotated[Seconds, _about(
        "seconds a request may wait to begin, if it says nothing else; default: no limit", "SECONDS")] = None
    ttft_timeout: Annotated[Seconds, _about(
        "the same until its first token, in seconds; default: no limit", "SECONDS")] = None
    request_timeout: Annotated[Seconds, _about(
        "the same until its response is complete, in seconds; default: no limit", "SECONDS")] = None
    max_queue_timeout: Annotated[Seconds, _about(
        "seconds that any request may ask for as its queue timeout; default: no limit", "SECONDS")] = None
    max_ttft_timeout: Annotated[Seconds, _about(
        "the same for the time to its first token, in seconds; default: no limit", "SECONDS")] = None
    max_request_timeout: Annotated[Seconds, _about(
        "the same for the whole request, in seconds; default: no limit", "SECONDS")] = None
    ui: Annotated[bool, _about(
        "show what the server does on a page at /, for browsers; what it tells is behind the API keys, if there are "
        "any")] = True
    drain_timeout: Annotated[float, _about(
        "seconds that running requests get after Ctrl-C or SIGTERM", "SECONDS", ge=0, le=86400)] = 30.0
    drain_delay: Annotated[float, _about(
        "seconds in which the server at least still answers after SIGTERM, while /ready and new requests get 503, so "
        "that load balancers see it; it does so until the last request has ended in any case, and never longer than "
        "--drain-timeout; Ctrl-C has no such delay", "SECONDS", ge=0, le=86400)] = 2.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _about(
        "the least that is logged, to stderr")] = "info"
    log_format: Annotated[Literal["text", "json"], _about(
        "what a line of the log looks like; json has request, tenant and trace as fields")] = "text"
    access_log: Annotated[bool, _about(
        "log a line for each request, with its status, tokens, seconds and how it ended; what is polled, such as "
        "/health and /metrics, only at --log-level debug")] = True
    otlp_endpoint: Annotated[str | None, _about(
        "OpenTelemetry collector that gets a trace of each request, by OTLP over HTTP, such as http://127.0.0.1:4318; "
        "needs the extra otel; default: what OTEL_EXPORTER_OTLP_ENDPOINT says, or no traces", "URL")] = None
    trace_sample: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, _about(
        "share of the requests that are traced, of those whose client does not say; default: what "
        "OTEL_TRACES_SAMPLER says, or all", "SHARE")] = None
    # fmt: on


class RouteConfig(ServerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A router: a server without an engine."""

    # fmt: off
    endpoint: Annotated[tuple[str, ...], _about(
        "servers to route to, such as http://10.0.0.7:8000 or name=http://10.0.0.7:8000; default: none", "URL")] = ()
    prefill_endpoint: Annotated[tuple[str, ...], _about(
        "the same, for servers that compute prompts and give their KV to a decode endpoint; default: those of the "
        "others that say so", "URL")] = ()
    decode_endpoint: Annotated[tuple[str, ...], _about(
        "the same, for servers that take the KV of a prompt and make the response; default: those of the others that "
        "say so", "URL")] = ()
    split_min_tokens: Annotated[int, _about(
        "tokens of prompt, as estimated from its length, from which on a request goes to a prefill endpoint and then "
        "to a decode endpoint, if there are two", "TOKENS", ge=1)] = DISAGGREGATED_PROMPT_TOKENS_MIN
    endpoints_file: Annotated[str | None, _about(
        "TOML or JSON file with a list 'endpoints'; watched, so that it may change; default: none", "FILE")] = None
    endpoints_dns: Annotated[str | None, _about(
        "every address of a name, such as llm.example.org:8000; or a service, such as _http._tcp.llm.example.org; "
        "default: none", "NAME")] = None
    endpoints_kubernetes: Annotated[str | None, _about(
        "the ready endpoints of a service, as [NAMESPACE/]SERVICE[:PORT]; default: none", "SERVICE")] = None
    endpoints_ray: Annotated[str | None, _about(
        "the engines of a group that `trioserve ray up` had placed by Ray; needs the extra ray; default: none", "GROUP",
        )] = None
    ray_address: Annotated[str | None, _about(
        "Ray cluster that --endpoints-ray asks, and where --distributed-executor-backend ray places ranks, such as "
        "10.0.0.7:6379, or ray://10.0.0.7:10001 from outside of it; default: what RAY_ADDRESS says, or the one that "
        "this machine belongs to", "ADDRESS")] = None
    endpoint_api_key: Annotated[str | None, _about(
        "key that is sent to them; default: what the client sends, if this server wants none", "KEY")] = None
    endpoint_ca_certs: Annotated[str | None, _about(
        "CA certificates in PEM for https endpoints; default: the system's", "FILE")] = None
    model_alias: Annotated[tuple[str, ...], _about(
        "names for models, such as gpt-4=smollm2; default: none", "NAME=MODEL")] = ()
    policy: Annotated[str, _about(
        "who gets a request: round_robin, least_loaded, power_of_two, session, prefix_aware, kv_aware, or one that is "
        "installed", "NAME")] = "least_loaded"
    tokenizer: Annotated[str | None, _about(
        "the endpoints' model, as in their --model, whose tokenizer --policy kv_aware needs; default: "
        "of serve its own",
        "MODEL")] = None
    control_tokens_in_text: Annotated[Literal["keep-as-text", "parse"], _about(
        "what becomes of control tokens, such as <|im_start|>, that the texts of a chat spell out: keep-as-text keeps "
        "them ordinary text, parse makes them control tokens, so that a text can end its message; prompts that are no "
        "chats are always parsed")] = "keep-as-text"
    session_header: Annotated[str, _about(
        "header that names a conversation, for --policy session", "NAME")] = "x-session-id"
    endpoint_max_requests: Annotated[int, _about(
        "sequences that one endpoint gets at a time", "N", ge=1)] = 64
    max_request_sequences: Annotated[int, _about(
        "responses that one request may ask for, its n times its prompts, where requests are routed", "N", ge=1)] = 256
    endpoint_max_waiting: Annotated[int, _about(
        "sequences that may wait inside of one endpoint, as it reports", "N", ge=0)] = 4
    lease_until: Annotated[Literal["first_token", "end"], _about(
        "until when a request counts at its endpoint")] = "end"
    max_continuation_bytes: Annotated[int, _about(
        "what is kept of one stream, so that it can go on at another endpoint when its own stops, about 8 for each "
        "token; a stream with more cannot; 0: none can", "BYTES", ge=0, le=2**30)] = CONTINUATION_BYTES_MAX
    router_peers: Annotated[tuple[str, ...], _about(
        "the routers before the same endpoints, each as NAME=URL or URL, all of them in file:FILE, or dns:NAME:PORT; "
        "this one may be among them; they share the endpoints' limits, and a client whose router dies goes on at "
        "another; default: none", "ROUTER")] = ()
    router_name: Annotated[str | None, _about(
        "this router's name among them; default: that under which it finds itself there", "NAME")] = None
    router_processes: Annotated[int, _about(
        "processes of route that share the port, each for a core: connections are spread over them, and limits of the "
        "queue count in each; on Linux, for TCP, without --router-peers", "N", ge=1, le=ROUTER_PROCESSES_MAX)] = 1
    health_interval: Annotated[float, _about(
        "seconds between two health checks of an endpoint", "SECONDS", gt=0, le=3600)] = 2.0
    continuations_per_second: Annotated[float, _about(
        "streams that go on at another endpoint in a second, when theirs stops; the others wait", "N", gt=0, le=1e6,
        )] = 100.0
    retry_share: Annotated[float, _about(
        "requests that an endpoint answered with an error, or for which it had no room, and that are tried at another "
        "one, as a share of all requests; requests whose endpoint was lost are not counted", "SHARE", ge=0, le=1)] = 0.2
    retries_per_second: Annotated[float, _about(
        "so many such requests a second may be tried again whatever the share is, and ten times as many in a burst",
        "N", ge=0, le=1e6)] = 3.0
    max_request_attempts: Annotated[int, _about(
        "endpoints that may answer one request with an error before its first token, or be lost with it, until the "
        "request is taken for the cause; twice as many be lost, if they had other such requests, too", "N", ge=1,
        le=100)] = 3
    hang_timeout: Annotated[float, _about(
        "seconds in which an endpoint that answers nothing at all is given up, and its streams go on at others",
        "SECONDS", gt=0, le=3600)] = 6.0
    heartbeat_interval: Annotated[float, _about(
        "how often an endpoint is asked for a byte within a response, so that a connection that went silent is known; "
        "0: never", "SECONDS", ge=0, le=3600)] = SilenceSettings().beat_seconds
    silence_timeout: Annotated[float, _about(
        "seconds without a byte after which a response is taken from its endpoint, if that sends heartbeats; three "
        "intervals at least, or two and 1 s", "SECONDS", ge=1, le=86400)] = SilenceSettings().silent_seconds_max
    stalled_timeout: Annotated[float, _about(
        "the same, once a response has begun, of endpoints that send none, such as vLLM; 0: as long as it likes",
        "SECONDS", ge=0, le=86400)] = SilenceSettings().stalled_seconds_max
    move_timeout: Annotated[float, _about(
        "seconds in which an endpoint that stops, or is no longer named where endpoints are found, is emptied: its "
        "streams go on at others; 0: they end there", "SECONDS", ge=0, le=86400)] = 30.0
    load_interval: Annotated[float, _about(
        "seconds between two questions for its load", "SECONDS", gt=0, le=3600)] = 0.25
    # fmt: on


class Config(RouteConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server with an engine, and with a router before it if there are other endpoints. Defaults suit a small machine
    without a GPU."""

    # fmt: off
    model: Annotated[str, _about(
        "what to serve: smollm2, a directory with safetensors, a .gguf file, or a hub name", "MODEL")] = "smollm2"
    tokenizer: Annotated[str | None, _about(
        "whose tokenizer and chat template it has: a directory, a .gguf file or a hub name; default: its own", "MODEL",
        )] = None
    revision: Annotated[str | None, _about(
        "branch, tag or commit of a model of the hub; default: its main branch", "NAME")] = None
    chat_template: Annotated[str | None, _about(
        "file with the chat template to use instead of the model's, or the template itself; default: the model's",
        "FILE")] = None
    served_model_name: Annotated[tuple[str, ...], _about(
        "names that clients may use; default: the last part of --model", "NAME")] = ()
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], _about(
        "type of weights and KV cache; auto takes the checkpoint's")] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], _about(
        "where to compute; auto takes a GPU if there is one")] = "auto"
    threads: Annotated[Annotated[int, Meta(ge=1, le=1024)] | None, _about(
        "CPU threads of a forward pass; default: one per core", "N")] = None
    cpu_kernels: Annotated[Literal["auto", "native", "torch"], _about(
        "what computes on a CPU; auto takes native kernels, compiled at the first start, if they can be had")] = "auto"
    gpu_kernels: Annotated[Literal["torch", "triton"], _about(
        "what computes on a GPU; triton records decode steps as CUDA graphs, and has not been tried on a GPU yet",
        )] = "torch"
    quantization: Annotated[Literal["auto", "none", "file", "int8", "int4"], _about(
        "how native kernels keep weights: file keeps a quantized file's bits, int8 and int4 quantize any checkpoint, "
        "none keeps --dtype; auto takes file where it can, else none")] = "auto"
    kv_cache_dtype: Annotated[Literal["auto", "int8", "fp8"], _about(
        "type of keys and values; int8 and fp8 (e4m3) hold twice the tokens in the same memory, auto takes --dtype",
        )] = "auto"
    max_model_len: Annotated[Annotated[int, Meta(ge=2)] | None, _about(
        "tokens of prompt and response together, such as 8192, 32k or 32K; auto and the default: what the model takes "
        "and the KV cache holds", "TOKENS")] = None
    max_num_seqs: Annotated[int, _about(
        "sequences that are computed at a time", "N", ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, _about(
        "tokens computed in one step; longer prompts are computed in chunks", "TOKENS", ge=1)] = 512
    wide_prompt_stretch: Annotated[float, _about(
        "how much longer a step may take for prompts that need several, while others get tokens in it: smaller is "
        "steadier for these, larger is sooner for the prompt", "FACTOR", gt=1, le=1000)] = 1.5
    block_size: Annotated[int, _about(
        "tokens in one KV block", "TOKENS", ge=1, le=256)] = 16
    kv_cache_memory: Annotated[Annotated[float, Meta(gt=0)] | None, _about(
        "KV cache in GiB; default: on a CPU at most 4, on a GPU what is left", "GIB")] = None
    gpu_memory_utilization: Annotated[float, _about(
        "share of the GPU's memory for weights and KV cache, above 0 and up to 1", "SHARE", gt=0, le=1)] = 0.9
    enforce_eager: Annotated[bool, _about(
        "launch every kernel of a step by itself, without CUDA graphs; saves their memory and seconds of the start",
        )] = False
    batch_invariant: Annotated[bool, _about(
        "compute so that the bits of a response depend on its own tokens and the weights alone, whatever else is in "
        "the batch; refused at the start where that cannot be had")] = False
    enable_prefix_caching: Annotated[bool, _about(
        "keep full blocks findable, so that prompts with the same beginning share it")] = True
    overlap_steps: Annotated[bool, _about(
        "plan the next step while one is computed; shortens the gap between two forward passes, and what ends an "
        "answer is seen a step later; not with --speculative-ngram; with --pipeline-parallel-size compute two steps of "
        "different requests at a time")] = False
    speculative_ngram: Annotated[int, _about(
        "tokens that a step may draft for a request from its own text, and verify; speeds up few streams that repeat "
        "their prompts; 0 is off", "TOKENS", ge=0, le=15)] = 0
    speculative_model: Annotated[str | None, _about(
        "a small model with the same vocabulary that drafts tokens, which a step of the model verifies; named as "
        "--model, or mtp: the model's own further layer; default: none", "NAME")] = None
    speculative_tokens: Annotated[int, _about(
        "tokens that it may draft for a request in a step; fewer, or none, where more do not pay", "TOKENS", ge=1,
        le=DRAFT_TOKENS_MAX)] = 4
    speculative_quantization: Annotated[Literal["auto", "none", "file", "int8", "int4"], _about(
        "how its weights are kept, as --quantization")] = "auto"
    speculative_config: Annotated[str | dict[str, Any] | None, _about(
        "JSON as in vLLM, in the place of the other --speculative flags, such as "
        """{"model": "NAME", "num_speculative_tokens": 4}; default: none""", "JSON")] = None
    step_timeout: Annotated[Annotated[float, Meta(ge=0, le=86400)] | None, _about(
        "seconds that one step may take; a longer one turns /ready and refuses new requests until it ends, and one of "
        "five times that turns /health, too; 0 is no limit; default: 60, or ten times the longest step so far if that "
        "is more", "SECONDS")] = None
    engine_restarts: Annotated[int, _about(
        "how often within ten minutes the engine is opened anew when it breaks: its streams pause and go on; 0: the "
        "first fault ends the server", "N", ge=0, le=RESTARTS_MAX)] = 3
    tool_call_parser: Annotated[str, _about(
        "how the model writes calls of tools: auto takes what its chat template shows, none leaves them as text; "
        "otherwise a family, such as hermes, mistral or llama3_json", "NAME")] = "auto"
    tool_call_leniency: Annotated[Literal["strict", "lenient"], _about(
        "which texts are calls: strict takes those that the model's format marks; lenient also takes bare or fenced "
        "JSON, if the response has nothing else, for models that forget their marks: an example that a user asks for "
        "may then run as a call", "NAME")] = "strict"
    reasoning_parser: Annotated[str, _about(
        "how the model writes thoughts: auto takes what its chat template shows, none leaves them in the text; "
        "otherwise a family, such as qwen3 or deepseek_r1", "NAME")] = "auto"
    generation_config: Annotated[str, _about(
        "sampling where a request says nothing: auto is what the model's makers recommend, vllm the neutral "
        "temperature 1, else a directory with a generation_config.json, whose max_new_tokens is also the most that any "
        "request gets", "DIR")] = "auto"
    override_generation_config: Annotated[str | dict[str, Any] | None, _about(
        """JSON with fields of it to set, such as {"temperature": 0.5}; default: none""", "JSON")] = None
    allowed_media_domains: Annotated[tuple[str, ...], _about(
        "hosts from which images are fetched that a request names by a URL of http or https, with all hosts below "
        "them; default: nothing is fetched", "HOST")] = ()
    limit_mm_per_prompt: Annotated[str | dict[str, int] | None, _about(
        """JSON as in vLLM: images that one prompt may have, for models that see them, such as {"image": 4}; """
        "default: 8", "JSON")] = None
    image_decode_timeout: Annotated[float, _about(
        "what decoding one image that a client sent may take, before its request fails with 400; the process that "
        "decodes it is killed then", "SECONDS", gt=0, le=3600)] = ImageLimits().decode_seconds_max
    max_image_pixels: Annotated[int, _about(
        "width times height of a picture that a request may ask for, of models that make pictures", "PIXELS", ge=1,
        )] = ImageRequestLimits().pixels_max
    max_image_steps: Annotated[int, _about(
        "denoising steps that a request for pictures may ask for", "N", ge=1)] = ImageRequestLimits().steps_max
    max_images: Annotated[int, _about(
        "pictures that a request may ask for, its n", "N", ge=1)] = ImageRequestLimits().n_max
    seed: Annotated[int | None, _about(
        "from which the seeds of requests come that name none: the same requests in the same order are sampled alike; "
        "default: random", "N")] = None
    tensor_parallel_size: Annotated[int, _about(
        "processes, called ranks, that compute the model together, each with a part of every layer: one for each GPU, "
        "or on a CPU for a part of its cores", "N", ge=1, le=RANKS_MAX)] = 1
    pipeline_parallel_size: Annotated[int, _about(
        "stages that the model's layers are cut into, which compute one after the other, each in as many processes as "
        "--tensor-parallel-size says", "N", ge=1, le=RANKS_MAX)] = 1
    enable_expert_parallel: Annotated[bool, _about(
        "of a mixture of experts each rank has whole experts, and not a part of each")] = False
    distributed_executor_backend: Annotated[Literal["mp", "ray"], _about(
        "where ranks are: mp has them on this machine, and those of --nnodes, ray on the nodes of a Ray cluster that "
        "have room; needs the extra ray")] = "mp"
    nnodes: Annotated[int, _about(
        "machines that the ranks are on, as many on each; on all but one, serve --headless", "N", ge=1, le=RANKS_MAX,
        )] = 1
    node_rank: Annotated[int, _about(
        "which of them this is; the server is 0, and has the first ranks", "N", ge=0, le=RANKS_MAX - 1)] = 0
    master_addr: Annotated[str, _about(
        "address or name of the server's machine, by which ranks of other machines find it; with a name the server "
        "listens for them at all of its addresses", "ADDRESS")] = "127.0.0.1"
    master_port: Annotated[int, _about(
        "TCP port there that ranks come to; torch.distributed takes the next one, too", "PORT", ge=1, le=65534)] = 29500
    ranks_key: Annotated[str | None, _about(
        "what ranks of other machines and their server have to know, the same everywhere; default: none, and no other "
        "machine", "KEY")] = None
    headless: Annotated[bool, _about(
        "serve nobody, but keep the ranks of this machine for the server at --master-addr")] = False
    enable_auto_tool_choice: Annotated[bool, _about(
        "taken for the sake of command lines for vLLM: tool_choice auto is always on")] = False
    enable_lora: Annotated[bool, _about(
        "take LoRA adapters, which requests choose by their model; on where --lora-modules names some")] = False
    lora_modules: Annotated[tuple[str, ...], _about(
        """adapters to load at the start, as NAME=PATH or as JSON: {"name": NAME, "path": PATH}; PATH is a directory """
        "that peft has saved; default: none", "NAME=PATH")] = ()
    max_loras: Annotated[int, _about(
        "adapters that may be loaded; any number of them may be in one step", "N", ge=1, le=4096)] = 64
    max_cpu_loras: Annotated[Annotated[int, Meta(ge=1, le=4096)] | None, _about(
        "the same under vLLM's other name: the larger one counts, since no adapter is in one memory and not in the "
        "other here; default: --max-loras", "N")] = None
    max_lora_rank: Annotated[int, _about(
        "rank that an adapter may have", "N", ge=1, le=1024)] = 256
    allow_runtime_lora_updating: Annotated[bool, _about(
        "let the admin load and unload adapters at /v1/load_lora_adapter and /v1/unload_lora_adapter")] = False
    allowed_lora_path: Annotated[tuple[str, ...], _about(
        "directories in which adapters that are loaded there have to lie; default: anywhere", "DIR")] = ()
    kv_events: Annotated[bool, _about(
        "tell at /kv_events which blocks the prefix cache holds, for a router with --policy kv_aware")] = False
    kv_transfer_config: Annotated[str | dict[str, Any] | None, _about(
        "JSON as in vLLM: how KV blocks travel to and from other engines, "
        """such as {"kv_connector": "tcp", "kv_role": "kv_both"}; default: not at all""", "JSON")] = None
    role: Annotated[Literal["prefill", "decode", "both"], _about(
        "what a router should use this engine for; with prefill or decode and no --kv-transfer-config the connector is "
        "tcp")] = "both"
    kv_hold_timeout: Annotated[float, _about(
        "seconds that KV blocks of an answered request are kept for another engine without a sign of life from it",
        "SECONDS", gt=0, le=3600)] = 10.0
    kv_load_timeout: Annotated[float, _about(
        "seconds that a request waits for KV from another engine, before --kv-transfer-config's "
        "kv_load_failure_policy applies", "SECONDS", gt=0, le=3600)] = 10.0
    kv_held_share: Annotated[float, _about(
        "share of the KV cache that may be kept for other engines; beyond it answers come without kv_transfer_params",
        "SHARE", gt=0, le=1)] = 0.5
    data_dir: Annotated[str | None, _about(
        "directory of what is kept beyond a request, such as stored responses; it survives a restart there; default: "
        "in memory", "DIR")] = None
    store_max_bytes: Annotated[int, _about(
        "what may be kept there; beyond it the oldest responses of whoever has most make room, and what cannot go is "
        "refused with 507", "BYTES", ge=65536)] = StoreSettings().bytes_max
    store_max_objects: Annotated[int, _about(
        "responses, files and the like that may be kept there; the same goes beyond it", "N", ge=1,
        )] = StoreSettings().objects_max
    store_ttl: Annotated[float, _about(
        "seconds that a response is kept there", "SECONDS", gt=0, le=3.2e9)] = StoreSettings().seconds_max
    max_background_responses: Annotated[int, _about(
        "responses that may live in the background at a time, half of them of one caller; more are refused with 429",
        "N", ge=0)] = BackgroundSettings().responses_max
    background_timeout: Annotated[float, _about(
        "seconds that a response may live in the background", "SECONDS", gt=0, le=86400,
        )] = BackgroundSettings().seconds_max
    max_batches: Annotated[int, _about(
        "batches that may not have ended at a time, a quarter of them of one caller; more are refused with 429",
        "N", ge=0)] = BatchSettings().batches_max
    batch_concurrency: Annotated[int, _about(
        "requests of batches that are under way at a time; at most half of --max-num-seqs", "N", ge=1, le=1024,
        )] = BatchSettings().lines_at_once
    detach_timeout_max: Annotated[float, _about(
        "seconds that a streamed response may go on after its client has left, if the request asks for it with "
        "X-Session-Id and X-Detach-Timeout; 0: none does", "SECONDS", ge=0, le=86400)] = DetachSettings().seconds_max
    max_detached_streams: Annotated[int, _about(
        "streams that may have asked for it at a time, half of them of one caller; more are refused with 429", "N",
        ge=1)] = DetachSettings().streams_max
    router_grace: Annotated[float, _about(
        "seconds that a stream goes on for another router when the one that asked for it has died; only of routers "
        "with --router-peers; 0: it ends at once", "SECONDS", ge=0, le=60)] = ROUTER_GRACE.seconds_max
    max_router_streams: Annotated[int, _about(
        "streams of such routers that are kept so at a time; those beyond it are served, and end with their router",
        "N", ge=1, le=4096)] = ROUTER_GRACE.streams_max
    frontend: Annotated[Literal["native", "hypercorn"], _about(
        "who speaks HTTP; hypercorn knows fewer ways to stop")] = "native"
    profile: Annotated[str | None, _about(
        "directory that gets a file with the last 1,000 steps at each SIGUSR2, as GET /debug/steps gives them, for "
        "ui.perfetto.dev; default: none", "DIR")] = None
    trust_request_chat_template: Annotated[bool, _about(
        "let requests bring a chat template of their own")] = False
    # fmt: on

    def __post_init__(self) -> None:
        # Now, and not when the model has been loaded.
        if self.router_processes != 1:
            raise StartupError(
                f"router_processes is {self.router_processes}, and the engine of serve is in one process: leave it "
                "out, or start `route --router-processes` before this server"
            )
        if self.router_peers:
            raise StartupError(
                "router_peers is for routers that share endpoints, and nobody shares the engine of serve: start "
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
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_at_once(self) -> int:
        """How many of those on one machine compute at the same time: all of them, or those of a stage."""
        here = self.rank_count // self.nnodes
        return here if self.overlap_steps else min(here, self.tensor_parallel_size)


def check_ranks(config: Config) -> None:
    """Whether a model can be computed so by several processes. Raises StartupError."""
    size = config.rank_count
    if config.pipeline_parallel_size > 1:
        check_stages(config)
    if config.distributed_executor_backend == "ray":
        check_ranks_of_ray(config)
    if config.nnodes > 1 or config.headless:
        if size % config.nnodes or size == 1:
            raise StartupError(
                f"--nnodes is {config.nnodes}, and --tensor-parallel-size {size}: give each machine the same number of "
                f"ranks, such as {config.nnodes} in all"
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
                "--ranks-key is not given, and whoever reaches --master-port could be a rank: give all machines the "
                "same key, in the variable TRIOSERVE_RANKS_KEY rather than for all to see"
            )
    if size == 1:
        return
    if not sys.platform.startswith("linux"):
        name, count = "--tensor-parallel-size", config.tensor_parallel_size
        if count == 1:
            name, count = "--pipeline-parallel-size", config.pipeline_parallel_size
        raise StartupError(f"{name} is {count}, and ranks are processes that only Linux ends in time: leave it out")


def check_stages(config: Config) -> None:
    """What stages cannot do. Raises StartupError."""
    asked = f"--pipeline-parallel-size is {config.pipeline_parallel_size}"
    if config.rank_count > RANKS_MAX:
        raise StartupError(
            f"{asked} and --tensor-parallel-size {config.tensor_parallel_size}, which are {config.rank_count} ranks: "
            f"at most {RANKS_MAX} can be"
        )
    if config.pipeline_parallel_size % config.nnodes:
        raise StartupError(
            f"{asked} and --nnodes {config.nnodes}, but each machine has the same number of stages: take such as "
            f"{config.nnodes} in all"
        )
    drafts = drafts_of(config)
    if drafts is not None and drafts.source != "text":
        raise StartupError(
            f"{asked}, and {drafts.model or drafts.source} is to draft, which takes a model that is in one stage: "
            "leave one of them out, or take --speculative-ngram"
        )


def check_ranks_of_ray(config: Config) -> None:
    """What ranks that Ray places cannot do. Raises StartupError."""
    asked = "--distributed-executor-backend is ray, and"
    if config.nnodes > 1 or config.headless:
        raise StartupError(f"{asked} Ray itself chooses machines: leave out --nnodes, --node-rank and --headless")
    if config.rank_count == 1:
        raise StartupError(
            f"{asked} --tensor-parallel-size 1, but one process stays where the server is: leave the backend out, or "
            "have Ray place the whole server (`trioserve ray up`)"
        )
    drafts = drafts_of(config)
    if drafts is not None and drafts.model is not None:
        raise StartupError(
            f"{asked} {drafts.model} is to draft, which is read on the server's machine: leave one of them out, or "
            "take --speculative-ngram"
        )


def drafts_of(config: Config) -> DraftSettings | None:
    """Where drafts come from; None: there are none. Raises StartupError."""
    return draft_settings(
        ngram=config.speculative_ngram,
        model=config.speculative_model,
        token_count=config.speculative_tokens,
        quantization=config.speculative_quantization,
        given=config.speculative_config,
    )


ConfigType = TypeVar("ConfigType", bound=ServerConfig)


def make_config(**values: object) -> Config:
    """A Config from Python values. Raises StartupError that names the option and what it takes."""
    return _convert(Config, {name: (name, value) for name, value in values.items()}, strict=True)


def image_limits(config: Config) -> ImageLimits:
    """What is taken of images in chats. Raises StartupError for what is no such limit."""
    given: object = config.limit_mm_per_prompt
    seconds = config.image_decode_timeout
    if given is None:
        return ImageLimits(decode_seconds_max=seconds)
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise StartupError(
                f"""--limit-mm-per-prompt is no JSON ({error}): write it like {{"image": 4}}"""
            ) from None
    count = given.get("image") if isinstance(given, Mapping) and set(given) == {"image"} else None
    if not isinstance(count, int) or isinstance(count, bool):
        raise StartupError(
            f"""--limit-mm-per-prompt is {given!r}, it must be like {{"image": 4}}: of media, images are read here"""
        )
    return ImageLimits(images_max=count, decode_seconds_max=seconds)


def engine_settings(config: ServerConfig) -> EngineSettings:
    """What every server's engine or router is told. Raises StartupError for deadlines out of range."""
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
    """One flag a field of `kind`, with help and default. Values are checked in config_from, not by argparse.

    only: these fields; None: all. groups: fields by the heading under which the help shows them; the others come first,
    without one, those of `kind` itself before what it inherits.
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
        # Several values behind one flag, or the flag several times.
        place.add_argument(flag, action="extend", nargs="+", metavar=meta.title, default=None, help=help_text)
    elif typing.get_origin(value_type) is Literal:
        place.add_argument(flag, choices=typing.get_args(value_type), default=None, help=help_text)
    else:
        place.add_argument(flag, metavar=meta.title, default=None, help=help_text)


def config_from(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ, *, kind: type[ConfigType]
) -> ConfigType:
    """Join file, environment and flags. Raises StartupError that names the option and what it takes."""
    values: dict[str, tuple[str, object]] = {}  # with the spelling by which the user knows it
    if arguments.config is not None:
        values |= _read_file(Path(arguments.config))
    environment = {
        variable: text
        for variable, text in environment.items()
        if variable.startswith(ENVIRONMENT_PREFIX)
        and not KUBERNETES_VARIABLE.fullmatch(variable)
        and not KUBERNETES_ADDRESS.fullmatch(text)
    }
    _refuse_misspelt(environment)
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


def _refuse_misspelt(environment: Mapping[str, str]) -> None:
    """Of variables that are no options only those that are nearly one: others may be somebody else's."""
    known = {field.name.upper() for field in msgspec.structs.fields(Config)}
    for variable in environment:
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in known or OTHER_VARIABLE.fullmatch(name):
            continue
        closest = closest_name(name, known)
        if closest is not None:
            raise StartupError(f"{variable} is no option: did you mean {ENVIRONMENT_PREFIX}{closest}?")


def _convert(kind: type[ConfigType], values: Mapping[str, tuple[str, object]], *, strict: bool) -> ConfigType:
    known = {field.name for field in msgspec.structs.fields(kind)}
    converted: dict[str, Any] = {}
    for name, (spelling, value) in values.items():
        if name not in known:
            closest = closest_name(name, known)
            hint = f": did you mean {closest}?" if closest else f"; there are: {', '.join(sorted(known))}"
            raise StartupError(f"{spelling} is no option{hint}")
        try:
            if name in TOKEN_COUNTS and isinstance(value, str):
                value = _token_count(value)
            converted[name] = msgspec.convert(value, _hints(kind)[name], strict=strict)
        except msgspec.ValidationError:
            raise StartupError(f"{spelling} is {value!r}, allowed is {_allowed(_hints(kind)[name])}") from None
    return kind(**converted)


def _token_count(text: str) -> object:
    """32k is 32,000 and 32K 32,768, as in vLLM; so are m and M, g and G. auto and -1 are None. Other texts stay."""
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
    """The field's type and its Meta, without the None of an option that may be left out."""
    annotated = _hints(kind)[name]
    return annotated.__origin__, annotated.__metadata__[-1]


def _allowed(hint: Any) -> str:
    """What a field takes, in words."""
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
