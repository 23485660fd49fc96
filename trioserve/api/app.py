"""Base class of all apps. It handles request ids, API keys, errors, counts and log lines for every path."""

from __future__ import annotations

import abc
import difflib
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from trioserve.api.caller import ApiKeys, Caller, check_is_admin, check_may_operate
from trioserve.api.error_responses import HandedOver, Refusal, error_response, refusal
from trioserve.api.gate import PageGate
from trioserve.api.heartbeat import HEARTBEAT_HEADER, WhiteSpaceExchange
from trioserve.api.operations.live_requests import hand_over_event
from trioserve.api.responder import (
    HttpCounts,
    Outcome,
    Responder,
    current_request,
    end_line,
    request_id_from,
    tenant_shown,
)
from trioserve.api.route_table import READS, Handler, Route, RouteTable
from trioserve.api.surface import OLLAMA_PATH, surface_of
from trioserve.contracts.errors import TrioserveError, panics_become_failures
from trioserve.contracts.tracing import NO_SPAN, NO_TRACER, Attributes, Span, Tracer
from trioserve.http.exchange import printable
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

if TYPE_CHECKING:
    from trioserve.http.exchange import Exchange, Headers
    from trioserve.metrics.registry import Metrics

__all__ = ["OTHER_PATHS", "BaseApp", "other_path"]

UPDATES = "/update_weights_from_disk, /update_weights_from_shared_memory or /update_weights_from_distributed"
ONE_CALL = f"one call of {UPDATES} replaces all weights, or none, and sets their weight_version"

START_WITH = (
    "models are chosen at the start of the server: start it with `trioserve serve --model NAME`, which downloads NAME"
)
ONLY_SERVED = "models are chosen at the start of the server, which cannot create, copy or delete models"

OTHER_PATHS = {
    "/api/pull": START_WITH,
    "/api/push": ONLY_SERVED,
    "/api/create": ONLY_SERVED,
    "/api/copy": ONLY_SERVED,
    "/api/delete": ONLY_SERVED,
    "/init_weight_transfer_engine": "a trainer joins by torch.distributed with the backend gloo: use "
    "/init_weights_update_group",
    "/start_weight_update": ONE_CALL,
    "/update_weights": f"use {UPDATES}",
    "/finish_weight_update": ONE_CALL,
    "/shutdown_weight_transfer_engine": "use /destroy_weights_update_group",
    "/start_draft_weight_update": "a draft model keeps its weights, which does not change the responses",
    "/update_weight_version": f"the version is set together with the weights: send weight_version to {UPDATES}",
    "/weight_checker": "an update refuses weights that do not fit; /weight_info has the current version",
    "/update_weights_from_tensor": "use /update_weights_from_shared_memory on the server's machine, otherwise "
    "/update_weights_from_distributed",
    "/release_memory_occupation": "use /sleep",
    "/resume_memory_occupation": "use /wake_up",
}
"""Advice by path."""


def other_path(path: str) -> Refusal | None:
    """Make the error (404) for a path that only other servers have.

    Args:
        path: path of a request.

    Returns:
        The error, or None if OTHER_PATHS does not contain the path.
    """
    instead = OTHER_PATHS.get(path)
    if instead is None:
        return None
    page = "ollama" if path.startswith("/api/") else "rollouts"
    return refusal("other_path", f"there is nothing at {path}: {instead}; see docs/guides/{page}.md")


logger = logging.getLogger(__name__)

ContextType = TypeVar("ContextType", bound=Responder)
METRICS_PATH = "/metrics"
LOAD_PATH = "/load"
JSON = "application/json"
# A longer path gets no suggestion of a similar path, because a comparison costs the product of both lengths.
NEAREST_CHARACTERS_MAX = 64


