"""One attempt of a request at one endpoint: what is sent there, and its response on the way to the client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.admission.dispatch import Fault
from trioserve.admission.text_threads import TEXT_QUEUE_FULL
from trioserve.api.error_responses import REASON_HEADER, deadline_refusal
from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.contracts.errors import EndpointLost, QueueWaitOver, TrioserveError
from trioserve.proxy.event_splitter import EventSplitter, is_comment
from trioserve.proxy.forwarded_headers import owner_of, request_headers, response_headers
from trioserve.proxy.kept_objects import KeptObject, object_id_in
from trioserve.proxy.remote_endpoint import Unreachable
from trioserve.proxy.routed_body import TRANSFER_PARAMS

if TYPE_CHECKING:
    from trioserve.admission.dispatch import AdmissionScope
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.request_clock import RequestClock
    from trioserve.proxy.router_context import RouterContext

__all__ = [
    "RESPONSES_PATH",
    "attempt",
    "check_status",
    "error_code",
    "handle_failure",
    "lease",
    "model_field",
]

logger = logging.getLogger(__name__)

WHOLE_BYTES_MAX = 256 * 1024  # answers up to here go out in one piece, once they are complete
ERROR_BYTES_MAX = 64 * 1024
NOT_ENDPOINTS_FAULT = frozenset({429, 503, 529})  # the last one is how 503 is said in Anthropic's API
BROKEN = frozenset({500, 502, 504})
CLIENTS_FAULT = frozenset({400, 413, 422})
BUSY_SECONDS_MAX = 5.0
# Of errors in a stream: somebody has ended the request, and nobody else is to go on with it.
ENDED_ON_PURPOSE = frozenset({"request_aborted", "queue_timeout", "ttft_timeout", "timeout", "deadline_exceeded"})

RESPONSES_PATH = "/v1/responses"


class Refused(TrioserveError):
    """The endpoint answered with an error before it began; the client gets that, unless another one takes over. fault:
    whose it was; None: nobody's there, so that nobody else is to try."""

    def __init__(self, response: RemoteResponse, body: bytes, fault: Fault | None) -> None:
        super().__init__(f"status {response.status}")
        self.response = response
        self.body = body
        self.fault = fault


class TransferFailed(EndpointLost):
    """The endpoint began its response with an error: it did not get the KV of the prompt."""


async def attempt(
    context: RouterContext,
    admission: AdmissionScope,
    id: EndpointId,
    body: bytes,
    clock: RequestClock,
    *,
    on_begin: Callable[[], None] = lambda: None,
) -> bool:
    """Send the request to the endpoint of its lease, and the response to the client. Whether the client has one; if
    not, the admission waits for another lease. on_begin: called at the first token.

    Raises EndpointLost when nobody takes the request over, or it is too late for that.
    """
    try:
        with admission.attempt():
            await _relay(context, admission, id, body, clock, on_begin)
        return True
    except (Refused, EndpointLost) as failure:
        return await handle_failure(context, admission, id, failure)


async def handle_failure(
    context: RouterContext, admission: AdmissionScope, id: EndpointId, failure: Refused | EndpointLost
) -> bool:
    """An attempt has failed. False: it goes on elsewhere; True: the client has got what the endpoint said. Raises the
    failure if there is nothing to tell."""
    if isinstance(failure, Refused):
        if failure.fault is None or not admission.failed(failure.fault, busy_seconds=_busy_seconds(failure.response)):
            await _pass_on(context, failure.response, failure.body)
            return True
    else:
        fault = Fault.UNREACHABLE if isinstance(failure, Unreachable) else Fault.BROKE
        if isinstance(failure, TransferFailed):
            fault = Fault.TRANSFER
        if admission.has_token or not admission.failed(fault):
            raise failure
    reason = msgspec.json.encode(str(failure)).decode()
    logger.info("retried request=%s endpoint=%s reason=%s", context.request_id, id, reason)
    return False


async def lease(admission: AdmissionScope, clock: RequestClock) -> EndpointId:
    """Where the request is to go now. Raises what refuses it."""
    try:
        return await admission.lease()
    except QueueWaitOver as over:
        raise deadline_refusal(clock.first()[0], str(over)) from None


