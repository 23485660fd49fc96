"""One attempt to serve a request at one endpoint: the request to the endpoint, and the response to the client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trioserve.admission.dispatch import Fault
from trioserve.admission.text_threads import TEXT_QUEUE_FULL
from trioserve.api.error_responses import REASON_HEADER, ErrorResponse, Refusal, deadline_refusal
from trioserve.api.streams.cursors import RESUMABLE_HEADER, RESUME_HEADER
from trioserve.api.surface import LINES_TYPE
from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.contracts.errors import (
    Draining,
    EndpointLost,
    Overloaded,
    QueueWaitOver,
    RequestPoisoned,
    TrioserveError,
)
from trioserve.proxy.continuation import (
    DEATH_CODES,
    HandedOver,
    NotResumed,
    StreamFailed,
    ends_on_purpose,
    fault_of,
    reason_of,
)
from trioserve.proxy.continued_stream import ContinuedStream
from trioserve.proxy.event_splitter import LineSplitter
from trioserve.proxy.foreign_stream import COMPLETIONS_PATH, ForeignStream
from trioserve.proxy.forwarded_headers import owner_of, request_headers, response_headers
from trioserve.proxy.kept_objects import RESPONSES_PATH, KeptObject, object_id_in
from trioserve.proxy.response_shape import (
    EventCheck,
    InvalidAnswer,
    check_begin,
    check_head,
    check_line,
    check_whole,
    is_error,
)
from trioserve.proxy.routed_body import TRANSFER_PARAMS, rewritten
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.fair_slots import STAGE_FULL

if TYPE_CHECKING:
    from trioserve.admission.dispatch import AdmissionScope
    from trioserve.proxy.peers.kept_stream import EndpointRequest
    from trioserve.proxy.proxied_request import RequestClock
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.router_context import RouterContext

__all__ = [
    "Refused",
    "attempt",
    "check_status",
    "error_code",
    "handle_failure",
    "lease",
    "model_field",
    "sent_body",
]

logger = logging.getLogger(__name__)

WHOLE_BYTES_MAX = 256 * 1024  # A response up to this size is sent in one piece when it is complete.
ERROR_BYTES_MAX = 64 * 1024
NOT_ENDPOINTS_FAULT = frozenset({429, 503, 529})  # Anthropic's API uses status 529 instead of 503.
BROKEN = frozenset({500, 502, 504})
# A server gives these reasons if it refuses because it stops, not because it is busy.
STOPPING = frozenset({"draining", "server_stopping"})
CLIENTS_FAULT = frozenset({400, 413, 422})
# A gateway in front of an inference server also sends these statuses, with an error text of its own.
TOO_LARGE = frozenset({408, 413, 414, 431})
KEY_REFUSED = frozenset({401, 403})
# A server of another kind sends these statuses for every request. An inference server may have a reason for them. In
# the second case, other endpoints send the same status.
DOUBTFUL = KEY_REFUSED | {404, 405, 410, 421}
# The statuses 400 and 422 are treated like DOUBTFUL if the endpoint gives no other answers.
DOUBTFUL_IN_A_ROW = frozenset({400, 422})
# One API key has too many requests. Requests with other keys are served.
KEYS_OWN_REFUSALS = frozenset({TEXT_QUEUE_FULL, STAGE_FULL})
BUSY_SECONDS_MAX = 5.0
# A stream with one of these error codes was ended on purpose. No other endpoint resumes the stream.
ENDED_ON_PURPOSE = frozenset({"request_aborted", "queue_timeout", "ttft_timeout", "timeout", "deadline_exceeded"})


class Refused(TrioserveError):
    """The endpoint answered with an error before its response began.

    The client gets this error, unless another endpoint takes over the request.

    Args:
        response: Response of the endpoint.
        body: Body of the response.
        fault: Kind of the failure. None: the endpoint is not at fault, and no other endpoint is asked.

    Attributes:
        is_shown: Whether the body has the format of an API error, so that the client may see it.
    """

    def __init__(self, response: RemoteResponse, body: bytes, fault: Fault | None) -> None:
        super().__init__(f"status {response.status}")
        self.is_shown = is_error(response.header("content-type"), body)
        self.response = response
        self.body = body
        self.fault = fault


class TransferFailed(EndpointLost):
    """The endpoint began its response with an error, because it did not get the KV of the prompt."""


async def attempt(
    context: RouterContext,
    admission: AdmissionScope,
    id: EndpointId,
    body: bytes,
    clock: RequestClock,
    *,
    on_begin: Callable[[], None] = lambda: None,
) -> bool:
    """Send the request to the endpoint of its lease, and the response to the client.

    Args:
        context: Request of the router's API.
        admission: Admission of the request. It holds a lease.
        id: Endpoint of the lease.
        body: Body for the endpoint.
        clock: Deadlines of the request.
        on_begin: Called at the first token.

    Returns:
        True if the client has got its response. False if the admission waits for another lease.

    Raises:
        EndpointLost: No endpoint takes over the request, or it is too late for that.
    """

    def begin(*, is_last: bool = False) -> None:
        admission.first_token(is_last=is_last)
        context.span.event("first_token")
        clock.stop_first_token()
        on_begin()

    # Few function calls lie between this line and the wait for an event, because Python re-enters each of their frames
    # for every event.
    try:
        with context.asking(id, admission.stage), admission.attempt():
            request = _request(context, admission, id, body)
            try:
                response = await _checked_head(context, admission, id, request)
                content_type = response.header("content-type") or ""
                if content_type.startswith("text/event-stream"):
                    last = await _relay_events(context, admission, id, response, begin)
                    await admission.tell(context.finish(last), is_last=True)
                elif admission.has_token:
                    raise NotResumed(f'the endpoint "{id}" did not answer with events when it had to resume a stream')
                elif content_type.startswith(LINES_TYPE):
                    await _relay_lines(context, admission, id, response, begin)
                    await admission.tell(context.finish(), is_last=True)
                else:
                    await _relay_whole(context, id, response, begin, request)
            finally:
                request.end()
        return True
    except (Refused, EndpointLost) as failure:
        return await handle_failure(context, admission, id, failure, clock)


async def handle_failure(
    context: RouterContext,
    admission: AdmissionScope,
    id: EndpointId,
    failure: Refused | EndpointLost,
    clock: RequestClock,
) -> bool:
    """Decide how a request continues after a failed attempt.

    Args:
        context: Request of the router's API.
        admission: Admission of the request.
        id: Endpoint that failed.
        failure: Its failure.
        clock: Deadlines of the request.

    Returns:
        False if the request waits for another endpoint. True if the client has received the endpoint's error.

    Raises:
        EndpointLost: No endpoint takes over the request, and there is no error of the endpoint for the client.
    """
    if admission.has_token:
        return await _resume_or_end(context, admission, failure)
    # The time at the endpoint does not count as waiting.
    clock.note_served(trio.current_time() - admission.leased_at)
    if isinstance(failure, Refused):
        is_waiting = _may_be_served_elsewhere(context, admission, failure)
    else:
        fault = Fault.TRANSFER if isinstance(failure, TransferFailed) else fault_of(failure)
        is_certain = isinstance(failure, StreamFailed)
        is_waiting = admission.failed(fault, is_certain=is_certain, reason=reason_of(failure))
    if not is_waiting:
        if admission.refusal is not None:
            raise admission.refusal
        failure = context.refused or failure
        if isinstance(failure, Refused):
            if not failure.is_shown:
                raise EndpointLost(f'the endpoint "{id}" answered with status {failure.response.status}')
            await _pass_on(context, failure.response, failure.body)
        elif isinstance(failure, StreamFailed):
            await _end_with(context, failure)
        else:
            raise failure
        return True
    reason = msgspec.json.encode(str(failure)).decode()
    logger.info("retried request=%s endpoint=%s reason=%s", context.request_id, id, reason)
    return False


def _may_be_served_elsewhere(context: RouterContext, admission: AdmissionScope, refused: Refused) -> bool:
    """Record a refusal.

    Returns:
        True if the request waits for another endpoint, which may decide differently.
    """
    fault, status = refused.fault, refused.response.status
    if fault is None and status in DOUBTFUL_IN_A_ROW and refused.is_shown and admission.note_client_fault():
        fault = Fault.REFUSED
    if fault is Fault.REFUSED:
        if context.refused is not None and context.refused.response.status == status:
            return False  # A second endpoint has confirmed the refusal.
        context.refused = refused
    return fault is not None and admission.failed(
        fault, busy_seconds=_busy_seconds(refused.response), is_certain=True, reason=f"status_{status}"
    )


async def _resume_or_end(context: RouterContext, admission: AdmissionScope, failure: Refused | EndpointLost) -> bool:
    """Decide how a request continues if its client has already received a token. The return value has the same meaning
    as in `handle_failure`.
    """
    fault = failure.fault or Fault.BUSY if isinstance(failure, Refused) else fault_of(failure)
    lost = failure
    if isinstance(failure, Refused):
        lost = EndpointLost(f"the endpoint answered with status {failure.response.status} instead of resuming")
    assert isinstance(lost, EndpointLost)
    continuation = context.continuation
    is_certain = isinstance(failure, Refused | StreamFailed)
    if continuation is not None and continuation.resumes(context, admission, fault, lost, is_certain=is_certain):
        return False
    if isinstance(lost, StreamFailed) and not isinstance(admission.refusal, RequestPoisoned):
        await _end_with(context, lost)
        return True
    raise admission.refusal or lost


async def _end_with(context: RouterContext, failure: StreamFailed) -> None:
    """End the stream with the error event of its endpoint."""
    context.note_error(context.status or 200, failure.code)
    await context.finish(failure.event)


async def lease(context: RouterContext, admission: AdmissionScope, clock: RequestClock) -> EndpointId:
    """Wait for a lease, and return its endpoint.

    A client whose stream has begun gets comments meanwhile, which keep the connection alive.

    Args:
        context: Request of the router's API.
        admission: Admission of the request.
        clock: Deadlines of the request.

    Raises:
        Refusal: The queue deadline has passed, or an endpoint had refused the request and no other endpoint is
            available.
        Overloaded: The queue refuses the request.
        EndpointLost: The stream has begun, and no endpoint is available to resume it.
        RequestPoisoned: The request has crashed several endpoints.
    """
    while context.exchange.started:
        with trio.move_on_after(context.services.access.keep_alive_seconds):
            return await _lease(context, admission, clock)
        await context.exchange.send(context.client_events.keep_alive)
    return await _lease(context, admission, clock)


async def _lease(context: RouterContext, admission: AdmissionScope, clock: RequestClock) -> EndpointId:
    queue = context.span.child("queue")
    try:
        return await admission.lease()
    except QueueWaitOver as over:
        raise deadline_refusal(clock.first()[0], str(over)) from None
    except Overloaded as refusal:
        if context.refused is not None and not admission.has_token:
            raise _as_refusal(context.refused) from None  # No other endpoint is available for the request.
        if not admission.has_token or context.continuation is None or isinstance(refusal, Draining):
            raise
        context.continuation.note_not_continued(context, "no_endpoint", refusal)
        raise EndpointLost(
            f"the endpoint failed in the middle, and no other endpoint resumes the response: {refusal}"
        ) from refusal
    except RequestPoisoned as refusal:
        if context.continuation is not None:
            context.continuation.note_not_continued(context, "poisoned", refusal)
        raise
    finally:
        queue.end()


def _as_refusal(refused: Refused) -> Refusal:
    """Turn an endpoint's refusal into an error of the router with the same text."""
    try:
        error = msgspec.json.decode(refused.body, type=_ErrorBody).error or {}
    except msgspec.DecodeError:
        error = {}
    return Refusal(
        ErrorResponse(
            status=refused.response.status,
            type=str(error.get("type") or "invalid_request_error"),
            code=None if error.get("code") is None else str(error["code"]),
            message=str(error.get("message") or f"the endpoint answered with status {refused.response.status}"),
        )
    )


