"""The request that a log line is about, which is the request of the task that writes the line."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.api.responder import Responder

__all__ = ["TENANT_CHARACTERS_MAX", "begin_request", "end_request", "request_fields", "tenant_shown"]

TENANT_CHARACTERS_MAX = 64  # without keys, clients choose the name

_request: ContextVar[Responder | None] = ContextVar("request", default=None)


def begin_request(request: Responder) -> Token[Responder | None]:
    return _request.set(request)


def end_request(token: Token[Responder | None]) -> None:
    _request.reset(token)


def tenant_shown(request: Responder) -> str | None:
    """Return the tenant's name for logs and traces, which reveals nothing of the key.

    Args:
        request: any request.

    Returns:
        The name, or None if the request has no tenant.
    """
    name = request.caller.tenant_for_endpoint(request.named_tenant)
    return name[:TENANT_CHARACTERS_MAX] if name else None


def request_fields() -> dict[str, str]:
    """Return request id, tenant and trace id of the request that this task serves, without unknown ones."""
    request = _request.get()
    if request is None:
        return {}
    fields = {"request": request.request_id, "tenant": tenant_shown(request), "trace": request.span.trace_id}
    return {name: value for name, value in fields.items() if value}
