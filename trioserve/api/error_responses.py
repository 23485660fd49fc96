"""The table of all error codes, and errors as responses in OpenAI's shape: status, body and headers."""

from __future__ import annotations

import math
from typing import NamedTuple

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
    "TABLE",
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
_UNAVAILABLE = "service_unavailable_error"


class ErrorKind(NamedTuple):
    """What is the same for all errors with one code.

    Args:
        status: of the response. None: the code stands in the body of a response, or has the status of an endpoint.
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
    None: ErrorKind(400, _CALLER, "the request cannot be served as it stands", "mend the field that `param` names"),
    "context_length_exceeded": ErrorKind(
        400, _CALLER, "prompt, or prompt and response together, exceed the model's context", "send less"
    ),
    "thread_unsupported_request": ErrorKind(
        400, _CALLER, "`thread` of Anthropic's API: no conversation is kept", "send all messages"
    ),
    "invalid_api_key": ErrorKind(
        401, _CALLER, "no API key came, or a wrong one; in a batch: its key is gone", "send a key of the server"
    ),
    "not_admin": ErrorKind(403, _CALLER, "only the admin's key may do this", "send the key of `--admin-api-key`"),
    "operator_routes_off": ErrorKind(
        403, _CALLER, "operators' paths are off: other machines reach the server, and there are no keys", "set keys"
    ),
    "other_site": ErrorKind(
        403,
        _CALLER,
        "a web page of another site asks, and there are no keys",
        "name it in `--cors-origin`, or set keys",
    ),
    "unknown_host": ErrorKind(
        403, _CALLER, "the Host header has a name that the server does not know", "name it in `--allowed-host`"
    ),
    # --- the path, and what it names ---
    "not_found": ErrorKind(404, _CALLER, "there is nothing at this path, or with this id", "see the message"),
    "other_path": ErrorKind(
        404, _CALLER, "vLLM, SGLang or Ollama do it there, and this server in another way", "do what the message says"
    ),
    "makes_pictures": ErrorKind(
        404, _CALLER, "the model makes pictures, and texts were asked for", "ask another server"
    ),
    "makes_texts": ErrorKind(404, _CALLER, "the model makes texts, and pictures were asked for", "ask another server"),
    "model_not_found": ErrorKind(404, _CALLER, "no such model or adapter is served", "ask for one of `/v1/models`"),
    "adapters_fixed": ErrorKind(
        404, _CALLER, "the server loads no adapters while it runs", "start it with `--allow-runtime-lora-updating`"
    ),
    "kv_events_off": ErrorKind(
        404, _CALLER, "the server does not tell which blocks it has", "start it with `--kv-events`"
    ),
    "request_not_found": ErrorKind(404, _CALLER, "no request of yours with this id runs", "take `X-Request-Id`"),
    "file_not_found": ErrorKind(404, _CALLER, "there is no such file, or it is not yours", "upload it again"),
    "batch_not_found": ErrorKind(404, _CALLER, "there is no such batch, or it is not yours", "list the batches"),
    "response_not_found": ErrorKind(404, _CALLER, "the response is not stored, or not any more", "ask again"),
    "previous_response_not_found": ErrorKind(
        404, _CALLER, "`previous_response_id` is not stored, or not any more", "send its items in `input`"
    ),
    "item_not_found": ErrorKind(404, _CALLER, "an item that `input` refers to is not stored", "send the item itself"),
    "stream_not_found": ErrorKind(404, _CALLER, "no stream of yours with this name is kept", "repeat the request"),
    "endpoint_not_found": ErrorKind(404, _CALLER, "the router has no such endpoint", "take one of `/endpoints`"),
    "method_not_allowed": ErrorKind(405, _CALLER, "the path does not take this method", "take one of `Allow`"),
    # --- the state of what it names ---
    "body_timeout": ErrorKind(
        408, _CALLER, "the body fell behind its pace, or took longer than `--body-timeout`", "send it faster"
    ),
    "file_in_use": ErrorKind(409, _CALLER, "a batch that has not ended uses the file", "wait, or cancel the batch"),
    "no_hand_over": ErrorKind(
        409, _CALLER, "the request cannot be given away", "ask for it with `X-Trioserve-Resumable`"
    ),
    "no_thought": ErrorKind(409, _CALLER, "the request has no reasoning that could end", "leave it as it is"),
    "resume_mismatch": ErrorKind(
        409, _CALLER, "a response cannot be resumed here: its prompt is another one now", "ask without `resume`"
    ),
    "stream_exists": ErrorKind(409, _CALLER, "a stream with this name still runs", "read it, or take another name"),
    "stream_is_read": ErrorKind(409, _CALLER, "another router reads the stream", "leave it to that router"),
    "stream_not_begun": ErrorKind(409, _CALLER, "the stream waits for its turn", "ask a little later"),
    "stream_taken_over": ErrorKind(409, _CALLER, "another reader has taken over the stream", "end one of the readers"),
    "events_gone": ErrorKind(
        410, _CALLER, "the events that were asked for are not kept any more", "repeat the request"
    ),
    "body_too_large": ErrorKind(413, _CALLER, "the body is larger than `--max-body-bytes`", "send less"),
    "not_json": ErrorKind(
        415, _CALLER, "an operator's path, and the body does not say that it is JSON", "send `Content-Type`"
    ),
    "unsupported_content_encoding": ErrorKind(
        415, _CALLER, "the body is compressed in another way than gzip or deflate", "take one of `Accept-Encoding`"
    ),
    # --- the server, for now ---
    "overloaded": ErrorKind(
        429, "rate_limit_error", "a bound was reached; `X-Trioserve-Reason` says which", "wait for `Retry-After`"
    ),
    "draining": ErrorKind(503, _UNAVAILABLE, "the server is leaving", "ask another one"),
    "no_endpoint": ErrorKind(503, _UNAVAILABLE, "no endpoint serves the model now", "wait for `Retry-After`"),
    "step_overdue": ErrorKind(503, _UNAVAILABLE, "a step of the engine hangs", "ask another one"),
    "engine_reopening": ErrorKind(503, _UNAVAILABLE, "the engine broke and is opened again", "wait for `Retry-After`"),
    "no_store": ErrorKind(503, _UNAVAILABLE, "the server stores nothing", "ask one with a store"),
    "no_background": ErrorKind(
        503, _UNAVAILABLE, "the server takes no background responses, or is leaving", "send `background=false`"
    ),
    "endpoint_lost": ErrorKind(
        503, _SERVER, "a router lost the endpoint, and no other took the request in time", "wait for `Retry-After`"
    ),
    "request_aborted": ErrorKind(503, _SERVER, "somebody aborted the request by its id", "ask again"),
    "server_stopping": ErrorKind(503, _SERVER, "the server ended the request when it left", "resume it elsewhere"),
    "paused": ErrorKind(
        503, _SERVER, "the engine was paused, and running requests were ended", "ask again, or resume it"
    ),
    "weights_replaced": ErrorKind(
        503, _SERVER, "the weights were replaced, and running requests were ended", "ask again, or resume it"
    ),
    "adapter_unloaded": ErrorKind(503, _SERVER, "the adapter was unloaded while it was in use", "ask for another one"),
    "stream_ended": ErrorKind(
        503, _SERVER, "the stream was ended before its response was complete", "repeat the request"
    ),
    "stream_buffer_full": ErrorKind(
        503, _SERVER, "nobody reads the stream, and there is no room for more events", "repeat the request, and read"
    ),
    "queue_timeout": ErrorKind(504, _SERVER, "the request did not run in time", "wait for `Retry-After`"),
    "ttft_timeout": ErrorKind(504, _SERVER, "the first token did not come in time", "wait for `Retry-After`"),
    "timeout": ErrorKind(504, _SERVER, "the response was not complete in time", "ask for less, or give it longer"),
    "deadline_exceeded": ErrorKind(
        504, _SERVER, "a deadline passed, and it is not known which", "ask for less, or give it longer"
    ),
    # --- a fault ---
    "internal_error": ErrorKind(500, _SERVER, "a bug of the server", "report it, with the server's log"),
    "request_failed": ErrorKind(500, _SERVER, "this request failed, and others did not", "change it"),
    "engine_fault": ErrorKind(500, _SERVER, "the engine failed", "ask another server"),
    "store_fault": ErrorKind(500, _SERVER, "the disk of `--data-dir` failed", "see to the disk"),
    "weights_lost": ErrorKind(
        500, _SERVER, "an update of the weights failed; the message says which are there", "update them again"
    ),
    "not_supported": ErrorKind(
        501, _CALLER, "a router whose endpoints cannot tell callers apart lists nothing", "ask by id"
    ),
    "request_poisoned": ErrorKind(
        502, _SERVER, "endpoint after endpoint, or engine after engine, broke on this request", "do not send it again"
    ),
    "store_full": ErrorKind(
        507, _SERVER, "what is stored reached `--store-max-bytes` or `--store-max-objects`", "delete some"
    ),
    # --- without a status of their own ---
    "adapter_failed": ErrorKind(
        None, None, "no endpoint of the router did it; the status is theirs, or 502", "see `data`"
    ),
    "adapter_failed_in_part": ErrorKind(
        None, None, "some endpoints did it, and stay so; the status is 502", "see `data`, and ask the rest"
    ),
    "rate_limit_exceeded": ErrorKind(
        None, None, "in a failed response: OpenAI's name for `overloaded`", "ask again later"
    ),
    "invalid_prompt": ErrorKind(None, None, "in a failed response: the request could not be served", "mend it"),
    "server_error": ErrorKind(None, None, "in a failed response: the server failed or was restarted", "ask again"),
    "input_file_gone": ErrorKind(None, None, "in a batch: its input was deleted", "upload it again"),
    "file_gone": ErrorKind(None, None, "in a batch: one of its files was deleted", "make the batch again"),
    "too_many_lines": ErrorKind(None, None, "in a batch: the input has too many lines", "make several batches"),
    "empty_file": ErrorKind(None, None, "in a batch: the input has no line", "send one request per line"),
    "line_too_long": ErrorKind(None, None, "in a batch's line: it has too many bytes", "send less"),
    "invalid_json_line": ErrorKind(None, None, "in a batch's line: it is no request of a batch", "mend the line"),
    "invalid_custom_id": ErrorKind(None, None, "in a batch's line: `custom_id` is empty or too long", "shorten it"),
    "duplicate_custom_id": ErrorKind(
        None, None, "in a batch's line: `custom_id` is that of an earlier line", "take another one"
    ),
    "invalid_method": ErrorKind(None, None, "in a batch's line: `method` is not POST", "send POST"),
    "mismatched_url": ErrorKind(None, None, "in a batch's line: `url` is not the batch's endpoint", "send that one"),
    "stream_not_supported": ErrorKind(None, None, "in a batch's line: `stream` is set", "leave it out"),
    "background_not_supported": ErrorKind(None, None, "in a batch's line: `background` is set", "leave it out"),
    "response_too_large": ErrorKind(None, None, "in a batch's line: its response has too many bytes", "ask for less"),
    "result_not_kept": ErrorKind(None, None, "in a batch's line: there was no room for its response", "delete some"),
    "batch_cancelled": ErrorKind(None, None, "in a batch's line: the batch was cancelled before it", "ask again"),
    "batch_expired": ErrorKind(None, None, "in a batch's line: the batch's time was over before it", "ask again"),
}
"""Every code that the server answers with. docs/http-api.md has the same rows, as docs/site/tables.py prints them."""

# The first row whose class fits counts, so a class stands above those it inherits from.
_CODES: tuple[tuple[type[TrioserveError], str | None], ...] = (
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

INTERNAL_MESSAGE = "the server failed on this request; its log has more under the request's id"
ENDPOINT_RETRY_SECONDS = 1  # another endpoint may have room by then
DEADLINE_RETRY_SECONDS = 5  # time ran out here, not for good: the same request may well make it a little later


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
        reason: for the header that programs read. Default: the code.
        headers: further ones.
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
    """Make the error to raise for a code of TABLE. See coded_response."""
    return Refusal(coded_response(code, message, param=param, headers=headers))


def error_response(error: Exception) -> ErrorResponse:
    """Describe an error to the client. An error that nobody raised on purpose keeps its text to itself."""
    if isinstance(error, Refusal):
        return error.response
    row = next((row for row in _CODES if isinstance(error, row[0])), None)
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
    """Make the error of a request whose time is over."""
    return refusal(deadline.value, message, headers=(("retry-after", str(DEADLINE_RETRY_SECONDS)),))


_ENDED = {
    FinishReason.ABORT: (
        "request_aborted",
        "the request was aborted by the server before its response was complete",
    ),
    FinishReason.DEADLINE: ("deadline_exceeded", "the request's deadline passed before its response was complete"),
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
    code, message = _ENDED[delta.finish_reason]
    is_deadline = delta.finish_reason is FinishReason.DEADLINE
    headers = (("retry-after", str(DEADLINE_RETRY_SECONDS)),) if is_deadline else ()
    return refusal(str(delta.stop_reason or code), delta.message or message, headers=headers)