class BaseApp(abc.ABC, Generic[ContextType]):
    """Handler of all requests of a server. If a request fails before its response has begun, the error becomes the
    response.

    Args:
        table: operations of the server.
        keys: API keys and access rules.
        metrics: counts requests.
        tracer: begins the span of each request.
        logs_requests: True: log each request at level INFO. False: at level DEBUG.
    """

    def __init__(
        self,
        table: RouteTable[ContextType],
        keys: ApiKeys,
        metrics: Metrics,
        *,
        tracer: Tracer = NO_TRACER,
        logs_requests: bool = False,
    ) -> None:
        self.table = table
        self._tracer = tracer
        self._logs_requests = logs_requests
        self._keys = keys
        rules = keys.rules
        self._gate = (
            None
            if keys.are_set
            else PageGate(rules.host_names, rules.page_origins, has_network_names=rules.has_network_names)
        )
        self._metrics = metrics
        self._counts = HttpCounts(metrics)

    def not_found(self, path: str) -> Refusal:
        """Make the error for an unknown path.

        Args:
            path: path of a request.
        """
        ollama = (
            other_path(path) if path.startswith(OLLAMA_PATH) else None
        )  # All apps make this check, including the apps of routers and image servers.
        return ollama or _not_found(path, self.table.routes)

    @abc.abstractmethod
    def new_context(self, exchange: Exchange) -> ContextType: ...

    @abc.abstractmethod
    def end_fields(self, context: ContextType) -> dict[str, object]:
        """Return further fields for the log line at the end of a request.

        Args:
            context: the request.
        """

    def __call__(self, exchange: Exchange) -> Awaitable[None]:
        """Answer a request.

        Python resumes each frame of the call chain for every event of a stream. So the chain has only three frames:
        `_serve`, which counts and logs, `handle`, which sends errors, and the handler.
        """
        return self._serve(self.new_context(exchange))

    async def serve_turn(self, exchange: Exchange, caller: Caller, handler: Handler[ContextType]) -> None:
        """Serve one response on a connection of the caller.

        Args:
            exchange: exchange of the response.
            caller: caller that opened the connection.
            handler: answers the request.
        """
        context = self.new_context(exchange)
        context.caller = caller
        await self._serve(context, begin=handler)

    async def _serve(
        self, context: ContextType, *, is_own: bool = False, begin: Handler[ContextType] | None = None
    ) -> None:
        """Answer a request.

        Args:
            context: the request.
            is_own: True: the server itself sent the request, and the context already has the caller.
            begin: answers a request whose caller was authorized before, in place of the route's handler. The request is
                a message on an open connection.
        """
        exchange = context.exchange
        route = self.table.find(exchange.path)
        self._counts.open_count += 1
        began_at = trio.current_time()
        if route is not None and self._tracer is not NO_TRACER and not route.is_polled:
            context.span = self._begin_span(exchange, route)
        token = current_request.set(context)
        heartbeat_asked = exchange.headers.get(HEARTBEAT_HEADER)
        heartbeat = None if heartbeat_asked is None else context.begin_heartbeat(heartbeat_asked)
        try:
            may_send_early = route is not None and not is_own and self._keys.rules.keep_alive_json
            if begin is not None:
                await self.handle(context, begin)
            elif may_send_early and route is not None and _is_sent_early(exchange, route):
                await self._respond_with_white_space(context, route)
            else:
                await self.handle(context, partial(self._authorized, route=route, is_own=is_own))
        finally:
            context.release()
            if heartbeat is not None:
                heartbeat.end()
            seconds = trio.current_time() - began_at
            # A websocket lasts as long as its client likes. Its messages are counted as requests.
            is_left_out = is_own or exchange.is_websocket or _is_polled(route)
            self._counts.end(_name(route), exchange.method, context.status, seconds, is_left_out=is_left_out)
            level = self._line_level(route, context.status)
            if logger.isEnabledFor(level):
                self._log_end(context, level, seconds=seconds)
            if context.span is not NO_SPAN:
                self._end_span(context)
            current_request.reset(token)

    def _begin_span(self, exchange: Exchange, route: Route[ContextType]) -> Span:
        headers = exchange.headers
        return self._tracer.begin(
            f"{exchange.method} {route.path}",
            kind="server",
            traceparent=headers.get("traceparent"),
            tracestate=headers.get("tracestate"),
            attributes={"http.request.method": exchange.method, "http.route": route.path},
        )

    def _end_span(self, context: ContextType) -> None:
        attributes: dict[str, str | int | None] = {
            "http.response.status_code": context.status,
            "trioserve.request.id": context.request_id,
            "trioserve.outcome": context.outcome.value,
            "trioserve.reason": context.reason,
            "trioserve.tenant": tenant_shown(context),
        }
        known: Attributes = {name: value for name, value in attributes.items() if value is not None}
        context.span.note(known)
        is_ours = context.outcome is Outcome.FAILED or (context.status or 0) >= 500
        context.span.end((context.reason or str(context.status)) if is_ours else None)

    def _line_level(self, route: Route[ContextType] | None, status: int | None) -> int:
        is_quiet = route is not None and route.is_polled and status is not None and status < 400
        return logging.INFO if self._logs_requests and not is_quiet else logging.DEBUG

    @property
    def knows_caller(self) -> Callable[[Headers], bool] | None:
        """Function that returns True if the headers have a valid API key. None if the server has no API keys."""
        return self._keys.knows if self._keys.are_set else None

    def note_preflight(self, exchange: Exchange, status: int) -> None:
        """Count and log the response to a CORS preflight, which CrossOrigin sent without calling this app.

        Args:
            exchange: the request.
            status: status of the response.
        """
        route = self.table.find(exchange.path)
        self._counts.note(_name(route), exchange.method, status, is_left_out=_is_polled(route))
        level = self._line_level(None, status)
        if logger.isEnabledFor(level):
            fields = {"method": exchange.method, "path": printable(exchange.path), "status": status}
            fields = {**fields, "outcome": Outcome.FINISHED}
            logger.log(level, "%s", end_line(fields), extra={"fields": fields})

    def operate(self, context: ContextType, handler: Handler[ContextType]) -> Awaitable[None]:
        """Call the handler of an authorized request.

        Args:
            context: the request.
            handler: answers the request.
        """
        return handler(context)

    async def _respond_with_white_space(self, context: ContextType, route: Route[ContextType]) -> None:
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                seconds = self._keys.rules.keep_alive_seconds
                exchange = WhiteSpaceExchange(context.exchange, nursery, seconds, context.json_head)
                context.exchange = exchange
                try:
                    await self.handle(context, partial(self._authorized, route=route, is_own=False))
                finally:
                    nursery.cancel_scope.cancel()
                    if exchange.has_begun:
                        context.note_early_head()

    def _authorized(self, context: ContextType, *, route: Route[ContextType] | None, is_own: bool) -> Awaitable[None]:
        """Authorize a request, and return the work of its handler. The handler then runs without this frame."""
        exchange = context.exchange
        method, headers, rules = exchange.method, exchange.headers, self._keys.rules
        context.surface = surface_of(exchange)
        if (request_id := headers.get("x-request-id")) is not None:
            context.request_id = request_id_from(request_id)
        operation = None if route is None else route.by_method.get(method)
        if route is None or is_own:
            operates = False
        else:
            operates = route.operates(method) if operation is None else operation.is_operators
        if self._gate is not None and not is_own:
            self._gate.check(exchange, is_open=route is not None and not route.needs_key, is_operators=operates)
        # /metrics counts the requests of all callers. So if /metrics is closed, only the admin may read it.
        is_admins = route is not None and route.path == METRICS_PATH and rules.metrics_need_key
        is_closed = is_admins or (route is not None and route.path == LOAD_PATH and rules.load_needs_key)
        if not is_own and (route is None or route.needs_key or is_closed):
            context.caller = self._keys.caller(headers)
        if route is None:
            raise self.not_found(exchange.path)
        if is_admins:
            check_is_admin(context.caller, "metrics need the admin's API key: see --admin-api-key")
        handler = route.operation(method, is_websocket=exchange.is_websocket).handler
        if operates:
            check_may_operate(context.caller)
        if operation is not None and operation.admin_action and not is_own:
            check_is_admin(context.caller, f"{operation.admin_action} needs the admin's API key: see --admin-api-key")
        if operates and self._gate is not None and method not in READS:
            return self._operate_with_json(context, handler)
        return self.operate(context, handler)

    async def _operate_with_json(self, context: ContextType, handler: Handler[ContextType]) -> None:
        await _check_is_json(context.exchange)
        await self.operate(context, handler)

    async def handle(self, context: ContextType, begin: Handler[ContextType]) -> None:
        """Answer a request with its handler, or with the error that the handler raises.

        Args:
            context: the request.
            begin: answers the request, or checks it first and returns the work of its handler.

        Raises:
            TrioserveError: the handler failed after its response had begun.
            Exception: a fault of this program occurred after the response had begun.
        """
        try:
            with panics_become_failures():
                try:
                    await begin(context)
                except HandedOver as handed:
                    await context.finish(hand_over_event(handed))
            if context.outcome is Outcome.LEFT:  # For any other outcome, the handler has already sent an error.
                context.outcome = Outcome.FINISHED
        except TrioserveError as error:
            if not await context.fail(error_response(error)):
                raise
        except Exception as error:
            logger.exception("request failed request=%s path=%s", context.request_id, printable(context.exchange.path))
            if not await context.fail(error_response(error)):
                raise

    def _log_end(self, context: ContextType, level: int, *, seconds: float) -> None:
        fields = {
            "request": context.request_id,
            "method": context.exchange.method,
            "path": printable(context.exchange.path),
            "status": context.status,
            "outcome": context.outcome,
            "reason": context.reason,
            "seconds": round(seconds, 3),
            **self.end_fields(context),
            "tenant": tenant_shown(context),
            "trace": context.span.trace_id,
        }
        line = end_line({**fields, "seconds": f"{seconds:.3f}"})
        logger.log(level, "%s", line, extra={"fields": fields})