async def check_error(context: RouterContext, id: EndpointId, response: RemoteResponse, stage: Stage | None) -> None:
    """Decide who is at fault for an error response.

    Args:
        context: Request of the router's API.
        id: Endpoint that responded.
        response: Response with its head.
        stage: Stage of a disaggregated request. None for other requests.

    Raises:
        Refused: The endpoint refuses the request, or failed.
        InvalidAnswer: No inference server sends this error.
    """
    await check_status(response, stage)
    status, kind = response.status, response.header("content-type")
    said = await response.whole(ERROR_BYTES_MAX) or b""
    if not is_error(kind, said) and status not in TOO_LARGE:
        raise InvalidAnswer(id, "html" if _is_page(kind) else f"status_{status}", f"status {status}, {said[:80]!r}")
    if status in KEY_REFUSED and context.services.fleet.uses_own_key(
        id, passes_clients=context.services.rules.passes_authorization
    ):
        logger.warning("endpoint refuses the router's key endpoint=%s status=%s: check --endpoint-api-key", id, status)
        raise InvalidAnswer(id, "key_refused", f"status {status} to the router's own key: see --endpoint-api-key")
    raise Refused(response, said, Fault.REFUSED if status in DOUBTFUL else None)


def _is_page(content_type: str | None) -> bool:
    return (content_type or "").lower().startswith(("text/html", "application/xhtml"))


