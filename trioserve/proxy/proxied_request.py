"""Path of a request through the router: the queue, an endpoint, another endpoint after a failure, and the response to
the client.

All resources belong to the scope of the handler. When the client leaves, the handler first releases the queue position
or lease, and then closes the connection to the endpoint. Neither step waits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.api.caller import check_model
from trioserve.api.error_responses import Refusal, deadline_refusal
from trioserve.api.openai.request_types import deadlines_of, decode_body
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines, passed_message
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.errors import Overloaded
from trioserve.contracts.tracing import Span
from trioserve.proxy.client_events import ClientLines, wants_lines
from trioserve.proxy.continuation import Continuation
from trioserve.proxy.disaggregated_request import can_be_disaggregated, serve_disaggregated
from trioserve.proxy.forwarded_headers import request_headers
from trioserve.proxy.kept_objects import RESPONSES_PATH, check_references, endpoint_of_response
from trioserve.proxy.prompt_blocks import named_blocks
from trioserve.proxy.relay import attempt, lease, model_field, sent_body
from trioserve.proxy.routed_body import (
    EDITS_PATH,
    RoutedBody,
    ollama_body,
    prefix_of,
    read_form,
    without_transfer_params,
)
from trioserve.proxy.router_context import ENDPOINT_PARAMETER

if TYPE_CHECKING:
    from trioserve.admission.dispatch import AdmissionScope
    from trioserve.proxy.router_context import RouterContext

__all__ = ["RequestClock", "forward"]

IMAGE_PATHS = frozenset({"/v1/images/generations", EDITS_PATH})
HAS_NO_BLOCKS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/api/show",
        *IMAGE_PATHS,
    }
)
"""Forwarded paths whose requests have no KV blocks, and therefore no salt."""

PARTIAL_SECONDS_MAX = 1.0  # After the deadline, an endpoint has this time to return a partial result.

logger = logging.getLogger(__name__)


async def forward(context: RouterContext) -> None:
    """Send the request to an endpoint and its response to the client.

    Few function calls lie between this coroutine and the wait for an event, because Python re-enters each of their
    frames for every event.

    Args:
        context: Request of the router's API.
    """
    with _refusals_logged(context):
        asked = await _asked(context)
        with asked.clock.running():
            if not await _is_left_to_send(context, asked):
                await context.respond(204, [("x-request-id", context.request_id)], b"")
                return
            try:
                request = await _with_block_names(context, asked.raw, _routed(context, asked))
                context.span.note({"gen_ai.request.model": request.model})
                with (
                    _Freed(context.span),
                    context.services.fleet.dispatch.enter(
                        request, id=context.request_id, owner=context.owner
                    ) as admission,
                    _Cancelled(context.span),
                    context.continued(Continuation.of(context, asked.body, request)) as continuation,
                ):
                    _prepare(context, admission, asked.body, continuation)
                    if admission.stage is not None:
                        await serve_disaggregated(context, admission, asked.raw, asked.body, asked.clock)
                        return
                    while True:
                        id = context.endpoint = await lease(context, admission, asked.clock)
                        model = model_field(context, asked.body.model, id, request.model)
                        sent = sent_body(context, asked.raw, asked.clock, model)
                        if await attempt(context, admission, id, sent, asked.clock):
                            return
            finally:
                context.stream.close()


@contextmanager
def _refusals_logged(context: RouterContext) -> Iterator[None]:
    try:
        yield
    except (Overloaded, Refusal) as refusal:
        reason = refusal.reason if isinstance(refusal, Overloaded) else refusal.response.code
        is_late = isinstance(refusal, Refusal) and refusal.response.status == 504
        logger.info(
            "%s request=%s reason=%s endpoint=%s",
            "deadline passed" if is_late else "refused",
            context.request_id,
            reason,
            context.endpoint or "none",
        )
        raise


class _Asked(msgspec.Struct, frozen=True):
    """A request that was read and checked.

    Attributes:
        said: Bytes of the body as the client sent it.
        raw: Bytes of the body, adapted to the caller.
        body: Fields of `raw`.
        model: Model name that endpoints use.
        clock: Deadlines of the request.
        before: Endpoint that stores the response which this request continues. None: the request does not continue a
            response.
    """

    said: bytes
    raw: bytes
    body: RoutedBody
    model: str
    clock: RequestClock
    before: EndpointId | None


async def _asked(context: RouterContext) -> _Asked:
    """Read and check the request.

    Raises:
        InvalidRequest: The request is invalid, or the caller may not use one of its values.
        Refusal: The response that the request continues does not exist (404).
    """
    said = await context.exchange.body()
    path, served = context.exchange.path, context.services.fleet.models()
    if path == EDITS_PATH:
        context.form = await read_form(context, said)
    read = decode_body(said, RoutedBody) if context.form is None else context.form.body
    raw, body = _for_caller(context, said, ollama_body(path, said, read, served))
    if not body.stream:
        context.exchange.fill_silence()
    before: EndpointId | None = None
    if path.startswith(RESPONSES_PATH):
        check_references(context, raw)
        if body.previous_response_id is not None:
            before = await endpoint_of_response(context, body.previous_response_id)
    limits = context.services.rules.deadlines_max
    deadlines = deadlines_of(body, context.exchange.headers).within(context.services.rules.deadlines, limits)
    check_model(context.services.access, body.model, served)
    model = context.services.fleet.real_model(body.model)
    grace = PARTIAL_SECONDS_MAX if body.return_partial else 0.0
    clock = RequestClock(deadlines, trio.current_time(), grace_seconds=grace, limits=limits)
    return _Asked(said, raw, body, model, clock, before)


async def _is_left_to_send(context: RouterContext, asked: _Asked) -> bool:
    """Decide which events the client gets. Return False if the client has the whole response."""
    body, path = asked.body, context.exchange.path
    if body.stream and wants_lines(path, context.exchange.headers):
        context.client_events = ClientLines()  # A client that reads lines cannot report its position in a stream.
    elif body.stream and path not in IMAGE_PATHS:  # Image events have no ids, so a client could not resume from them.
        choice_count = max(1, body.n or 1) * body.prompt_count
        stream = await context.services.peers.stream_of(context, asked.said, asked.model, choice_count=choice_count)
        if stream is None:
            return False
        context.stream = stream
    return True


def _prepare(
    context: RouterContext, admission: AdmissionScope, body: RoutedBody, continuation: Continuation | None
) -> None:
    context.admission = admission
    admission.gives_partial = bool(body.return_partial)
    admission.headers = partial(request_headers, context, None, with_body=False)
    if continuation is not None:
        admission.can_resume = continuation.can_resume
        admission.note_reasoning_ended = continuation.note_reasoning_ended


def _for_caller(context: RouterContext, raw: bytes, body: RoutedBody) -> tuple[bytes, RoutedBody]:
    """Adapt the body to its caller, and return it with its fields.

    The body gets the caller's cache salt. All callers of a router are one caller for an endpoint, so the salt separates
    their blocks.

    Raises:
        InvalidRequest: The caller may not use a value of the body.
    """
    context.caller.check_priority(body.priority)
    salt = body.cache_salt
    if context.exchange.path not in HAS_NO_BLOCKS:
        salt = context.caller.cache_salt(salt, context.named_tenant)
    fields: dict[str, object] = {} if salt == body.cache_salt else {"cache_salt": salt}
    return without_transfer_params(raw, body, fields), msgspec.structs.replace(body, cache_salt=salt)


async def _with_block_names(context: RouterContext, raw: bytes, request: RoutedRequest) -> RoutedRequest:
    """Add the names of the prompt's blocks to the request, if the routing policy needs them.

    Naming costs time. Meanwhile, the request counts as being prepared.
    """
    dispatch, naming = context.services.fleet.dispatch, context.services.naming
    block_sizes = dispatch.block_sizes(request)
    if naming is None or not block_sizes or request.pinned is not None:
        return request
    is_adapter, digest = context.services.fleet.adapter_digest(request.model)
    if is_adapter and digest is None:  # The digest is part of the block names, and it is unknown.
        return request
    with dispatch.preparing(request):
        blocks = await named_blocks(naming, context.exchange.path, raw, block_sizes, digest, tenant=request.tenant)
    return msgspec.structs.replace(request, blocks=blocks)


class _Cancelled:
    """Records in a trace that the scope inside was cancelled."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, trio.Cancelled):
            self._span.event("cancel")


