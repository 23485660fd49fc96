"""Table of all error codes, and errors as HTTP responses in OpenAI's format: status, body and headers."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from trioserve.api.response import Response
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
from trioserve.contracts.output import REQUEST_POISONED, Delta
from trioserve.contracts.request import KVTransferParams
from trioserve.http.body_budget import CODINGS
from trioserve.http.exchange import BodyTimeout, BodyTooLarge, UnknownCoding

__all__ = [
    "CODES",
    "REASON_HEADER",
    "TABLE",
    "Error",
    "ErrorDetail",
    "ErrorKind",
    "ErrorResponse",
    "HandedOver",
    "Refusal",
    "coded_response",
    "deadline_refusal",
    "error_response",
    "foreign_end",
    "refusal",
]

REASON_HEADER = "x-trioserve-reason"
"""Header of every refusal: one word for programs. The message is a sentence for people."""


MESSAGE_CHARACTERS_MAX = 2000  # A message may repeat the client's input, which may have megabytes.


class ErrorDetail(Response):
    """Details of an error.

    Attributes:
        message: sentence for people.
        type: class of the error, for programs. OpenAI's where OpenAI has one.
        param: field or header with the fault.
        code: kind of the error, for programs. OpenAI's where OpenAI has one.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Response):
    error: ErrorDetail


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One error as clients see it. `type` and `code` are OpenAI's where OpenAI has them.

    Attributes:
        status: HTTP status.
        type: class of the error.
        code: a key of TABLE. None: a request with an invalid field.
        message: a sentence for people. A long message is cut.
        param: field or header with the fault. None: no single field.
        headers: further header fields of the response.
    """

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
        """Message with the faulty field's name, for an API whose errors have no field `param`."""
        if self.param is None or self.message.startswith(self.param):
            return self.message
        return f"{self.param}: {self.message}"

    def body(self) -> Error:
        return Error(error=ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code))


class Refusal(TrioserveError):
    """An error that exists only in HTTP, such as an unknown path or a wrong key.

    Args:
        response: the error as clients see it.
    """

    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(response.message)
        self.response = response


class HandedOver(TrioserveError):
    """Signal, not an error: another server continues the response.

    Args:
        kv_transfer: how the other server reads the KV. None: the other server recomputes the KV.
    """

    def __init__(self, kv_transfer: KVTransferParams | None) -> None:
        super().__init__("the request was handed over: another server continues its response")
        self.kv_transfer = kv_transfer


_CALLER = "invalid_request_error"
_SERVER = "server_error"
_UNAVAILABLE = "service_unavailable_error"


class ErrorKind(NamedTuple):
    """Properties that all errors with one code share.

    Attributes:
        status: HTTP status. None: the code appears inside a body, or the status is that of an endpoint.
        type: OpenAI's `type`. None: it follows from the endpoints' status, or the object has no type.
        when: what happened, without a full stop.
        advice: what the client or the operator can do.
    """

    status: int | None
    type: str | None
    when: str
    advice: str