async def check_status(response: RemoteResponse, stage: Stage | None) -> None:
    """Raise an error for a status that is not simply forwarded to the client. Other statuses pass.

    Args:
        response: Response with its head.
        stage: Stage of a disaggregated request. None for other requests.

    Raises:
        Refused: The endpoint refuses the request, or failed.
        InvalidAnswer: The error is a web page.
    """
    status = response.status
    if status not in NOT_ENDPOINTS_FAULT and status not in BROKEN and (status < 400 or stage is not Stage.DECODE):
        return
    said = await response.whole(ERROR_BYTES_MAX) or b""
    if _is_page(response.header("content-type")):
        raise InvalidAnswer(response.endpoint, "html", f"status {status} with a web page")
    code = response.header(REASON_HEADER) or error_code(said)  # The errors of other APIs have no code.
    fault: Fault | None = Fault.BUSY if status in NOT_ENDPOINTS_FAULT else Fault.FAILED
    if fault is Fault.FAILED and code in DEATH_CODES:
        fault = Fault.BROKE  # The error ends all requests of the endpoint.
    if fault is Fault.BUSY and code in STOPPING:
        fault = Fault.LEAVING
    if code in ENDED_ON_PURPOSE or response.header(REASON_HEADER) in KEYS_OWN_REFUSALS:
        fault = None  # A refusal for one API key says nothing about the endpoint's load.
    elif status < 500 and status not in NOT_ENDPOINTS_FAULT:
        # The prefill endpoint got a shorter request, so it could not report this client error.
        is_clients = status in CLIENTS_FAULT and TRANSFER_PARAMS.encode() not in said
        fault = None if is_clients else Fault.TRANSFER
    elif stage is Stage.DECODE and code == "request_failed":
        fault = Fault.TRANSFER
    raise Refused(response, said, fault)