class _Freed:
    """Records in a trace that all resources of the request were released."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self._span.event("free")


def _routed(context: RouterContext, asked: _Asked) -> RoutedRequest:
    """Make the request of the router core.

    Args:
        context: Request of the router's API.
        asked: Request that was read.
    """
    raw, body, model = asked.raw, asked.body, asked.model
    rules, headers = context.services.rules, context.exchange.headers
    named = context.query(ENDPOINT_PARAMETER)
    pinned = asked.before if named is None else EndpointId(named)
    content = body.content
    prompt_tokens = len(content) // 4 + 1
    # First check whether two endpoints exist for the request, because parsing the rest of the body costs time.
    is_disaggregated = (
        prompt_tokens >= rules.disaggregated_prompt_tokens_min and context.services.fleet.dispatch.is_pair_there(model)
    )
    return RoutedRequest(
        model=model,
        tenant=context.caller.tenant(context.named_tenant),
        priority=body.priority or 0,
        sequences=max(1, body.n or 1) * body.prompt_count,
        prompt_tokens=prompt_tokens + body.known_token_count,
        session=headers.get(rules.session_header),
        pinned=pinned,
        prefix=prefix_of(content, model, body.cache_salt) if context.services.fleet.dispatch.wants_prefix else (),
        queue_deadline=asked.clock.first()[1],
        can_be_disaggregated=(
            is_disaggregated
            and context.stream.running_at is None
            and can_be_disaggregated(context.exchange.path, raw, body)
        ),
        running_at=context.stream.running_at,
    )


class RequestClock:
    """Deadlines of one request, counted from its arrival at the router.

    Args:
        deadlines: Time limits of the request.
        now: Arrival of the request, in seconds of Trio's clock.
        grace_seconds: Extra time before the router ends a running request. The endpoint has the same deadlines and can
            report the end in this time.
        limits: Server limits that have shortened the deadlines, for the error message.
    """

    def __init__(
        self, deadlines: Deadlines, now: float, *, grace_seconds: float = 0.0, limits: Deadlines = NO_DEADLINES
    ) -> None:
        self._limits = limits
        self._grace_seconds = grace_seconds
        self._deadlines = deadlines
        self._moments: dict[Deadline, float] = {}
        if deadlines is not NO_DEADLINES:
            for deadline in Deadline:
                seconds = deadlines.seconds(deadline)
                if seconds is not None:
                    self._moments[deadline] = now + seconds
        self._scope = trio.CancelScope()
        self._first_token_is_due = deadlines.ttft_timeout is not None
        self._has_token = False

    def at(self, deadline: Deadline) -> float:
        return self._moments.get(deadline, math.inf)

    def first(self) -> tuple[Deadline, float]:
        """Return the deadline that passes first for a queued request, and its time."""
        return min(self._moments.items(), key=lambda entry: entry[1], default=(Deadline.QUEUE, math.inf))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Apply the deadlines to the block.

        Raises:
            Refusal: The deadline for the first token or for the whole request has passed.
        """
        if not self._moments:  # Most requests have no deadlines and need no cancel scope.
            yield
            return
        self._scope.deadline = min(self.at(Deadline.FIRST_TOKEN), self.at(Deadline.TOTAL)) + self._grace_seconds
        with self._scope:
            yield
        if self._scope.cancelled_caught:
            passed = Deadline.TOTAL
            if self._first_token_is_due and self.at(Deadline.FIRST_TOKEN) <= self.at(Deadline.TOTAL):
                passed = Deadline.FIRST_TOKEN
            seconds = self._deadlines.seconds(passed)
            raise deadline_refusal(passed, passed_message(passed, seconds or 0.0, self._limits))

    def stop_first_token(self) -> None:
        self._has_token = True
        if self._first_token_is_due:
            self._first_token_is_due = False
            self._scope.deadline = self.at(Deadline.TOTAL) + self._grace_seconds

    def note_served(self, seconds: float) -> None:
        """Extend the queue deadline of a request that is queued again, by the time that an endpoint served it.

        Args:
            seconds: Time at the endpoint.
        """
        if Deadline.QUEUE in self._moments:
            self._moments[Deadline.QUEUE] += seconds

    def left(self) -> dict[str, object]:
        """Return the remaining times as deadline fields of a request body."""
        if not self._moments:
            return {}
        now = trio.current_time()
        return {
            deadline.value: max(0.001, moment - now)
            for deadline, moment in self._moments.items()
            if deadline is Deadline.TOTAL or not self._has_token
        }

    @property
    def passed(self) -> tuple[str, ...]:
        """Names of the deadline fields that no longer apply, because the first token has arrived."""
        return (Deadline.QUEUE.value, Deadline.FIRST_TOKEN.value) if self._has_token else ()