TABLE: dict[str | None, ErrorKind] = {
    # --- the request ---
    None: ErrorKind(400, _CALLER, "the request is invalid", "correct the field that `param` names"),
    "context_length_exceeded": ErrorKind(
        400, _CALLER, "prompt, or prompt and response together, exceed the model's context", "send less"
    ),
    "no_websocket": ErrorKind(400, _CALLER, "the path opens no websocket", "send an ordinary HTTP request"),
    "thread_unsupported_request": ErrorKind(
        400, _CALLER, "`thread` of Anthropic's API: no conversation is kept", "send all messages"
    ),
    "invalid_api_key": ErrorKind(
        401, _CALLER, "the API key is missing or wrong; in a batch: its key was removed", "send a key of the server"
    ),
    "not_admin": ErrorKind(403, _CALLER, "only the admin's key may do this", "send the key of `--admin-api-key`"),
    "operator_routes_off": ErrorKind(
        403, _CALLER, "operators' paths are off: other machines reach the server, and there are no keys", "set keys"
    ),
    "other_site": ErrorKind(
        403,
        _CALLER,
        "a web page of another site sent the request, and there are no keys",
        "add the site to `--cors-origin`, or set keys",
    ),
    "unknown_host": ErrorKind(
        403, _CALLER, "the Host header has a name that the server does not know", "add the name to `--allowed-host`"
    ),
    # --- the path, and the object that it names ---
    "not_found": ErrorKind(404, _CALLER, "the path or the id does not exist", "see the message"),
    "other_path": ErrorKind(
        404, _CALLER, "a path of vLLM, SGLang or Ollama that has another name here", "do what the message says"
    ),
    "makes_pictures": ErrorKind(
        404, _CALLER, "the model generates images, and the path is for text", "ask another server"
    ),
    "makes_texts": ErrorKind(
        404, _CALLER, "the model generates text, and the path is for images", "ask another server"
    ),
    "model_not_found": ErrorKind(404, _CALLER, "the server has no such model or adapter", "use one of `/v1/models`"),
    "adapters_fixed": ErrorKind(
        404, _CALLER, "the server loads no adapters while it runs", "start it with `--allow-runtime-lora-updating`"
    ),
    "kv_events_off": ErrorKind(404, _CALLER, "the server does not report its KV blocks", "start it with `--kv-events`"),
    "request_not_found": ErrorKind(404, _CALLER, "none of your running requests has this id", "use `X-Request-Id`"),
    "file_not_found": ErrorKind(404, _CALLER, "there is no such file, or it is not yours", "upload it again"),
    "batch_not_found": ErrorKind(404, _CALLER, "there is no such batch, or it is not yours", "list the batches"),
    "response_not_found": ErrorKind(404, _CALLER, "the response is not stored, or was deleted", "repeat the request"),
    "previous_response_not_found": ErrorKind(
        404, _CALLER, "`previous_response_id` is not stored, or was deleted", "send its items in `input`"
    ),
    "invalid_stream_id": ErrorKind(
        400, _CALLER, "on a websocket: `stream_id` is no name of a lane", "use letters, digits and `_-.`"
    ),
    "websocket_stream_limit_reached": ErrorKind(
        400, _CALLER, "on a websocket: the connection has too many lanes", "use another connection"
    ),
    "websocket_connection_limit_reached": ErrorKind(
        400, _CALLER, "on a websocket: the connection has reached its highest age", "open a new connection"
    ),
    "item_not_found": ErrorKind(404, _CALLER, "an item that `input` refers to is not stored", "send the item itself"),
    "stream_not_found": ErrorKind(
        404, _CALLER, "the server keeps no stream of yours with this name", "repeat the request"
    ),
    "session_not_found": ErrorKind(
        404, _CALLER, "you have no open session with this name", "nothing: it has ended already, or use its own name"
    ),
    "endpoint_not_found": ErrorKind(404, _CALLER, "the router has no such endpoint", "use one of `/endpoints`"),
    "method_not_allowed": ErrorKind(405, _CALLER, "the path does not accept this method", "use one of `Allow`"),
    # --- the state of the object that the path names ---
    "body_timeout": ErrorKind(
        408, _CALLER, "the body fell behind its pace, or took longer than `--body-timeout`", "send it faster"
    ),
    "file_in_use": ErrorKind(409, _CALLER, "a running batch uses the file", "wait, or cancel the batch"),
    "no_hand_over": ErrorKind(
        409, _CALLER, "the request cannot be handed over", "send requests with `X-Trioserve-Resumable`"
    ),
    "no_thought": ErrorKind(409, _CALLER, "the request has no reasoning that could be ended", "nothing"),
    "resume_mismatch": ErrorKind(
        409, _CALLER, "the response cannot be resumed here: its prompt has changed", "send no `resume`"
    ),
    "stream_exists": ErrorKind(409, _CALLER, "a stream with this name still runs", "read it, or choose another name"),
    "stream_is_read": ErrorKind(409, _CALLER, "another router reads the stream", "do not read it"),
    "stream_not_begun": ErrorKind(409, _CALLER, "the stream is still queued", "try again a little later"),
    "stream_taken_over": ErrorKind(409, _CALLER, "another reader has taken over the stream", "end one of the readers"),
    "events_gone": ErrorKind(410, _CALLER, "the requested events are no longer kept", "repeat the request"),
    "body_too_large": ErrorKind(413, _CALLER, "the body is larger than `--max-body-bytes`", "send less"),
    "not_json": ErrorKind(
        415, _CALLER, "the path is for operators, and the body is not declared as JSON", "send `Content-Type`"
    ),
    "unsupported_content_encoding": ErrorKind(
        415, _CALLER, "the body's compression is neither gzip nor deflate", "use one of `Accept-Encoding`"
    ),
    "websocket_required": ErrorKind(
        426, _CALLER, "the path takes only websockets", "use a websocket client, and proxies that pass `Upgrade`"
    ),
    # --- the server's state ---
    "overloaded": ErrorKind(
        429, "rate_limit_error", "a limit was reached; `X-Trioserve-Reason` names it", "wait for `Retry-After`"
    ),
    "draining": ErrorKind(503, _UNAVAILABLE, "the server is shutting down", "ask another server"),
    "no_endpoint": ErrorKind(503, _UNAVAILABLE, "no endpoint serves the model now", "wait for `Retry-After`"),
    "model_load_failed": ErrorKind(503, _UNAVAILABLE, "the model could not be loaded", "wait for `Retry-After`"),
    "step_overdue": ErrorKind(503, _UNAVAILABLE, "a step of the engine hangs", "ask another server"),
    "engine_reopening": ErrorKind(503, _UNAVAILABLE, "the engine failed and is restarting", "wait for `Retry-After`"),
    "no_store": ErrorKind(503, _UNAVAILABLE, "the server has no store", "ask a server with a store"),
    "no_background": ErrorKind(
        503, _UNAVAILABLE, "the server accepts no background responses, or is shutting down", "send `background=false`"
    ),
    "endpoint_lost": ErrorKind(
        503, _SERVER, "a router lost the endpoint, and no other endpoint was free in time", "wait for `Retry-After`"
    ),
    "request_aborted": ErrorKind(503, _SERVER, "the request was aborted by its id", "repeat the request"),
    "server_stopping": ErrorKind(
        503, _SERVER, "the server ended the request at its shutdown", "resume it at another server"
    ),
    "paused": ErrorKind(
        503, _SERVER, "the engine was paused, and running requests were ended", "repeat or resume the request"
    ),
    "weights_replaced": ErrorKind(
        503, _SERVER, "the weights were replaced, and running requests were ended", "repeat or resume the request"
    ),
    "adapter_unloaded": ErrorKind(
        503, _SERVER, "the adapter was unloaded while the request used it", "use another one"
    ),
    "stream_ended": ErrorKind(
        503, _SERVER, "the stream was ended before its response was complete", "repeat the request"
    ),
    "stream_buffer_full": ErrorKind(
        503, _SERVER, "no client reads the stream, and its buffer is full", "repeat the request, and read the stream"
    ),
    "queue_timeout": ErrorKind(504, _SERVER, "the request did not leave the queue in time", "wait for `Retry-After`"),
    "ttft_timeout": ErrorKind(504, _SERVER, "the first token was not ready in time", "wait for `Retry-After`"),
    "timeout": ErrorKind(504, _SERVER, "the response was not complete in time", "ask for less, or allow more time"),
    "deadline_exceeded": ErrorKind(
        504, _SERVER, "a deadline passed; which one is unknown", "ask for less, or allow more time"
    ),
    # --- faults of the server ---
    "internal_error": ErrorKind(500, _SERVER, "a bug of the server", "report it, with the server's log"),
    "request_failed": ErrorKind(500, _SERVER, "this request failed; other requests did not", "change the request"),
    "engine_fault": ErrorKind(500, _SERVER, "the engine failed", "ask another server"),
    "store_fault": ErrorKind(500, _SERVER, "the disk of `--data-dir` failed", "check the disk"),
    "weights_lost": ErrorKind(
        500, _SERVER, "an update of the weights failed; the message says how far it got", "update them again"
    ),
    "not_supported": ErrorKind(
        501, _CALLER, "a router cannot list requests if its endpoints do not know the callers", "ask by id"
    ),
    "request_poisoned": ErrorKind(
        502, _SERVER, "several endpoints or engines failed on this request", "do not send it again"
    ),
    "store_full": ErrorKind(
        507, _SERVER, "the store reached `--store-max-bytes` or `--store-max-objects`", "delete stored objects"
    ),
    # --- codes without an HTTP status of their own ---
    "adapter_failed": ErrorKind(
        None, None, "all endpoints of the router failed; the status is theirs, or 502", "see `data`"
    ),
    "adapter_failed_in_part": ErrorKind(
        None, None, "some endpoints succeeded and some failed; the status is 502", "see `data`, and retry the rest"
    ),
    "response_already_completed": ErrorKind(None, None, "steering: the response has ended", "send a new response"),
    "response_not_active": ErrorKind(
        None, None, "steering: the response failed or was cancelled", "send a new response"
    ),
    "invalid_input": ErrorKind(None, None, "steering: the new items are invalid", "correct them"),
    "too_many_pending_steers": ErrorKind(None, None, "steering: too many changes wait", "wait until one is applied"),
    "successor_creation_failed": ErrorKind(
        None, None, "steering: the response that continues could not begin", "send a new response"
    ),
    "steering_not_supported": ErrorKind(None, None, "steering: the response cannot be steered", "see the message"),
    "rate_limit_exceeded": ErrorKind(
        None, None, "in a failed response: OpenAI's name for `overloaded`", "try again later"
    ),
    "invalid_prompt": ErrorKind(None, None, "in a failed response: the request is invalid", "correct it"),
    "server_error": ErrorKind(None, None, "in a failed response: the server failed or was restarted", "repeat it"),
    "input_file_gone": ErrorKind(None, None, "in a batch: its input was deleted", "upload it again"),
    "file_gone": ErrorKind(None, None, "in a batch: one of its files was deleted", "create the batch again"),
    "too_many_lines": ErrorKind(None, None, "in a batch: the input has too many lines", "create several batches"),
    "empty_file": ErrorKind(None, None, "in a batch: the input has no line", "send one request per line"),
    "line_too_long": ErrorKind(None, None, "in a batch's line: the line has too many bytes", "send less"),
    "invalid_json_line": ErrorKind(
        None, None, "in a batch's line: the line is not a valid request", "correct the line"
    ),
    "invalid_custom_id": ErrorKind(None, None, "in a batch's line: `custom_id` is empty or too long", "shorten it"),
    "duplicate_custom_id": ErrorKind(
        None, None, "in a batch's line: an earlier line has the same `custom_id`", "use another one"
    ),
    "invalid_method": ErrorKind(None, None, "in a batch's line: `method` is not POST", "send POST"),
    "mismatched_url": ErrorKind(None, None, "in a batch's line: `url` is not the batch's endpoint", "use the endpoint"),
    "stream_not_supported": ErrorKind(None, None, "in a batch's line: `stream` is set", "leave it out"),
    "background_not_supported": ErrorKind(None, None, "in a batch's line: `background` is set", "leave it out"),
    "response_too_large": ErrorKind(None, None, "in a batch's line: its response has too many bytes", "ask for less"),
    "result_not_kept": ErrorKind(
        None, None, "in a batch's line: its response did not fit into the store", "delete objects"
    ),
    "batch_cancelled": ErrorKind(
        None, None, "in a batch's line: the batch was cancelled before the line ran", "repeat it"
    ),
    "batch_expired": ErrorKind(None, None, "in a batch's line: the batch expired before the line ran", "repeat it"),
}
"""All error codes of the server. docs/site/tables.py prints them as a table for docs/reference/errors.md."""

