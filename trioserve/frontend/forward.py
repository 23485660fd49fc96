"""A request on its way through the router: in line, at an endpoint, at another one if that fails, and back.

Everything it holds hangs from the scope of its handler: when the client leaves, its place or lease is back and the
connection to the endpoint is closed, in that order and at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.errors import EndpointLost, Overloaded, QueueWaitOver
from trioserve.frontend.deadline_fields import deadlines_of
from trioserve.frontend.error_responses import Refusal, deadline_refusal
from trioserve.frontend.openai_types import decode_body
from trioserve.frontend.relay import Refused, busy_seconds, pass_on, relay
from trioserve.frontend.request_clock import RequestClock
from trioserve.frontend.routed_body import RoutedBody, prefix_of, rewritten
from trioserve.frontend.routed_prompt import named_blocks
from trioserve.frontend.router_call import ENDPOINT_PARAMETER
from trioserve.runtime.dispatch import Fault
from trioserve.runtime.remote_endpoint import Unreachable

if TYPE_CHECKING:
    from trioserve.frontend.router_call import RouterCall
    from trioserve.runtime.dispatch import Turn

__all__ = ["forward"]

logger = logging.getLogger(__name__)


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
    clock = RequestClock(deadlines, trio.current_time())
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


async def _pass_through(
    call: RouterCall, raw: bytes, body: RoutedBody, request: RoutedRequest, clock: RequestClock
) -> None:
    with call.fleet.dispatch.enter(request, id=call.request_id, owner=call.owner) as turn:
        call.turn = turn
        while True:
            id = await _lease(turn, clock)
            call.endpoint = id
            sent = rewritten(raw, {**_model_field(call, body, id, request.model), **clock.left()})
            try:
                with turn.attempt():
                    await relay(call, turn, id, sent, clock)
                return
            except Refused as refused:
                if not turn.failed(refused.fault, busy_seconds=busy_seconds(refused.answer)):
                    await pass_on(call, refused.answer, refused.body)
                    return
                _log_retry(call, id, str(refused))
            except EndpointLost as lost:
                fault = Fault.UNREACHABLE if isinstance(lost, Unreachable) else Fault.BROKE
                if turn.ticket.has_token or not turn.failed(fault):
                    raise
                _log_retry(call, id, str(lost))


async def _lease(turn: Turn, clock: RequestClock) -> EndpointId:
    try:
        return await turn.lease()
    except QueueWaitOver as over:
        raise deadline_refusal(clock.first()[0], str(over)) from None


def _routed(call: RouterCall, body: RoutedBody, model: str, clock: RequestClock) -> RoutedRequest:
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


def _log_retry(call: RouterCall, id: EndpointId, reason: str) -> None:
    logger.info("retried request=%s endpoint=%s reason=%s", call.request_id, id, msgspec.json.encode(reason).decode())
