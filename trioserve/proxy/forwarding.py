"""Handler of requests that an endpoint computes: the queue, an endpoint, another endpoint after a failure, and the
response to the client.

All resources belong to the scope of the handler. When the client leaves, the handler first releases the queue position
or lease, and then closes the connection to the endpoint. Neither step waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.api.caller import check_model
from trioserve.api.error_responses import Refusal
from trioserve.api.form import INLINE_BYTES_MAX
from trioserve.api.openai.request_types import deadlines_of, decode_body
from trioserve.api.streams.cursors import RESUMABLE_HEADER
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.errors import Overloaded
from trioserve.contracts.tracing import Span
from trioserve.proxy.disaggregated_request import can_be_disaggregated, serve_disaggregated
from trioserve.proxy.model_routes import set_keep_alive
from trioserve.proxy.peers.kept_stream import Stream, StreamCall
from trioserve.proxy.peers.processes import RESPONSES_PATH
from trioserve.proxy.proxied_request import CheckedRequest, ProxiedRequest, RequestClock
from trioserve.proxy.relay import attempt
from trioserve.proxy.routed_body import (
    EDITS_PATH,
    FORM_PATHS,
    RoutedBody,
    RoutedForm,
    named_blocks,
    ollama_body,
    prefix_of,
    without_transfer_params,
)
from trioserve.proxy.router_context import ENDPOINT_PARAMETER, owner_of, request_headers
from trioserve.proxy.streams.client_events import ClientLines, wants_lines
from trioserve.proxy.streams.continuation import CONTINUED_PATHS, Continuation
from trioserve.proxy.unqueued_requests import check_references, endpoint_of_response

if TYPE_CHECKING:
    from trioserve.proxy.router_context import RouterContext

__all__ = ["forward"]

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
        if context.services.models is not None and await set_keep_alive(context, asked.model, asked.body):
            return
        with asked.clock.running():
            stream = await _stream_of(context, asked)
            if stream is None:
                await context.respond(204, [("x-request-id", context.request_id)], b"")
                return
            try:
                request = await _with_block_names(context, asked.raw, _routed(context, asked, stream))
                context.span.note({"gen_ai.request.model": request.model})
                with (
                    _Freed(context.span),
                    context.services.fleet.dispatch.enter(
                        request, id=context.request_id, owner=context.owner
                    ) as admission,
                    _Cancelled(context.span),
                    context.services.streams.kept(_continuation(context, asked.body, request)) as continuation,
                ):
                    proxied = ProxiedRequest(context, admission, asked, stream=stream, continuation=continuation)
                    if admission.stage is not None:
                        await serve_disaggregated(proxied)
                        return
                    while True:
                        id = await proxied.lease()
                        if await attempt(proxied, id, proxied.body_for(id)):
                            return
            finally:
                stream.close()


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


async def _asked(context: RouterContext) -> CheckedRequest:
    """Read and check the request.

    Raises:
        InvalidRequest: The request is invalid, or the caller may not use one of its values.
        Refusal: The response that the request continues does not exist (404).
    """
    said = await context.exchange.body()
    path, served = context.exchange.path, context.services.fleet.models()
    form = await _read_form(context, said) if path in FORM_PATHS else None
    read = decode_body(said, RoutedBody) if form is None else form.body
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
    return CheckedRequest(said, raw, body, form, model, clock, before)


async def _read_form(context: RouterContext, raw: bytes) -> RoutedForm:
    """Parse a form. A large form is parsed in a thread, in turn with forms of other tenants."""
    content_type = context.exchange.headers.get("content-type")
    if len(raw) <= INLINE_BYTES_MAX:
        return RoutedForm.read(raw, content_type)
    tenant = context.caller.tenant(context.named_tenant)
    return await context.services.forms.call(partial(RoutedForm.read, raw, content_type), key=tenant)


async def _stream_of(context: RouterContext, asked: CheckedRequest) -> Stream | None:
    """Find or make the stream of the response, and set which events the client gets.

    Returns:
        The stream, or None if the client has the whole response.
    """
    body, path = asked.body, context.exchange.path
    if body.stream and wants_lines(path, context.exchange.headers):
        context.client_events = ClientLines()  # A client that reads lines cannot report its position in a stream.
        return Stream()
    if not body.stream or path in IMAGE_PATHS:  # Image events have no ids, so a client could not resume from them.
        return Stream()
    stream = await context.services.peers.stream_of(
        StreamCall(
            owner=owner_of(context),
            tenant=context.named_tenant,
            request_id=context.request_id,
            path=path,
            headers=context.exchange.headers,
            body=asked.said,
            model=asked.model,
            choice_count=max(1, body.n or 1) * body.prompt_count,
            endpoint_headers=partial(request_headers, context, None, with_body=False),
        )
    )
    if stream is not None:
        context.client_events = stream.client_events
    return stream


def _continuation(context: RouterContext, body: RoutedBody, request: RoutedRequest) -> Continuation | None:
    """Make the state to resume the response, or return None if the response is not a stream or is pinned to an
    endpoint.
    """
    services, path = context.services, context.exchange.path
    bytes_max = services.rules.continuation_bytes_max
    if not body.stream or not bytes_max or request.pinned is not None or path not in CONTINUED_PATHS:
        return None
    shows_ids = context.exchange.headers.get(RESUMABLE_HEADER) == "1" or context.client_events.shows_ids
    return Continuation(
        services.fleet,
        services.metrics,
        request_id=context.request_id,
        path=path,
        known=bytes(body.resume) or None,
        choice_count=request.sequences,
        shows_ids=shows_ids,
        bytes_max=bytes_max,
    )


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
    priority = body.priority
    if context.priority_least > (priority or 0):
        priority = fields["priority"] = context.priority_least
    body = msgspec.structs.replace(body, cache_salt=salt, priority=priority)
    return without_transfer_params(raw, body, fields), body


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


def _routed(context: RouterContext, asked: CheckedRequest, stream: Stream) -> RoutedRequest:
    """Make the request of the router core."""
    raw, body, model = asked.raw, asked.body, asked.model
    rules, headers = context.services.rules, context.exchange.headers
    named = context.query(ENDPOINT_PARAMETER)
    pinned = asked.before if named is None else EndpointId(named)
    content = body.content
    prompt_tokens = len(content) // 4 + 1
    # First check whether two endpoints exist for the request, because parsing the rest of the body costs time.
    is_disaggregated = (
        prompt_tokens >= rules.disaggregated_prompt_tokens_min and context.services.fleet.dispatch.has_pair(model)
    )
    return RoutedRequest(
        model=model,
        tenant=context.caller.tenant(context.named_tenant),
        priority=body.priority or 0,
        sequences=max(1, body.n or 1) * body.prompt_count,
        prompt_tokens=prompt_tokens + body.known_token_count,
        session=headers.get(rules.session_header) or body.prompt_cache_key,
        pinned=pinned,
        preferred=context.preferred or context.services.fleet.endpoint_with(model),
        prefix=prefix_of(content, model, body.cache_salt) if context.services.fleet.dispatch.wants_prefix else (),
        queue_deadline=asked.clock.first()[1],
        can_be_disaggregated=(
            is_disaggregated and stream.running_at is None and can_be_disaggregated(context.exchange.path, raw, body)
        ),
        running_at=stream.running_at,
    )