# The first row with a matching class is used. So each class is listed before its base classes.
CODES: tuple[tuple[type[TrioserveError], str | None], ...] = (
    (BodyTooLarge, "body_too_large"),
    (BodyTimeout, "body_timeout"),
    (UnknownCoding, "unsupported_content_encoding"),
    (ContextTooLong, "context_length_exceeded"),
    (ResumeMismatch, "resume_mismatch"),
    (UnknownModel, "model_not_found"),
    (InvalidRequest, None),
    (Draining, "draining"),
    (StepOverdue, "step_overdue"),
    (EngineReopening, "engine_reopening"),
    (NoEndpoint, "no_endpoint"),
    (Overloaded, "overloaded"),
    (RequestAborted, "request_aborted"),
    (DeadlinePassed, "deadline_exceeded"),
    (StoreFull, "store_full"),
    (StoreFault, "store_fault"),
    (WeightsLost, "weights_lost"),
    (RequestPoisoned, "request_poisoned"),
    (EndpointLost, "endpoint_lost"),
    (RequestFailed, "request_failed"),
    (EngineFault, "engine_fault"),
)

INTERNAL_MESSAGE = "the server failed on this request; search its log for the request's id"
ENDPOINT_RETRY_SECONDS = 1  # After this time, another endpoint may have free capacity.
DEADLINE_RETRY_SECONDS = 5  # After this time, the same request may succeed.


