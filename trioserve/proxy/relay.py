"""One attempt to serve a request at one endpoint: the request to the endpoint, and the response to the client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.api.error_responses import REASON_HEADER
from trioserve.api.streams.cursors import RESUME_HEADER
from trioserve.api.surface import LINES_TYPE
from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.contracts.errors import EndpointLost, RequestPoisoned
from trioserve.proxy.peers.processes import RESPONSES_PATH, KeptObject, object_id_in
from trioserve.proxy.proxied_request import (
    ENDED_ON_PURPOSE,
    ERROR_BYTES_MAX,
    Refused,
    check_error,
    check_status,
    error_code,
)
from trioserve.proxy.response_shape import (
    EventCheck,
    InvalidAnswer,
    check_begin,
    check_head,
    check_line,
    check_whole,
    is_error,
    is_plain_text,
)
from trioserve.proxy.router_context import owner_of
from trioserve.proxy.streams.client_events import LineSplitter
from trioserve.proxy.streams.continuation import (
    HandedOver,
    NotResumed,
    StreamFailed,
    ends_on_purpose,
    fault_of,
    reason_of,
)
from trioserve.proxy.streams.continued_stream import ContinuedStream
from trioserve.proxy.streams.foreign_stream import ForeignStream
from trioserve.router.endpoint_state import Fault
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

if TYPE_CHECKING:
    from trioserve.proxy.peers.kept_stream import EndpointRequest
    from trioserve.proxy.proxied_request import ProxiedRequest
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.router_context import RouterContext

__all__ = ["attempt", "handle_failure"]

logger = logging.getLogger(__name__)

WHOLE_BYTES_MAX = 256 * 1024  # A response up to this size is sent in one piece when it is complete.
# The statuses 400 and 422 count as doubtful (see endpoint_errors) if the endpoint gives no other answers.
DOUBTFUL_IN_A_ROW = frozenset({400, 422})


class TransferFailed(EndpointLost):
    """The endpoint began its response with an error, because it did not get the KV of the prompt."""


async def attempt(
    proxied: ProxiedRequest, id: EndpointId, body: bytes, *, on_begin: Callable[[], None] = lambda: None
) -> bool:
    """Send the request to the endpoint of its lease, and the response to the client.

    Args:
        proxied: The request. It holds a lease.
        id: Endpoint of the lease.
        body: Body for the endpoint.
        on_begin: Called at the first token.

    Returns:
        True if the client has got its response. False if the admission waits for another lease.

    Raises:
        EndpointLost: No endpoint takes over the request, or it is too late for that.
    """

    context, admission = proxied.context, proxied.admission

    def begin(*, is_last: bool = False) -> None:
        admission.first_token(is_last=is_last)
        context.span.event("first_token")
        proxied.clock.stop_first_token()
        on_begin()

    # Few function calls lie between this line and the wait for an event, because Python re-enters each of their frames
    # for every event.
    try:
        with context.asking(id, admission.stage), admission.attempt():
            request = proxied.request_to(id, body)
            try:
                response = await _checked_head(proxied, id, request)
                content_type = response.header("content-type") or ""
                if content_type.startswith("text/event-stream"):
                    last = await _relay_events(proxied, id, response, begin)
                    await admission.send(context.finish(last), is_last=True)
                elif admission.has_token:
                    raise NotResumed(f'the endpoint "{id}" did not answer with events when it had to resume a stream')
                elif content_type.startswith(LINES_TYPE):
                    await _relay_lines(proxied, id, response, begin)
                    await admission.send(context.finish(), is_last=True)
                else:
                    await _relay_whole(proxied, id, response, begin, request)
            finally:
                request.end()
        return True
    except (Refused, EndpointLost) as failure:
        return await handle_failure(proxied, id, failure)


async def handle_failure(proxied: ProxiedRequest, id: EndpointId, failure: Refused | EndpointLost) -> bool:
    """Decide how a request continues after a failed attempt.

    Args:
        proxied: The request.
        id: Endpoint that failed.
        failure: Its failure.

    Returns:
        False if the request waits for another endpoint. True if the client has received the endpoint's error.

    Raises:
        EndpointLost: No endpoint takes over the request, and there is no error of the endpoint for the client.
    """
    context, admission = proxied.context, proxied.admission
    if admission.has_token:
        return await _resume_or_end(proxied, id, failure)
    # The time at the endpoint does not count as waiting.
    proxied.clock.note_served(trio.current_time() - admission.leased_at)
    if isinstance(failure, Refused):
        is_waiting = _may_be_served_elsewhere(proxied, failure)
    else:
        fault = Fault.TRANSFER if isinstance(failure, TransferFailed) else fault_of(failure)
        is_certain = isinstance(failure, StreamFailed)
        is_waiting = admission.failed(fault, is_certain=is_certain, reason=reason_of(failure))
    if not is_waiting:
        if admission.refusal is not None:
            raise admission.refusal
        failure = proxied.refused or failure
        if isinstance(failure, Refused):
            if not failure.is_shown:
                raise EndpointLost(f'the endpoint "{id}" answered with status {failure.response.status}')
            if context.exchange.started:
                raise failure.for_client()  # The stream began early, so the error is its last event.
            await _pass_on(proxied, failure.response, failure.body)
        elif isinstance(failure, StreamFailed):
            await _end_with(context, failure)
        else:
            raise failure
        return True
    reason = msgspec.json.encode(str(failure)).decode()
    logger.info("retried request=%s endpoint=%s reason=%s", context.request_id, id, reason)
    return False


def _may_be_served_elsewhere(proxied: ProxiedRequest, refused: Refused) -> bool:
    """Record a refusal.

    Returns:
        True if the request waits for another endpoint, which may decide differently.
    """
    admission, fault, status = proxied.admission, refused.fault, refused.response.status
    if fault is None and status in DOUBTFUL_IN_A_ROW and refused.is_shown and admission.note_client_fault():
        fault = Fault.REFUSED
    if fault is Fault.REFUSED:
        if proxied.refused is not None and proxied.refused.response.status == status:
            return False  # A second endpoint has confirmed the refusal.
        proxied.refused = refused
    return fault is not None and admission.failed(
        fault, busy_seconds=refused.busy_seconds, is_certain=True, reason=f"status_{status}"
    )


async def _resume_or_end(proxied: ProxiedRequest, id: EndpointId, failure: Refused | EndpointLost) -> bool:
    """Decide how a request continues if its client has already received a token. The return value has the same meaning
    as in `handle_failure`.
    """
    fault = failure.fault or Fault.BUSY if isinstance(failure, Refused) else fault_of(failure)
    lost = failure
    if isinstance(failure, Refused):
        lost = EndpointLost(f"the endpoint answered with status {failure.response.status} instead of resuming")
    assert isinstance(lost, EndpointLost)
    admission, continuation = proxied.admission, proxied.continuation
    is_certain = isinstance(failure, Refused | StreamFailed)
    if continuation is not None and continuation.resumes(id, admission, fault, lost, is_certain=is_certain):
        return False
    if isinstance(lost, StreamFailed) and not isinstance(admission.refusal, RequestPoisoned):
        await _end_with(proxied.context, lost)
        return True
    raise admission.refusal or lost


async def _end_with(context: RouterContext, failure: StreamFailed) -> None:
    """End the stream with the error event of its endpoint."""
    context.note_error(context.status or 200, failure.code)
    await context.finish(failure.event)


async def _checked_head(proxied: ProxiedRequest, id: EndpointId, request: EndpointRequest) -> RemoteResponse:
    """Wait for the head of the response, and check it.

    Raises:
        EndpointLost: The attempt failed. Unreachable and TransferFailed are special cases.
        Refused: The endpoint answered with an error.
    """
    response = await _head_of(proxied, request)
    if response.status >= 400:
        admission = proxied.admission
        if proxied.continuation is not None and admission.has_token:
            await check_status(response, admission.stage)
            said = await response.whole(ERROR_BYTES_MAX) or b""
            if not is_error(response.header("content-type"), said):
                raise InvalidAnswer(id, f"status_{response.status}", f"status {response.status}, {said[:80]!r}")
            proxied.continuation.check_refusal(id, response, error_code(said))
        await check_error(proxied.context, id, response, admission.stage)
    content_type = response.header("content-type") or None
    check_head(id, response.status, content_type, path=proxied.context.exchange.path)
    return response


async def _relay_whole(
    proxied: ProxiedRequest,
    id: EndpointId,
    response: RemoteResponse,
    begin: Callable[..., None],
    request: EndpointRequest,
) -> None:
    """Forward a response that is not a stream. A small response is sent in one piece, a large response in several
    pieces.
    """
    context = proxied.context
    whole = await response.whole(WHOLE_BYTES_MAX)
    is_text = is_plain_text(context.exchange.path, response.header("content-type"))
    if whole is not None:
        if not is_text:
            check_whole(id, context.exchange.path, whole)
        begin(is_last=True)
        _remember_object(proxied, id, whole)
        await _pass_on(proxied, response, whole)
        return
    piece = await response.next_piece()
    if not is_text:
        check_begin(id, piece or b"")
    begin(is_last=True)
    await context.start(response.status, proxied.response_headers(response), is_events=False)
    while piece is not None:
        await context.exchange.send(piece)
        piece = await response.next_piece()
    request.end()  # End the request to the endpoint first. Otherwise a slow client would keep the connection busy.
    await context.finish()


async def _relay_lines(
    proxied: ProxiedRequest, id: EndpointId, response: RemoteResponse, begin: Callable[[], None]
) -> None:
    """Forward the lines of an endpoint that does not send events. Such a stream cannot resume at another endpoint."""
    context, admission = proxied.context, proxied.admission
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
            await admission.send(context.start(response.status, proxied.response_headers(response), is_events=True))
        await admission.send(context.exchange.send(whole))
    if not is_over:
        raise InvalidAnswer(id, "no_end", "a stream without its last line")


async def _head_of(proxied: ProxiedRequest, request: EndpointRequest) -> RemoteResponse:
    """Wait for the head of the response.

    An endpoint that resumes a response sends its head shortly before its step. The client gets comments meanwhile,
    which keep the connection alive.
    """
    context, admission = proxied.context, proxied.admission
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
                await admission.send(context.exchange.send(context.client_events.keep_alive))
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


def _remember_object(proxied: ProxiedRequest, id: EndpointId, said: bytes) -> None:
    """Remember the endpoint and the owner of a stored response."""
    context = proxied.context
    if context.exchange.path != RESPONSES_PATH:
        return
    made, continuation = object_id_in(said), proxied.continuation
    if continuation is not None:  # An endpoint that resumes a response does not repeat the id.
        made = continuation.object_id = made or continuation.object_id
    if made is not None:
        context.services.kept.remember(made, KeptObject(id, owner_of(context)))


async def _relay_events(
    proxied: ProxiedRequest, id: EndpointId, response: RemoteResponse, begin: Callable[[], None]
) -> bytes:
    """Forward the events of a stream.

    Returns:
        The last event if it is an error, which the caller must send. Otherwise empty.
    """
    context, admission, continuation = proxied.context, proxied.admission, proxied.continuation
    stream: ContinuedStream | ForeignStream
    if continuation is None:
        stream = ContinuedStream(choice_count=1, bytes_max=0)
        stream.begin(None)
    else:
        remark = continuation.begin(id, response)
        stream = continuation.stream
        if remark:
            await admission.send(context.send_events(remark))
    # The response to the client begins with the first valid event, because the body might not be an event stream at
    # all.
    if not context.exchange.started and response.header(RESUME_HEADER) is not None:
        await admission.send(context.start(response.status, proxied.response_headers(response), is_events=True))
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
                _check_first_event(id, events)
            begin()
            _remember_object(proxied, id, events)
            if continuation is not None:
                continuation.note_groups(id)
        if events:
            if not has_started:
                # The head of a resumed stream is held back until the stream reaches the client's position.
                has_started = context.exchange.started
                if not has_started:
                    head = proxied.response_headers(response)
                    await admission.send(context.start(response.status, head, is_events=True))
            admission.is_sending = True  # The assignment replaces a call of `send`, to save the cost of the call.
            await send(events)
            admission.is_sending = False
            if admission.withdrawn_for is not None:
                admission.check_withdrawn()
        if stream.failure or stream.handed_over is not None:
            return _last_event(proxied, id, stream)
    if not stream.is_complete or (checked.must_end and not (checked.is_over or stream.is_over)):
        raise InvalidAnswer(id, "no_end", f"a stream that ends before it {'is over' if has_begun else 'begins'}")
    return b""


def _last_event(proxied: ProxiedRequest, id: EndpointId, stream: ContinuedStream | ForeignStream) -> bytes:
    """Return the last event of a stream that the endpoint no longer continues.

    Raises:
        StreamFailed: The endpoint failed, and another endpoint may resume the stream.
        HandedOver: The endpoint has handed over the request.
        TransferFailed: The endpoint did not get the KV of the prompt.
    """
    if stream.handed_over is not None:
        raise HandedOver(id, stream.handed_over)
    code = stream.failure_code or ""
    if proxied.admission.stage is Stage.DECODE and not stream.is_answered:
        _check_first_event(id, stream.failure)
    if not ends_on_purpose(code):
        raise StreamFailed(id, code, stream.failure)
    proxied.context.note_error(proxied.context.status or 200, code)
    return stream.failure


def _check_first_event(id: EndpointId, events: bytes) -> None:
    """Check the first event of a response whose prompt was computed at another endpoint.

    Raises:
        TransferFailed: The event is an error.
    """
    data = next((line.removeprefix(b"data:") for line in events.splitlines() if line.startswith(b"data:")), b"")
    code = error_code(data) if b'"error"' in data else None
    if code is not None and code not in ENDED_ON_PURPOSE:
        raise TransferFailed(f'the endpoint "{id}" began its response with an error: {code}')


async def _pass_on(proxied: ProxiedRequest, response: RemoteResponse, body: bytes) -> None:
    context = proxied.context
    if context.exchange.started:
        raise EndpointLost(f"the endpoint answered with status {response.status} and no events, to a stream")
    if response.status >= 400:
        context.note_error(response.status, response.header(REASON_HEADER) or error_code(body))
    await context.respond(response.status, proxied.response_headers(response), body)
