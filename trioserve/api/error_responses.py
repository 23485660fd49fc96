"""The one table from our errors to status, body and headers, in OpenAI's shape."""

from __future__ import annotations

import math

import msgspec

from trioserve.contracts.deadlines import Deadline
from trioserve.contracts.errors import (
    ContextTooLong,
    DeadlinePassed,
    Draining,
    EndpointLost,
    EngineFault,
    EngineReopening,
    InvalidRequest,
    NoEndpoint,
    Overloaded,
    RequestAborted,
    RequestFailed,
    RequestPoisoned,
    ResumeMismatch,
    StepOverdue,
    StoreFault,
    StoreFull,
    TrioserveError,
    UnknownModel,
    WeightsLost,
)
from trioserve.contracts.events import FinishReason
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.output import REQUEST_POISONED, Delta
from trioserve.http.content_coding import CODINGS
from trioserve.http.exchange import BodyTimeout, BodyTooLarge, UnknownCoding

__all__ = [
    "REASON_HEADER",
    "ErrorResponse",
    "HandedOver",
    "Refusal",
    "deadline_refusal",
    "error_response",
    "foreign_end",
]

REASON_HEADER = "x-trioserve-reason"
"""On every refusal: one word for programs, where the message is a sentence for people."""


MESSAGE_CHARACTERS_MAX = 2000  # messages repeat what came, and that may be megabytes


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One error as clients see it. `type` and `code` are OpenAI's where it has them. A long message is cut."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if len(self.message) > MESSAGE_CHARACTERS_MAX:
            msgspec.structs.force_setattr(self, "message", self.message[:MESSAGE_CHARACTERS_MAX] + " ...")

    @property
    def placed_message(self) -> str:
        """The message with the place in it, for an API that has no field for that."""
        if self.param is None or self.message.startswith(self.param):
            return self.message
        return f"{self.param}: {self.message}"

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class Refusal(TrioserveError):
    """An error that only HTTP knows: no such path, wrong key, a response that somebody else ended."""

    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(response.message)
        self.response = response


class HandedOver(TrioserveError):
    """No error: another server goes on with the response. kv_transfer: how it gets the KV; None: it computes."""

    def __init__(self, kv_transfer: KVTransferParams | None) -> None:
        super().__init__("the request was given away: another server goes on with its response")
        self.kv_transfer = kv_transfer


_CALLER = "invalid_request_error"
_SERVER = "server_error"

# The first row whose class fits counts, so a class stands above those it inherits from.
TABLE: tuple[tuple[type[TrioserveError], int, str, str | None], ...] = (
    (BodyTooLarge, 413, _CALLER, "body_too_large"),
    (BodyTimeout, 408, _CALLER, "body_timeout"),
    (UnknownCoding, 415, _CALLER, "unsupported_content_encoding"),
    (ContextTooLong, 400, _CALLER, "context_length_exceeded"),
    (ResumeMismatch, 409, _CALLER, "resume_mismatch"),
    (UnknownModel, 404, _CALLER, "model_not_found"),
    (InvalidRequest, 400, _CALLER, None),
    (Draining, 503, "service_unavailable_error", "draining"),
    (StepOverdue, 503, "service_unavailable_error", "step_overdue"),
    (EngineReopening, 503, "service_unavailable_error", "engine_reopening"),
    (NoEndpoint, 503, "service_unavailable_error", "no_endpoint"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (RequestAborted, 503, _SERVER, "request_aborted"),
    (DeadlinePassed, 504, _SERVER, "deadline_exceeded"),
    (StoreFull, 507, _SERVER, "store_full"),
    (StoreFault, 500, _SERVER, "store_fault"),
    (WeightsLost, 500, _SERVER, "weights_lost"),
    (RequestPoisoned, 502, _SERVER, "request_poisoned"),
    (EndpointLost, 503, _SERVER, "endpoint_lost"),
    (RequestFailed, 500, _SERVER, "request_failed"),
    (EngineFault, 500, _SERVER, "engine_fault"),
)

_INTERNAL = ErrorResponse(
    status=500,
    type=_SERVER,
    code="internal_error",
    message="the server failed on this request; its log has more under the request's id",
    headers=((REASON_HEADER, "internal_error"),),
)


ENDPOINT_RETRY_SECONDS = 1  # another endpoint may have room by then


def error_response(error: Exception) -> ErrorResponse:
    """What the client is told. Errors that nobody raised on purpose keep their text to themselves."""
    if isinstance(error, Refusal):
        return error.response
    row = next((row for row in TABLE if isinstance(error, row[0])), None)
    if row is None:
        return _INTERNAL
    _, status, error_type, code = row
    headers: list[tuple[str, str]] = []
    reason = code
    if isinstance(error, Overloaded):
        reason = error.reason
        code = reason if isinstance(error, NoEndpoint) else code
        headers.append(("retry-after", str(max(1, math.ceil(error.retry_after_seconds)))))
    elif code == "endpoint_lost":
        headers.append(("retry-after", str(ENDPOINT_RETRY_SECONDS)))
    if isinstance(error, UnknownCoding):
        headers.append(("accept-encoding", CODINGS))
    if reason is not None:
        headers.append((REASON_HEADER, reason))
    return ErrorResponse(
        status=status,
        type=error_type,
        code=code,
        message=str(error),
        param=_param(error),
        headers=tuple(headers),
    )


def _param(error: Exception) -> str | None:
    if isinstance(error, UnknownModel):
        return error.param or "model"
    return error.param if isinstance(error, InvalidRequest) else None


DEADLINE_RETRY_SECONDS = 5


def deadline_refusal(deadline: Deadline, message: str) -> Refusal:
    """The error of a request whose time is over. Time ran out here, not for good: the same request may well make it a
    little later."""
    return Refusal(
        ErrorResponse(
            status=504,
            type=_SERVER,
            code=deadline.value,
            message=message,
            headers=(("retry-after", str(DEADLINE_RETRY_SECONDS)), (REASON_HEADER, deadline.value)),
        )
    )


_ENDED: dict[FinishReason, tuple[int, str, str]] = {
    FinishReason.ABORT: (
        503,
        "request_aborted",
        "the request was aborted by the server before its response was complete",
    ),
    FinishReason.DEADLINE: (504, "deadline_exceeded", "the request's deadline passed before its response was complete"),
}


def foreign_end(delta: Delta) -> TrioserveError | None:
    """The error to raise if another's hand ended this choice: clients know only the finish reasons "stop" and "length",
    and half a response must not look like a whole one."""
    if delta.finish_reason is FinishReason.ERROR:
        kind = RequestPoisoned if delta.stop_reason == REQUEST_POISONED else RequestFailed
        return kind(delta.message or "the engine could not go on with this request")
    if delta.finish_reason is FinishReason.HANDED_OVER:
        return HandedOver(delta.kv_transfer)
    if delta.finish_reason not in _ENDED:
        return None
    status, code, message = _ENDED[delta.finish_reason]
    headers: list[tuple[str, str]] = []
    if delta.finish_reason is FinishReason.DEADLINE:
        # Time ran out here, not for good: the same request may well make it a little later.
        headers.append(("retry-after", str(DEADLINE_RETRY_SECONDS)))
    code = str(delta.stop_reason or code)
    headers.append((REASON_HEADER, code))
    return Refusal(
        ErrorResponse(
            status=status,
            type=_SERVER,
            code=code,
            message=delta.message or message,
            headers=tuple(headers),
        )
    )
