"""A request on its way through the router: in line, at an endpoint, at another one if that fails, and back.

Everything it holds hangs from the scope of its handler: when the client leaves, its place or lease is back and the
connection to the endpoint is closed, in that order and at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.errors import EndpointLost, Overloaded, QueueWaitOver, TrioserveError
from trioserve.frontend.deadline_fields import deadlines_of
from trioserve.frontend.error_responses import Refusal, deadline_refusal
from trioserve.frontend.openai_types import decode_body
from trioserve.frontend.routed_body import RoutedBody, prefix_of, rewritten
from trioserve.frontend.routed_prompt import named_blocks
from trioserve.frontend.router_call import ENDPOINT_PARAMETER
from trioserve.runtime.dispatch import Fault
from trioserve.runtime.remote_endpoint import Unreachable

if TYPE_CHECKING:
    from trioserve.frontend.router_call import RouterCall
    from trioserve.runtime.dispatch import Turn
    from trioserve.runtime.remote_endpoint import RemoteAnswer

__all__ = ["forward"]

logger = logging.getLogger(__name__)

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


class _Refused(TrioserveError):
    """The endpoint answered with an error before it began; the client gets that, unless another one takes over."""

    def __init__(self, answer: RemoteAnswer, body: bytes, fault: Fault) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer
        self.body = body
        self.fault = fault


async def forward(call: RouterCall) -> None:
    """Send the request to an endpoint and its answer to the client."""
    try:
        await _forward(call)
    except (Overloaded, Refusal) as refusal:
        reason = refusal.reason if isinstance(refusal, Overloaded) else refusal.answer.code
        logger.info("refused request=%s reason=%s endpoint=%s", call.request_id, reason, call.endpoint or "none")
        raise


async def _forward(call: RouterCall) -> None:
    raw = await call.exchange.body()
    body = decode_body(raw, RoutedBody)
    deadlines = deadlines_of(body, call.exchange.headers).within(call.rules.deadlines, call.rules.deadlines_max)
    model = call.fleet.real_model(body.model)
    clock = _Clock(deadlines, trio.current_time())
    with clock.running():
        request = await _named(call, raw, _routed(call, body, model, clock))
        await _pass_through(call, raw, body, request, clock)


async def _named(call: RouterCall, raw: bytes, request: RoutedRequest) -> RoutedRequest:
    """The request with the names of its prompt's blocks, where the policy asks for them. That costs something, so it is
    counted while it goes on."""
    dispatch, naming = call.fleet.dispatch, call.naming
    block_sizes = dispatch.block_sizes(request.model)
    if naming is None or not block_sizes or request.pinned is not None:
        return request
    with dispatch.preparing(request):
        blocks = await named_blocks(naming, call.exchange.path, raw, block_sizes)
    return msgspec.structs.replace(request, blocks=blocks)


async def _pass_through(call: RouterCall, raw: bytes, body: RoutedBody, request: RoutedRequest, clock: _Clock) -> None:
    with call.fleet.dispatch.enter(request, id=call.request_id, owner=call.owner) as turn:
        call.turn = turn
        while True:
            id = await _lease(turn, clock)
            call.endpoint = id
            sent = rewritten(raw, {**_model_field(call, body, id, request.model), **clock.left()})
            try:
                with turn.attempt():
                    await _relay(call, turn, id, sent, clock)
                return
            except _Refused as refused:
                if not turn.failed(refused.fault, busy_seconds=_busy_seconds(refused.answer)):
                    await _pass_on(call, refused.answer, refused.body)
                    return
                _log_retry(call, id, str(refused))
            except EndpointLost as lost:
                fault = Fault.UNREACHABLE if isinstance(lost, Unreachable) else Fault.BROKE
                if turn.ticket.has_token or not turn.failed(fault):
                    raise
                _log_retry(call, id, str(lost))


async def _lease(turn: Turn, clock: _Clock) -> EndpointId:
    try:
        return await turn.lease()
    except QueueWaitOver as over:
        raise deadline_refusal(clock.first()[0], str(over)) from None


async def _relay(call: RouterCall, turn: Turn, id: EndpointId, body: bytes, clock: _Clock) -> None:
    """One attempt at one endpoint. Raises EndpointLost, Unreachable, _Refused."""
    endpoint = call.fleet.remote(id)
    async with endpoint.request(call.exchange.method, call.target, _headers_there(call), body) as answer:
        if answer.status in NOT_ENDPOINTS_FAULT or answer.status in BROKEN:
            said = await answer.whole(ERROR_BYTES_MAX)
            fault = Fault.BUSY if answer.status in NOT_ENDPOINTS_FAULT else Fault.BROKE
            raise _Refused(answer, said or b"", fault)
        if (answer.header("content-type") or "").startswith("text/event-stream"):
            await _relay_events(call, turn, answer, clock)
            return
        whole = await answer.whole(WHOLE_BYTES_MAX)
        _begin(turn, clock)
        if whole is not None:
            await _pass_on(call, answer, whole)
            return
        await call.start(answer.status, _headers_back(call, answer), is_events=False)
        while (piece := await answer.next_piece()) is not None:
            await call.exchange.send(piece)
    await call.finish()


async def _relay_events(call: RouterCall, turn: Turn, answer: RemoteAnswer, clock: _Clock) -> None:
    if not call.exchange.started:  # by an endpoint that was lost before it said anything else
        await call.start(answer.status, _headers_back(call, answer), is_events=True)
    while (piece := await answer.next_piece()) is not None:
        if not turn.ticket.has_token and not _is_comment(piece):
            _begin(turn, clock)
        await call.exchange.send(piece)
    if not turn.ticket.has_token:
        raise EndpointLost(f'the endpoint "{turn.ticket.endpoint}" ended its answer before it began')
    await call.finish()


def _begin(turn: Turn, clock: _Clock) -> None:
    turn.first_token()
    clock.stop_first_token()


def _is_comment(piece: bytes) -> bool:
    """Whether these are only lines that keep the connection alive."""
    return all(not line or line.startswith(b":") for line in piece.split(b"\n"))


async def _pass_on(call: RouterCall, answer: RemoteAnswer, body: bytes) -> None:
    if call.exchange.started:
        # The head of an answer is out already, so its status cannot be told any more.
        raise EndpointLost(f"the endpoint answered with status {answer.status} when it was asked again")
    await call.respond(answer.status, _headers_back(call, answer), body)


def _routed(call: RouterCall, body: RoutedBody, model: str, clock: _Clock) -> RoutedRequest:
    rules, headers = call.rules, call.exchange.headers
    pinned = call.query(ENDPOINT_PARAMETER)
    content = body.content
    return RoutedRequest(
        model=model,
        tenant=headers.get(rules.tenant_header) or call.owner or "",
        priority=body.priority or 0,
        sequences=max(1, body.n or 1) * body.prompt_count,
        prompt_tokens=len(content) // 4 + 1,
        session=headers.get(rules.session_header),
        pinned=None if pinned is None else EndpointId(pinned),
        prefix=prefix_of(content, model, body.cache_salt) if call.fleet.dispatch.wants_prefix else (),
        queue_deadline=clock.first()[1],
    )


def _model_field(call: RouterCall, body: RoutedBody, id: EndpointId, model: str) -> dict[str, object]:
    there = call.fleet.model_at(id, model)
    return {} if body.model == there else {"model": there}


def _headers_there(call: RouterCall) -> list[tuple[str, str]]:
    headers = [(name, value) for name, value in call.exchange.headers.items() if name not in NOT_FORWARDED]
    headers.append(("x-request-id", call.request_id))
    authorization = call.exchange.headers.get("authorization")
    if call.rules.passes_authorization and authorization is not None:
        headers.append(("authorization", authorization))
    return headers


def _headers_back(call: RouterCall, answer: RemoteAnswer) -> list[tuple[str, str]]:
    headers = [(name, value) for name, value in answer.headers if name not in NOT_RETURNED]
    return [*headers, ("x-request-id", call.request_id), (ENDPOINT_HEADER, str(call.endpoint))]


def _busy_seconds(answer: RemoteAnswer) -> float:
    text = answer.header("retry-after") or ""
    return min(BUSY_SECONDS_MAX, float(text)) if text.isdecimal() else 1.0


def _log_retry(call: RouterCall, id: EndpointId, reason: str) -> None:
    logger.info("retried request=%s endpoint=%s reason=%s", call.request_id, id, msgspec.json.encode(reason).decode())


class _Clock:
    """The deadlines of one request, from its arrival at the router on."""

    def __init__(self, deadlines: Deadlines, now: float) -> None:
        self._deadlines = deadlines
        self._moments: dict[Deadline, float] = {}
        if deadlines is not NO_DEADLINES:
            for deadline in Deadline:
                seconds = deadlines.seconds(deadline)
                if seconds is not None:
                    self._moments[deadline] = now + seconds
        self._scope = trio.CancelScope()
        self._first_token_is_due = deadlines.ttft_timeout is not None

    def at(self, deadline: Deadline) -> float:
        return self._moments.get(deadline, math.inf)

    def first(self) -> tuple[Deadline, float]:
        """Which of them passes first for one that waits in line, and when."""
        return min(self._moments.items(), key=lambda entry: entry[1], default=(Deadline.QUEUE, math.inf))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Raises Refusal when the time to the first token or to the end has passed."""
        if not self._moments:  # as most requests have it: a scope would be for nothing
            yield
            return
        self._scope.deadline = min(self.at(Deadline.FIRST_TOKEN), self.at(Deadline.TOTAL))
        with self._scope:
            yield
        if self._scope.cancelled_caught:
            passed = Deadline.TOTAL
            if self._first_token_is_due and self.at(Deadline.FIRST_TOKEN) <= self.at(Deadline.TOTAL):
                passed = Deadline.FIRST_TOKEN
            seconds = self._deadlines.seconds(passed)
            raise deadline_refusal(passed, f"the request's {passed.value} of {seconds:g} s has passed")

    def stop_first_token(self) -> None:
        if self._first_token_is_due:
            self._first_token_is_due = False
            self._scope.deadline = self.at(Deadline.TOTAL)

    def left(self) -> dict[str, object]:
        """The body's deadline fields for an endpoint: what is left of them now."""
        if not self._moments:
            return {}
        now = trio.current_time()
        return {deadline.value: max(0.001, moment - now) for deadline, moment in self._moments.items()}
