"""Calls a handler, and sends an error response if the handler fails. All protocols use this module.

RootPath and CrossOrigin are handlers that call another handler. CrossOrigin decides which web pages may use the API
from a browser (CORS, Fetch standard, 3.2). It is off by default. CORS protects the users of browsers, not the server:
other clients ignore it. API keys control access. A page sends its key in a header field. The API uses no cookies, so
credentials are never allowed.

The front end sends these error responses, in the format of OpenAI's API, if a request does not reach a handler, or if a
handler sends no response. error_responses.py maps exceptions of the API to responses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.http.exchange import (
    TOKEN,
    BodyTimeout,
    BodyTooLarge,
    Exchange,
    Handler,
    HeaderFields,
    ResponseState,
    WebSocket,
    WrappedExchange,
    printable,
)

__all__ = [
    "CrossOrigin",
    "JSON_FIELDS",
    "RootPath",
    "call_handler",
    "checked_origins",
    "checked_root_path",
    "refusal_body",
]


JSON_FIELDS: HeaderFields = (("content-type", "application/json"),)


def refusal_body(status: int, message: str) -> bytes:
    """Return the JSON body {"error": {...}} of an error response.

    Args:
        status: HTTP status, from which the error type follows.
        message: the error message for the client.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})


logger = logging.getLogger(__name__)


async def call_handler(handler: Handler, exchange: Exchange, response: ResponseState) -> bool:
    """Run the handler, and send an error response if the handler fails before it starts a response.

    After a handler has accepted a websocket, its return closes the websocket with 1000, and its failure with 1011.
    Otherwise the status is 400, 408 or 413 if the handler raised InvalidRequest, for example because of a bad body. For
    other failures it is 500.

    Args:
        handler: the function that answers requests.
        exchange: the request and its response.
        response: progress of the response of `exchange`.

    Returns:
        False if the handler failed. If `response.finished` is False afterwards, the caller must break off the response.
    """
    try:
        try:
            await handler(exchange)
        except InvalidRequest as error:
            if response.started:
                raise
            status = 413 if isinstance(error, BodyTooLarge) else 408 if isinstance(error, BodyTimeout) else 400
            await exchange.respond(status, JSON_FIELDS, refusal_body(status, str(error)))
        if response.websocket is not None:
            await response.websocket.close()
            response.finished = True
        if response.finished:
            return True
        logger.error(
            "handler returned without a complete response method=%s path=%s", exchange.method, printable(exchange.path)
        )
    except* Exception:  # If Cancelled is in an exception group with errors, this statement still raises Cancelled.
        logger.exception("handler failed method=%s path=%s", exchange.method, printable(exchange.path))
    if response.websocket is not None:
        await response.websocket.close(1011, "the server failed")
        response.finished = True
    elif not response.started:
        await exchange.respond(500, JSON_FIELDS, refusal_body(500, "the server failed to answer this request"))
    return False


def checked_root_path(path: str) -> str:
    """Check a path prefix, and remove its last slash.

    Args:
        path: the value of --root-path. It is empty if there is no prefix.

    Returns:
        The prefix without a slash at its end.

    Raises:
        StartupError: the prefix cannot be the start of a path.
    """
    if path and (not path.startswith("/") or any(mark in path for mark in "?# ")):
        raise StartupError(
            f"--root-path is {path!r}: it must begin with / and contain no question mark, # or blank, such as /llm"
        )
    return path.rstrip("/")


class RootPath:
    """A handler that removes a prefix from the path and calls another handler.

    A path without the prefix is not changed, because the proxy has already removed the prefix.

    Args:
        handler: called for each request.
        prefix: the prefix that checked_root_path returned.
    """

    def __init__(self, handler: Handler, prefix: str) -> None:
        self._handler = handler
        self._prefix = prefix

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.path == self._prefix:
            exchange.path = "/"
        elif exchange.path.startswith(self._prefix + "/"):
            exchange.path = exchange.path[len(self._prefix) :]
        await self._handler(exchange)


