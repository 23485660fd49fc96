"""Which headers go on: of a request to an endpoint, and of its response to the client."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from trioserve.api.heartbeat import HEARTBEAT_HEADER, INSTANCE_HEADER
from trioserve.contracts.endpoint import Stage
from trioserve.proxy.continuation import RESUME_HEADER

if TYPE_CHECKING:
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.router_context import RouterContext

__all__ = ["KEY_HEADERS", "owner_of", "request_headers", "response_headers", "session_told"]

ENDPOINT_HEADER = "x-trioserve-endpoint"
PREFILL_ENDPOINT_HEADER = "x-trioserve-prefill-endpoint"
CROSS_ORIGIN_PREFIX = "access-control-"  # web pages ask the router, and it says which of them may
BROWSER_PREFIX = "sec-"  # what a browser says of the page that asks; the router has looked at it
SESSION_HEADER = "x-session-id"
STAGE_HEADER = "x-trioserve-stage"
"""Tells two requests of the same id apart, at endpoints of a disaggregated request: "prefill" or "decode"."""

KEY_HEADERS = ("authorization", "x-api-key")
TRACE_HEADERS = frozenset(["traceparent", "tracestate"])
# What is between two neighbours (RFC 9110, 7.6.1), what the router says itself, and what it has undone.
NOT_FORWARDED = frozenset(
    [
        "accept-encoding",
        "authorization",
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "origin",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-api-key",
        "x-request-id",
        "x-trioserve-keep",
        "x-trioserve-seed",
        "x-queue-timeout",
        "x-ttft-timeout",
        "x-request-timeout",
        STAGE_HEADER,
        HEARTBEAT_HEADER,
    ]
)
NOT_RETURNED = frozenset(
    [
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
        "x-trioserve-kept",
        HEARTBEAT_HEADER,
        INSTANCE_HEADER,
    ]
)


def owner_of(context: RouterContext) -> str | None:
    """Whose what this caller makes is: a gateway's tenants are several."""
    return None if context.owner is None else context.caller.tenant(context.named_tenant)


def session_told(context: RouterContext, session: str) -> str:
    """The name of a stream as endpoints get it: those of two callers are never the same."""
    owner = owner_of(context)
    if owner is None or context.rules.passes_authorization:
        return session
    name = f"{len(owner)}/{owner}/{session}".encode("utf-8", "surrogatepass")
    return blake2b(name, digest_size=16).hexdigest()


def request_headers(context: RouterContext, stage: Stage | None, *, with_body: bool = True) -> list[tuple[str, str]]:
    """with_body: the request goes on with what it brought; otherwise it is one of the router's own, about it."""
    tenant_header = context.rules.tenant_header
    trace = context.leg.headers() or context.span.headers()  # without one, what came goes on as it is
    headers = [
        (name, session_told(context, value) if name == SESSION_HEADER else value)
        for name, value in context.exchange.headers.items()
        if name not in NOT_FORWARDED
        and name != tenant_header
        and not name.startswith(BROWSER_PREFIX)
        and (with_body or not name.startswith("content-"))
        and not (trace and name in TRACE_HEADERS)
    ]
    headers += trace
    headers.append(("x-request-id", context.request_id))
    tenant = context.caller.tenant_told(context.named_tenant)
    if tenant is not None:
        headers.append((tenant_header, tenant))
    if stage is not None:
        headers.append((STAGE_HEADER, stage.value))
    if context.rules.passes_authorization:
        for name in KEY_HEADERS:
            key = context.exchange.headers.get(name)
            if key is not None:
                headers.append((name, key))
    return headers


def response_headers(context: RouterContext, response: RemoteResponse) -> list[tuple[str, str]]:
    headers = [
        (name, value)
        for name, value in response.headers
        if name not in NOT_RETURNED and not name.startswith(CROSS_ORIGIN_PREFIX)
    ]
    if context.continuation is not None and not context.continuation.shows_ids:
        headers = [(name, value) for name, value in headers if name != RESUME_HEADER]
    headers += [("x-request-id", context.request_id), (ENDPOINT_HEADER, str(context.endpoint))]
    if context.prefill_endpoint is not None:
        headers.append((PREFILL_ENDPOINT_HEADER, context.prefill_endpoint))
    return headers
