"""Headers that the router forwards with a request to an endpoint, and with a response to the client."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from trioserve.api.heartbeat import HEARTBEAT_HEADER, INSTANCE_HEADER
from trioserve.api.session_fields import SESSION_HEADER
from trioserve.api.streams.cursors import KEEP_HEADER, KEPT_HEADER, SEED_HEADER
from trioserve.contracts.endpoint import Stage
from trioserve.proxy.remote_endpoint import KEY_HEADERS

if TYPE_CHECKING:
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.router_context import RouterContext

__all__ = ["owner_of", "request_headers", "response_headers", "endpoint_session"]

ENDPOINT_HEADER = "x-trioserve-endpoint"
PREFILL_ENDPOINT_HEADER = "x-trioserve-prefill-endpoint"
# The router itself handles web pages of other origins, so it does not forward the headers of an endpoint.
CROSS_ORIGIN_PREFIX = "access-control-"
# The router has already checked what a browser reports about the page, so it does not forward these headers.
BROWSER_PREFIX = "sec-"
STAGE_HEADER = "x-trioserve-stage"
"""Distinguishes the two requests with one id that a disaggregated request consists of: "prefill" or "decode"."""

TRACE_HEADERS = frozenset(["traceparent", "tracestate"])
# The headers in this set concern one connection only (RFC 9110, 7.6.1), or the router sets them itself in both
# directions.
OF_ONE_CONNECTION = frozenset(
    [
        "connection",
        "content-length",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
        HEARTBEAT_HEADER,
    ]
)
# The router sets or has processed these further headers itself.
NOT_FORWARDED = OF_ONE_CONNECTION | {
    "accept-encoding",
    "authorization",
    "content-encoding",
    "expect",
    "forwarded",
    "host",
    "origin",
    "proxy-authorization",
    "proxy-connection",
    "x-api-key",
    "x-queue-timeout",
    "x-ttft-timeout",
    "x-request-timeout",
    KEEP_HEADER,
    SEED_HEADER,
    STAGE_HEADER,
}
NOT_RETURNED = OF_ONE_CONNECTION | {"date", "proxy-authenticate", "server", KEPT_HEADER, INSTANCE_HEADER}


def owner_of(context: RouterContext) -> str | None:
    """Return the owner of the objects that this request creates. Tenants of a gateway are separate owners.

    Args:
        context: Request of the router's API.

    Returns:
        Name of the owner, or None if the router does not distinguish callers.
    """
    return None if context.owner is None else context.caller.tenant(context.named_tenant)


def endpoint_session(context: RouterContext, session: str) -> str:
    """Return the name of a session at endpoints. Sessions of different callers have different names.

    Args:
        context: Request of the router's API.
        session: Name that the client uses.
    """
    owner = owner_of(context)
    if owner is None or context.services.rules.passes_authorization:
        return session
    name = f"{len(owner)}/{owner}/{session}".encode("utf-8", "surrogatepass")
    return blake2b(name, digest_size=16).hexdigest()


def request_headers(context: RouterContext, stage: Stage | None, *, with_body: bool = True) -> list[tuple[str, str]]:
    """Make the headers of a request to an endpoint.

    Args:
        context: Request of the router's API.
        stage: Stage of a disaggregated request. None for other requests.
        with_body: Whether the client's body is forwarded. False for a request that the router makes itself.
    """
    tenant_header = context.services.rules.tenant_header
    # Without a trace, the client's trace headers are forwarded.
    trace = context.leg.headers() or context.span.headers()
    headers = [
        (name, endpoint_session(context, value) if name == SESSION_HEADER else value)
        for name, value in context.exchange.headers.items()
        if name not in NOT_FORWARDED
        and name != tenant_header
        and not name.startswith(BROWSER_PREFIX)
        and (with_body or not name.startswith("content-"))
        and not (trace and name in TRACE_HEADERS)
    ]
    headers += trace
    headers.append(("x-request-id", context.request_id))
    tenant = context.caller.tenant_for_endpoint(context.named_tenant)
    if tenant is not None:
        headers.append((tenant_header, tenant))
    if stage is not None:
        headers.append((STAGE_HEADER, stage.value))
    if context.services.rules.passes_authorization:
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
    headers += [("x-request-id", context.request_id), (ENDPOINT_HEADER, str(context.endpoint))]
    if context.prefill_endpoint is not None:
        headers.append((PREFILL_ENDPOINT_HEADER, context.prefill_endpoint))
    return headers