def model_field(context: RouterContext, asked: str | None, id: EndpointId, model: str) -> dict[str, object]:
    """Return the body field `model` with the endpoint's own name if the client uses another name. Otherwise, return no
    field.

    Args:
        context: Request of the router's API.
        asked: Name that the client uses. None if it names no model.
        id: Endpoint that gets the request.
        model: Name at this router.
    """
    there = context.services.fleet.model_at(id, model)
    return {} if asked == there else {"model": there}


def sent_body(context: RouterContext, raw: bytes, clock: RequestClock, fields: dict[str, object]) -> bytes:
    """Make the body for an endpoint.

    Args:
        context: Request of the router's API.
        raw: Body of the client.
        clock: Deadlines of the request. The body gets the remaining times.
        fields: New values by field name.

    Returns:
        The body, with the known part of the response if it resumes.
    """
    continuation = context.continuation
    completion = None if continuation is None else continuation.completion()
    if completion is not None:
        context.endpoint_path = COMPLETIONS_PATH
        return msgspec.json.encode({**completion, **fields, **clock.left()})
    if context.form is not None:
        return context.form.rewritten({**fields, **clock.left()}, without=clock.passed)
    resume = {} if continuation is None else continuation.fields(context, raw)
    return rewritten(raw, {**fields, **clock.left(), **resume}, without=clock.passed)


def _request(context: RouterContext, admission: AdmissionScope, id: EndpointId, body: bytes) -> EndpointRequest:
    """Make the request to an endpoint.

    Raises:
        NotResumed: The endpoint cannot resume the response.
    """
    headers = request_headers(context, admission.stage)
    if context.continuation is not None:
        context.continuation.check_endpoint(context, id)
        if not context.continuation.shows_ids:
            headers.append((RESUMABLE_HEADER, "1"))
    return context.stream.request(
        context.services.fleet.remote(id), context.exchange.method, context.target, headers, body
    )


async def _checked_head(
    context: RouterContext, admission: AdmissionScope, id: EndpointId, request: EndpointRequest
) -> RemoteResponse:
    """Wait for the head of the response, and check it.

    Raises:
        EndpointLost: The attempt failed. Unreachable and TransferFailed are special cases.
        Refused: The endpoint answered with an error.
    """
    response = await _head_of(context, admission, request)
    if response.status >= 400:
        if context.continuation is not None and admission.has_token:
            await check_status(response, admission.stage)
            said = await response.whole(ERROR_BYTES_MAX) or b""
            if not is_error(response.header("content-type"), said):
                raise InvalidAnswer(id, f"status_{response.status}", f"status {response.status}, {said[:80]!r}")
            context.continuation.check_refusal(id, response, error_code(said))
        await check_error(context, id, response, admission.stage)
    check_head(id, response.status, response.header("content-type") or None)
    return response