EXPOSED = "x-request-id, request-id, retry-after, x-trioserve-reason"
METHODS = "GET, HEAD, POST, DELETE"
# The response repeats at most this number of characters of the requested header names. OpenAI's browser client sends
# about ten names.
REQUESTED_CHARACTERS_MAX = 2000
PREFLIGHT_SECONDS = "600"  # A browser may cache the response for this time. Chromium allows at most two hours.

ORIGIN_FIELD = ("vary", "origin")  # With this field, a cache does not send the response for one page to another page.


def checked_origins(origins: Iterable[str]) -> frozenset[str]:
    """Check the allowed origins.

    Args:
        origins: as browsers send them ("https://chat.example.org"), or "*" for all pages.

    Raises:
        StartupError: a browser would never send this origin.
    """
    checked = frozenset(origins)
    for origin in checked:
        scheme, separator, host = origin.partition("://")
        if origin != "*" and (not scheme or not separator or not host or "/" in host or origin != origin.lower()):
            raise StartupError(
                f"the CORS origin {origin!r} is not valid: give scheme, host and port in lower case, without a path, "
                'such as "https://chat.example.org", or "*" for every page'
            )
    return checked


class CrossOrigin:
    """A handler that answers CORS preflights, and adds CORS fields to the responses of another handler.

    Args:
        handler: called for each request that is not a preflight.
        origins: allowed origins, see checked_origins.
        on_preflight: called with the exchange and the status of each preflight, because `handler` does not get
            preflights.

    Raises:
        StartupError: an origin is not valid.
    """

    def __init__(
        self,
        handler: Handler,
        origins: Iterable[str],
        *,
        on_preflight: Callable[[Exchange, int], None] = lambda exchange, status: None,
    ) -> None:
        self._handler = handler
        self._on_preflight = on_preflight
        self._origins = checked_origins(origins)

    async def __call__(self, exchange: Exchange) -> None:
        origin = exchange.headers.get("origin")
        if origin is None:
            await self._handler(exchange)
            return
        allowed = self._allowed(origin)
        if exchange.method == "OPTIONS" and "access-control-request-method" in exchange.headers:
            # Browsers send a preflight without the API key, so the check of keys would refuse the preflight.
            self._on_preflight(exchange, 204)
            await exchange.respond(204, [*allowed, *(self._preflight(exchange) if allowed else ())], b"")
            return
        fields = [*allowed, ("access-control-expose-headers", EXPOSED)] if allowed else []
        await self._handler(_AmendedExchange(exchange, [*fields, ORIGIN_FIELD]))

    def _allowed(self, origin: str) -> HeaderFields:
        if "*" in self._origins:
            return (("access-control-allow-origin", "*"),)
        if origin in self._origins:
            return (("access-control-allow-origin", origin),)
        return ()

    def _preflight(self, exchange: Exchange) -> HeaderFields:
        """Return the header fields that allow a request. All header names are allowed, because no header field gives a
        page more rights.
        """
        requested = exchange.headers.get("access-control-request-headers") or ""
        names = [name.strip() for name in requested[:REQUESTED_CHARACTERS_MAX].split(",")]
        return (
            ("access-control-allow-methods", METHODS),
            ("access-control-allow-headers", ", ".join(name for name in names if TOKEN.fullmatch(name))),
            ("access-control-max-age", PREFLIGHT_SECONDS),
            ORIGIN_FIELD,
        )


class _AmendedExchange(WrappedExchange):
    """An exchange that adds header fields to the response of another exchange."""

    def __init__(self, exchange: Exchange, fields: HeaderFields) -> None:
        super().__init__(exchange)
        self._fields = fields

    async def accept_websocket(self, headers: HeaderFields = ()) -> WebSocket:
        return await self.exchange.accept_websocket([*headers, *self._fields])

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        await self.exchange.respond(status, [*headers, *self._fields], body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        await self.exchange.start(status, [*headers, *self._fields])
