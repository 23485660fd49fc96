"""Which request a line of the log is about: that of the task which writes it."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.api.responder import Responder

__all__ = ["TENANT_CHARACTERS_MAX", "begin_request", "end_request", "request_fields", "tenant_shown"]

TENANT_CHARACTERS_MAX = 64  # where there are no keys, clients choose the name

_request: ContextVar[Responder | None] = ContextVar("request", default=None)


def begin_request(request: Responder) -> Token[Responder | None]:
    return _request.set(request)


def end_request(token: Token[Responder | None]) -> None:
    _request.reset(token)


def tenant_shown(request: Responder) -> str | None:
    """A name that tells nothing of the key."""
    told = request.caller.tenant_told(request.named_tenant)
    return told[:TENANT_CHARACTERS_MAX] if told else None


def request_fields() -> dict[str, str]:
    """request, tenant and trace of the request that this task serves; without those that there are not."""
    request = _request.get()
    if request is None:
        return {}
    fields = {"request": request.request_id, "tenant": tenant_shown(request), "trace": request.span.trace_id}
    return {name: value for name, value in fields.items() if value}