async def _relay_whole(
    context: RouterContext,
    id: EndpointId,
    response: RemoteResponse,
    begin: Callable[..., None],
    request: EndpointRequest,
) -> None:
    """Forward a response that is not a stream. A small response is sent in one piece, a large response in several
    pieces.
    """
    whole = await response.whole(WHOLE_BYTES_MAX)
    if whole is not None:
        check_whole(id, context.exchange.path, whole)
        begin(is_last=True)
        _remember_object(context, id, whole)
        await _pass_on(context, response, whole)
        return
    piece = await response.next_piece()
    check_begin(id, piece or b"")
    begin(is_last=True)
    await context.start(response.status, response_headers(context, response), is_events=False)
    while piece is not None:
        await context.exchange.send(piece)
        piece = await response.next_piece()
    request.end()  # End the request to the endpoint first. Otherwise a slow client would keep the connection busy.
    await context.finish()


async def _relay_lines(
    context: RouterContext,
    admission: AdmissionScope,
    id: EndpointId,
    response: RemoteResponse,
    begin: Callable[[], None],
) -> None:
    """Forward the lines of an endpoint that does not send events. Such a stream cannot resume at another endpoint."""
    lines = LineSplitter()
    has_begun = is_over = has_ended = False
    while not has_ended:
        piece = await response.next_piece()
        has_ended = piece is None
        whole = lines.end() if piece is None else lines.feed(piece)
        for line in whole.split(b"\n"):
            is_over = (bool(line.strip()) and check_line(id, line)) or is_over
        if not whole:
            continue
        if not has_begun:
            has_begun = True
            begin()
            await admission.tell(context.start(response.status, response_headers(context, response), is_events=True))
        await admission.tell(context.exchange.send(whole))
    if not is_over:
        raise InvalidAnswer(id, "no_end", "a stream without its last line")


async def _head_of(context: RouterContext, admission: AdmissionScope, request: EndpointRequest) -> RemoteResponse:
    """Wait for the head of the response.

    An endpoint that resumes a response sends its head shortly before its step. The client gets comments meanwhile,
    which keep the connection alive.
    """
    if not context.exchange.started:
        return await request.begin()
    awaited = _AwaitedHead(request)
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(awaited.run)
            # If a comment is being sent when the head arrives, the comment is completed first. Otherwise the client
            # would get half of it.
            while not awaited.is_over.is_set():
                with trio.move_on_after(context.services.access.keep_alive_seconds):
                    await awaited.is_over.wait()
                    break
                await admission.tell(context.exchange.send(context.client_events.keep_alive))
    return awaited.response()


class _AwaitedHead:
    """Task that waits for the head of a response."""

    def __init__(self, request: EndpointRequest) -> None:
        self.is_over = trio.Event()
        self._request = request
        self._result: RemoteResponse | EndpointLost | None = None

    async def run(self) -> None:
        try:
            self._result = await self._request.begin()
        except EndpointLost as lost:
            self._result = lost
        self.is_over.set()

    def response(self) -> RemoteResponse:
        """Return the response.

        Raises:
            EndpointLost: The attempt failed.
        """
        assert self._result is not None
        if isinstance(self._result, EndpointLost):
            raise self._result
        return self._result


def _remember_object(context: RouterContext, id: EndpointId, said: bytes) -> None:
    """Remember the endpoint and the owner of a stored response."""
    if context.exchange.path != RESPONSES_PATH:
        return
    made, continuation = object_id_in(said), context.continuation
    if continuation is not None:  # An endpoint that resumes a response does not repeat the id.
        made = continuation.object_id = made or continuation.object_id
    if made is not None:
        context.services.kept.remember(made, KeptObject(id, owner_of(context)))


