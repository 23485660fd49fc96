"""One attempt of a request at one endpoint: what is sent there, and its answer on the way to the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, TrioserveError
from trioserve.runtime.dispatch import Fault

if TYPE_CHECKING:
    from trioserve.frontend.request_clock import RequestClock
    from trioserve.frontend.router_call import RouterCall
    from trioserve.runtime.dispatch import Turn
    from trioserve.runtime.remote_endpoint import RemoteAnswer

__all__ = ["Refused", "busy_seconds", "headers_there", "pass_on", "relay"]

WHOLE_BYTES_MAX = 256 * 1024  # answers up to here go out in one piece, once they are complete
ERROR_BYTES_MAX = 64 * 1024
NOT_ENDPOINTS_FAULT = frozenset({429, 503})
BROKEN = frozenset({500, 502, 504})
BUSY_SECONDS_MAX = 5.0

ENDPOINT_HEADER = "x-trioserve-endpoint"
# What is between two neighbours (RFC 9110, 7.6.1), and what the router says itself.
NOT_FORWARDED = frozenset(
    [
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
        "x-queue-timeout",
        "x-ttft-timeout",
        "x-request-timeout",
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
    ]
)


class Refused(TrioserveError):
    """The endpoint answered with an error before it began; the client gets that, unless another one takes over."""

    def __init__(self, answer: RemoteAnswer, body: bytes, fault: Fault) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer
        self.body = body
        self.fault = fault


async def relay(call: RouterCall, turn: Turn, id: EndpointId, body: bytes, clock: RequestClock) -> None:
    """One attempt at one endpoint. Raises EndpointLost, Unreachable, Refused."""
    endpoint = call.fleet.remote(id)
    async with endpoint.request(call.exchange.method, call.target, headers_there(call), body) as answer:
        if answer.status in NOT_ENDPOINTS_FAULT or answer.status in BROKEN:
            said = await answer.whole(ERROR_BYTES_MAX)
            fault = Fault.BUSY if answer.status in NOT_ENDPOINTS_FAULT else Fault.BROKE
            raise Refused(answer, said or b"", fault)
        if (answer.header("content-type") or "").startswith("text/event-stream"):
            await _relay_events(call, turn, answer, clock)
            return
        whole = await answer.whole(WHOLE_BYTES_MAX)
        _begin(turn, clock)
        if whole is not None:
            await pass_on(call, answer, whole)
            return
        await call.start(answer.status, _headers_back(call, answer), is_events=False)
        while (piece := await answer.next_piece()) is not None:
            await call.exchange.send(piece)
    await call.finish()


async def _relay_events(call: RouterCall, turn: Turn, answer: RemoteAnswer, clock: RequestClock) -> None:
    if not call.exchange.started:  # by an endpoint that was lost before it said anything else
        await call.start(answer.status, _headers_back(call, answer), is_events=True)
    while (piece := await answer.next_piece()) is not None:
        if not turn.ticket.has_token and not _is_comment(piece):
            _begin(turn, clock)
        await call.exchange.send(piece)
    if not turn.ticket.has_token:
        raise EndpointLost(f'the endpoint "{turn.ticket.endpoint}" ended its answer before it began')
    await call.finish()


def _begin(turn: Turn, clock: RequestClock) -> None:
    turn.first_token()
    clock.stop_first_token()


def _is_comment(piece: bytes) -> bool:
    """Whether these are only lines that keep the connection alive."""
    return all(not line or line.startswith(b":") for line in piece.split(b"\n"))


async def pass_on(call: RouterCall, answer: RemoteAnswer, body: bytes) -> None:
    if call.exchange.started:
        # The head of an answer is out already, so its status cannot be told any more.
        raise EndpointLost(f"the endpoint answered with status {answer.status} when it was asked again")
    await call.respond(answer.status, _headers_back(call, answer), body)


def headers_there(call: RouterCall) -> list[tuple[str, str]]:
    headers = [(name, value) for name, value in call.exchange.headers.items() if name not in NOT_FORWARDED]
    headers.append(("x-request-id", call.request_id))
    authorization = call.exchange.headers.get("authorization")
    if call.rules.passes_authorization and authorization is not None:
        headers.append(("authorization", authorization))
    return headers


def _headers_back(call: RouterCall, answer: RemoteAnswer) -> list[tuple[str, str]]:
    headers = [(name, value) for name, value in answer.headers if name not in NOT_RETURNED]
    return [*headers, ("x-request-id", call.request_id), (ENDPOINT_HEADER, str(call.endpoint))]


def busy_seconds(answer: RemoteAnswer) -> float:
    text = answer.header("retry-after") or ""
    return min(BUSY_SECONDS_MAX, float(text)) if text.isdecimal() else 1.0