def coded_response(
    code: str | None,
    message: str,
    *,
    param: str | None = None,
    reason: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> ErrorResponse:
    """Make the response of a code that has a status.

    Args:
        code: a key of TABLE.
        message: what was received, what is allowed, what to do.
        param: field or header with the fault. None: no single field.
        reason: value of the header X-Trioserve-Reason. None: the code.
        headers: further header fields.
    """
    kind = TABLE[code]
    assert kind.status is not None, f"{code} has no status of its own"
    assert kind.type is not None
    reason = reason or code
    return ErrorResponse(
        status=kind.status,
        type=kind.type,
        code=code,
        message=message,
        param=param,
        headers=headers if reason is None else (*headers, (REASON_HEADER, reason)),
    )


def refusal(code: str, message: str, *, param: str | None = None, headers: tuple[tuple[str, str], ...] = ()) -> Refusal:
    """Make the error to raise for a code of TABLE.

    Args:
        code: a key of TABLE.
        message: what was received, what is allowed, what to do.
        param: field or header with the fault. None: no single field.
        headers: further header fields.
    """
    return Refusal(coded_response(code, message, param=param, headers=headers))


def error_response(error: Exception) -> ErrorResponse:
    """Describe an error to the client.

    Args:
        error: any exception. The client sees the text only of this project's own errors.
    """
    if isinstance(error, Refusal):
        return error.response
    row = next((row for row in CODES if isinstance(error, row[0])), None)
    if row is None:
        return coded_response("internal_error", INTERNAL_MESSAGE)
    code = reason = row[1]
    headers: list[tuple[str, str]] = []
    if isinstance(error, Overloaded):
        reason = error.reason
        code = reason if isinstance(error, NoEndpoint) else code
        headers.append(("retry-after", str(max(1, math.ceil(error.retry_after_seconds)))))
    elif code == "endpoint_lost":
        headers.append(("retry-after", str(ENDPOINT_RETRY_SECONDS)))
    if isinstance(error, UnknownCoding):
        headers.append(("accept-encoding", CODINGS))
    return coded_response(code, str(error), param=_param(error), reason=reason, headers=tuple(headers))


def _param(error: Exception) -> str | None:
    if isinstance(error, UnknownModel):
        return error.param or "model"
    return error.param if isinstance(error, InvalidRequest) else None


def deadline_refusal(deadline: Deadline, message: str) -> Refusal:
    """Make the error of a request whose deadline passed.

    Args:
        deadline: the deadline that passed.
        message: sentence for people.
    """
    return refusal(deadline.value, message, headers=(("retry-after", str(DEADLINE_RETRY_SECONDS)),))


_ENDED = {
    FinishReason.ABORT: (
        "request_aborted",
        "the request was aborted by the server before its response was complete",
    ),
    FinishReason.DEADLINE: ("deadline_exceeded", "the request's deadline passed before its response was complete"),
}


def foreign_end(delta: Delta) -> TrioserveError | None:
    """Find the error to raise for a choice that was ended by an abort, a deadline, a fault or a hand-over.

    Clients know only the finish reasons "stop" and "length". A partial response must not look complete.

    Args:
        delta: last delta of a choice.

    Returns:
        The error, or None if the model or a limit of the request ended the choice.
    """
    if delta.finish_reason is FinishReason.ERROR:
        kind = RequestPoisoned if delta.stop_reason == REQUEST_POISONED else RequestFailed
        return kind(delta.message or "the engine could not continue this request")
    if delta.finish_reason is FinishReason.HANDED_OVER:
        return HandedOver(delta.kv_transfer)
    if delta.finish_reason not in _ENDED:
        return None
    code, message = _ENDED[delta.finish_reason]
    is_deadline = delta.finish_reason is FinishReason.DEADLINE
    headers = (("retry-after", str(DEADLINE_RETRY_SECONDS)),) if is_deadline else ()
    return refusal(str(delta.stop_reason or code), delta.message or message, headers=headers)