def _name(route: Route[ContextType] | None) -> str | None:
    return None if route is None else route.path


def _is_sent_early(exchange: Exchange, route: Route[ContextType]) -> bool:
    """Return True if the head of a whole response is sent early, with status 200. A router that asks for heartbeats
    always gets the true status.
    """
    return exchange.method == "POST" and not route.operates("POST") and exchange.headers.get(HEARTBEAT_HEADER) is None


def _is_polled(route: Route[ContextType] | None) -> bool:
    return route is not None and route.is_polled


async def _check_is_json(exchange: Exchange) -> None:
    """Raise Refusal (415) for a body that is not declared as JSON.

    A browser sends a CORS preflight before a page of another site may send JSON. It sends bodies of other types without
    a preflight, and an old browser does not name the page's origin.
    """
    content_type = exchange.headers.get("content-type") or ""
    if content_type.partition(";")[0].strip().lower() == JSON or not await exchange.body():
        return
    raise refusal(
        "not_json",
        f'the body has the content-type "{content_type[:80]}": send JSON to this path with the header '
        f'"Content-Type: {JSON}", or send no body if none is needed',
    )


def _not_found(path: str, paths: Iterable[str]) -> Refusal:
    nearest: list[str] = []
    if len(path) <= NEAREST_CHARACTERS_MAX:
        nearest = difflib.get_close_matches(path.lower().rstrip("/"), list(paths), n=1)
    hint = f": did you mean {nearest[0]}?" if nearest else "; docs/reference/http-api.md lists all paths"
    return refusal("not_found", f"there is nothing at {path}{hint}")