async def _relay_events(
    context: RouterContext,
    admission: AdmissionScope,
    id: EndpointId,
    response: RemoteResponse,
    begin: Callable[[], None],
) -> bytes:
    """Forward the events of a stream.

    Returns:
        The last event if it is an error, which the caller must send. Otherwise empty.
    """
    continuation = context.continuation
    stream: ContinuedStream | ForeignStream
    if continuation is None:
        stream = ContinuedStream(choice_count=1, bytes_max=0)
        stream.begin(None)
    else:
        remark = continuation.begin(context, id, response)
        stream = continuation.stream
        if remark:
            await admission.tell(context.send_events(remark))
    # The response to the client begins with the first valid event, because the body might not be an event stream at
    # all.
    if not context.exchange.started and response.header(RESUME_HEADER) is not None:
        await admission.tell(context.start(response.status, response_headers(context, response), is_events=True))
    # The code that runs for each event is most of the router's cost. So calls that are not needed are avoided.
    send = context.exchange.send if context.client_events.takes_all else context.send_events
    has_begun = is_over = False
    has_started = context.exchange.started
    checked = EventCheck(id, context.exchange.path if context.endpoint_path is None else context.endpoint_path)
    while not is_over:
        try:
            piece = await response.next_piece()
        except EndpointLost:
            if not stream.is_over:
                raise
            piece = None  # The stream was complete before the connection broke.
        if admission.withdrawn_for is not None:
            admission.check_withdrawn()
        is_over = piece is None
        events = stream.end() if piece is None else stream.feed(piece)
        if events:
            try:
                checked.check(events)
            except InvalidAnswer:
                stream.undo_feed()
                raise
        if stream.is_answered and not has_begun:
            has_begun = True
            if admission.stage is Stage.DECODE:
                _check_first_event(context, events)
            begin()
            _remember_object(context, id, events)
            if continuation is not None:
                continuation.note_groups(context)
        if events:
            if not has_started:
                # The head of a resumed stream is held back until the stream reaches the client's position.
                has_started = context.exchange.started
                if not has_started:
                    head = response_headers(context, response)
                    await admission.tell(context.start(response.status, head, is_events=True))
            admission.is_telling = True  # The assignment replaces a call of `tell`, to save the cost of the call.
            await send(events)
            admission.is_telling = False
            if admission.withdrawn_for is not None:
                admission.check_withdrawn()
        if stream.failure or stream.handed_over is not None:
            return _last_event(context, admission, stream)
    if not stream.is_complete or (checked.must_end and not (checked.is_over or stream.is_over)):
        raise InvalidAnswer(id, "no_end", f"a stream that ends before it {'is over' if has_begun else 'begins'}")
    return b""


def _last_event(context: RouterContext, admission: AdmissionScope, stream: ContinuedStream | ForeignStream) -> bytes:
    """Return the last event of a stream that the endpoint no longer continues.

    Raises:
        StreamFailed: The endpoint failed, and another endpoint may resume the stream.
        HandedOver: The endpoint has handed over the request.
        TransferFailed: The endpoint did not get the KV of the prompt.
    """
    assert context.endpoint is not None
    if stream.handed_over is not None:
        raise HandedOver(context.endpoint, stream.handed_over)
    code = stream.failure_code or ""
    if admission.stage is Stage.DECODE and not stream.is_answered:
        _check_first_event(context, stream.failure)
    if not ends_on_purpose(code):
        raise StreamFailed(context.endpoint, code, stream.failure)
    context.note_error(context.status or 200, code)
    return stream.failure


def _check_first_event(context: RouterContext, events: bytes) -> None:
    """Check the first event of a response whose prompt was computed at another endpoint.

    Raises:
        TransferFailed: The event is an error.
    """
    data = next((line.removeprefix(b"data:") for line in events.splitlines() if line.startswith(b"data:")), b"")
    code = error_code(data) if b'"error"' in data else None
    if code is not None and code not in ENDED_ON_PURPOSE:
        raise TransferFailed(f'the endpoint "{context.endpoint}" began its response with an error: {code}')


def error_code(said: bytes) -> str | None:
    """Return the code of an error in OpenAI's format. None for other texts.

    Args:
        said: Body of a response, or the data of an event.
    """
    try:
        error = msgspec.json.decode(said, type=_ErrorBody).error
    except msgspec.DecodeError:
        return None
    return None if error is None else str(error.get("code"))


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any] | None = None


async def _pass_on(context: RouterContext, response: RemoteResponse, body: bytes) -> None:
    if context.exchange.started:
        # The head of a response was sent, so the client can no longer get this status.
        raise EndpointLost(f"the endpoint answered the repeated request with status {response.status}")
    if response.status >= 400:
        context.note_error(response.status, response.header(REASON_HEADER) or error_code(body))
    await context.respond(response.status, response_headers(context, response), body)


def _busy_seconds(response: RemoteResponse) -> float:
    text = response.header("retry-after") or ""
    return min(BUSY_SECONDS_MAX, float(text)) if text.isdecimal() else 1.0
