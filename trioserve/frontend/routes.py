"""Path to handler, and nothing more than what goes for every path: request ids, API keys, errors, counting."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.contracts.errors import TrioserveError
from trioserve.frontend.api_keys import ApiKeys
from trioserve.frontend.call import Call, request_id_from
from trioserve.frontend.chat import create_chat_completion
from trioserve.frontend.completions import create_completion
from trioserve.frontend.error_responses import REASON_HEADER, ErrorAnswer, Refusal, error_answer
from trioserve.frontend.generation import usage_of
from trioserve.frontend.live_requests import REQUEST_PATH, abort_request, abort_requests, list_requests
from trioserve.frontend.message_head import printable
from trioserve.frontend.models import MODEL_PATH, list_models, read_model
from trioserve.frontend.openapi import openapi_document
from trioserve.frontend.operations import read_health, read_metrics, read_ready, read_version
from trioserve.frontend.request_end import Outcome, end_line
from trioserve.frontend.sse import encode
from trioserve.frontend.surroundings import Surroundings
from trioserve.frontend.tokenize import detokenize, tokenize

if TYPE_CHECKING:
    from trioserve.frontend.exchange import Exchange
    from trioserve.runtime.engine import Engine

__all__ = ["ROUTES", "App", "Route"]

logger = logging.getLogger(__name__)

Operation = Callable[[Call], Awaitable[None]]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """path: also its name in metrics. needs_key: whether API keys, if there are any, guard it."""

    path: str
    operations: dict[str, Operation]
    needs_key: bool = True

    def operation(self, method: str) -> Operation:
        """Raises Refusal (405)."""
        # The exchange drops the body of an answer to HEAD.
        operation = self.operations.get("GET" if method == "HEAD" else method)
        if operation is None:
            allowed = sorted({*self.operations, *(["HEAD"] if "GET" in self.operations else [])})
            raise Refusal(
                ErrorAnswer(
                    status=405,
                    type="invalid_request_error",
                    code="method_not_allowed",
                    message=f"{self.path} does not take {method}, allowed is: {', '.join(allowed)}",
                    headers=(("allow", ", ".join(allowed)), (REASON_HEADER, "method_not_allowed")),
                )
            )
        return operation


async def read_openapi(call: Call) -> None:
    """What all routes take and give, in OpenAPI 3.1."""
    await call.answer_bytes(_openapi_json(), "application/json")


@functools.cache
def _openapi_json() -> bytes:
    return encode(openapi_document([*ROUTES.values(), MODEL, REQUEST]))


ROUTES = {
    route.path: route
    for route in (
        Route(path="/v1/chat/completions", operations={"POST": create_chat_completion}),
        Route(path="/v1/completions", operations={"POST": create_completion}),
        Route(path="/v1/models", operations={"GET": list_models}),
        Route(path="/v1/requests", operations={"GET": list_requests}),
        Route(path="/v1/requests/abort", operations={"POST": abort_requests}),
        Route(path="/tokenize", operations={"POST": tokenize}),
        Route(path="/detokenize", operations={"POST": detokenize}),
        Route(path="/health", operations={"GET": read_health}, needs_key=False),
        Route(path="/ready", operations={"GET": read_ready}, needs_key=False),
        Route(path="/version", operations={"GET": read_version}, needs_key=False),
        Route(path="/metrics", operations={"GET": read_metrics}, needs_key=False),
        Route(path="/openapi.json", operations={"GET": read_openapi}, needs_key=False),
    )
}
REQUEST = Route(path=REQUEST_PATH + "{request}", operations={"DELETE": abort_request})
MODEL = Route(path=MODEL_PATH + "{model}", operations={"GET": read_model})
OTHER = Route(path="other", operations={})


class App:
    """The server's handler: answers every exchange, and turns every error into an answer while there is still time.

    api_keys: any of them opens the routes that need one; without any, all are open.
    admin_api_key: opens them, too, and sees the requests of every key; the others see those that they made.
    trust_request_chat_template: requests may bring their own chat template.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        api_keys: Iterable[str] = (),
        admin_api_key: str | None = None,
        trust_request_chat_template: bool = False,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._engine = engine
        self._keys = ApiKeys(api_keys, admin_key=admin_api_key)
        self._trust_chat_template = trust_request_chat_template
        self._surroundings = surroundings or Surroundings()
        self._open_count = self._open_shown = 0
        self._counts: dict[tuple[str, int | None], int] = {}  # since the last scrape, by path and status
        engine.metrics.on_scrape(self._show_counts)

    async def __call__(self, exchange: Exchange) -> None:
        route = _route(exchange.path)
        call = Call(exchange, self._engine, self._surroundings, trust_chat_template=self._trust_chat_template)
        self._open_count += 1
        began_at = trio.current_time()
        try:
            await self._answer(call, route)
        finally:
            self._open_count -= 1
            self._count(route, call.status)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", _end_line(call, seconds=trio.current_time() - began_at))

    def note_preflight(self, exchange: Exchange, status: int) -> None:
        """Count an answer that was given in the app's stead."""
        self._count(_route(exchange.path), status)
        if logger.isEnabledFor(logging.DEBUG):
            fields = {"method": exchange.method, "path": printable(exchange.path), "status": status}
            logger.debug("%s", end_line({**fields, "outcome": Outcome.FINISHED}))

    def _count(self, route: Route, status: int | None) -> None:
        key = (route.path, status)
        self._counts[key] = self._counts.get(key, 0) + 1

    def _show_counts(self) -> None:
        """At every scrape: a metric with labels costs more than a look into a dict, and each request has one."""
        metrics = self._engine.metrics
        metrics.streams_open.inc(self._open_count - self._open_shown)
        self._open_shown = self._open_count
        for (path, status), count in self._counts.items():
            metrics.http_requests_total.labels(path, str(status or "left")).inc(count)
        self._counts.clear()

    async def _answer(self, call: Call, route: Route) -> None:
        try:
            call.request_id = request_id_from(call.exchange.headers.get("x-request-id")) or call.request_id
            if route.needs_key:
                call.owner = self._keys.owner(call.exchange.headers.get("authorization"))
            if route is OTHER:
                raise _not_found(call.exchange.path)
            await route.operation(call.exchange.method)(call)
            call.outcome = Outcome.FINISHED
        except TrioserveError as error:
            if not await call.fail(error_answer(error)):
                raise
        except Exception as error:
            logger.exception("request failed request=%s path=%s", call.request_id, route.path)
            if not await call.fail(error_answer(error)):
                raise


def _end_line(call: Call, *, seconds: float) -> str:
    usage = usage_of(call.streams)
    return end_line(
        {
            "request": call.request_id,
            "method": call.exchange.method,
            "path": printable(call.exchange.path),
            "status": call.status,
            "outcome": call.outcome,
            "reason": call.reason,
            "seconds": f"{seconds:.3f}",
            # Until a prompt has been tokenized nobody knows.
            "prompt_tokens": usage.prompt_tokens or None,
            "completion_tokens": usage.completion_tokens if usage.prompt_tokens else None,
        }
    )


def _not_found(path: str) -> Refusal:
    return Refusal(
        ErrorAnswer(
            status=404,
            type="invalid_request_error",
            code="not_found",
            message=f"there is nothing at {path}",
            headers=((REASON_HEADER, "not_found"),),
        )
    )


def _route(path: str) -> Route:
    if path.startswith(MODEL_PATH) and len(path) > len(MODEL_PATH):
        return MODEL
    if path.startswith(REQUEST_PATH) and len(path) > len(REQUEST_PATH) and path not in ROUTES:
        return REQUEST
    return ROUTES.get(path, OTHER)