async def check_status(response: RemoteResponse, stage: Stage | None) -> None:
    """Raises Refused for an error that is not to be passed on as it comes."""
    status = response.status
    if status not in NOT_ENDPOINTS_FAULT and status not in BROKEN and (status < 400 or stage is not Stage.DECODE):
        return
    said = await response.whole(ERROR_BYTES_MAX) or b""
    code = response.header(REASON_HEADER) or error_code(said)  # other APIs have no code in their errors
    fault: Fault | None = Fault.BUSY if status in NOT_ENDPOINTS_FAULT else Fault.BROKE
    if code in ENDED_ON_PURPOSE or response.header(REASON_HEADER) == TEXT_QUEUE_FULL:
        fault = None  # the second says nothing of how much the engine has to do
    elif status < 500 and status not in NOT_ENDPOINTS_FAULT:
        # Its prompt was computed with less asked for, so it may be the client's fault after all.
        is_clients = status in CLIENTS_FAULT and TRANSFER_PARAMS.encode() not in said
        fault = None if is_clients else Fault.TRANSFER
    elif stage is Stage.DECODE and code == "request_failed":
        fault = Fault.TRANSFER
    raise Refused(response, said, fault)


def model_field(context: RouterContext, asked: str | None, id: EndpointId, model: str) -> dict[str, object]:
    """The body's model as the endpoint calls it, if the client calls it otherwise."""
    there = context.fleet.model_at(id, model)
    return {} if asked == there else {"model": there}


async def _relay(
    context: RouterContext,
    admission: AdmissionScope,
    id: EndpointId,
    body: bytes,
    clock: RequestClock,
    on_begin: Callable[[], None],
) -> None:
    """Raises EndpointLost, Unreachable, TransferFailed, Refused."""

    def begin(*, is_last: bool = False) -> None:
        admission.first_token(is_last=is_last)
        clock.stop_first_token()
        on_begin()

    endpoint = context.fleet.remote(id)
    async with endpoint.request(
        context.exchange.method, context.target, request_headers(context, admission.stage), body
    ) as response:
        if response.status >= 400:
            await check_status(response, admission.stage)
        if (response.header("content-type") or "").startswith("text/event-stream"):
            await _relay_events(context, admission, id, response, begin)
            return
        whole = await response.whole(WHOLE_BYTES_MAX)
        begin(is_last=True)
        if whole is not None and response.status < 300:
            _learn(context, id, whole)
        if whole is not None:
            await _pass_on(context, response, whole)
            return
        await context.start(response.status, response_headers(context, response), is_events=False)
        while (piece := await response.next_piece()) is not None:
            await context.exchange.send(piece)
    await context.finish()


def _learn(context: RouterContext, id: EndpointId, said: bytes) -> None:
    """Of a response that the endpoint may keep: that it is there, and whose it is."""
    if context.exchange.path == RESPONSES_PATH and (made := object_id_in(said)) is not None:
        context.kept.remember(made, KeptObject(id, owner_of(context)))


async def _relay_events(
    context: RouterContext,
    admission: AdmissionScope,
    id: EndpointId,
    response: RemoteResponse,
    begin: Callable[[], None],
) -> None:
    if not context.exchange.started:  # by an endpoint that was lost before it said anything else
        await context.start(response.status, response_headers(context, response), is_events=True)
    splitter = EventSplitter()
    is_over = False
    while not is_over:
        piece = await response.next_piece()
        is_over = piece is None
        events = splitter.rest if piece is None else splitter.feed(piece)
        if not admission.has_token and not is_comment(events):
            if admission.stage is Stage.DECODE:
                _check_first_event(context, events)
            begin()
            _learn(context, id, events)
        if events:
            await context.exchange.send(events)
    if not admission.has_token:
        raise EndpointLost(f'the endpoint "{admission.endpoint}" ended its response before it began')
    await context.finish()


def _check_first_event(context: RouterContext, events: bytes) -> None:
    """Of a response whose prompt was computed elsewhere. Raises TransferFailed when it is an error."""
    data = next((line.removeprefix(b"data:") for line in events.splitlines() if line.startswith(b"data:")), b"")
    code = error_code(data) if b'"error"' in data else None
    if code is not None and code not in ENDED_ON_PURPOSE:
        raise TransferFailed(f'the endpoint "{context.endpoint}" began with an error: {code}')


def error_code(said: bytes) -> str | None:
    """None: it is no error in OpenAI's shape."""
    try:
        error = msgspec.json.decode(said, type=_ErrorBody).error
    except msgspec.DecodeError:
        return None
    return None if error is None else str(error.get("code"))


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any] | None = None


async def _pass_on(context: RouterContext, response: RemoteResponse, body: bytes) -> None:
    if context.exchange.started:
        # The head of a response is out already, so its status cannot be told any more.
        raise EndpointLost(f"the endpoint answered with status {response.status} when it was asked again")
    await context.respond(response.status, response_headers(context, response), body)


def _busy_seconds(response: RemoteResponse) -> float:
    text = response.header("retry-after") or ""
    return min(BUSY_SECONDS_MAX, float(text)) if text.isdecimal() else 1.0
