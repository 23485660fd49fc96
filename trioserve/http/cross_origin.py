"""Which web pages may use the API from a browser: CORS, as the Fetch standard has it (3.2). Off unless asked for.

It protects the users of browsers, not the server: other clients send what they like. What may be seen is decided by API
keys, which pages send by themselves; cookies play no part, so credentials are never allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trioserve.contracts.errors import StartupError
from trioserve.http.exchange import Exchange, Handler, HeaderFields
from trioserve.http.message_head import TOKEN

__all__ = ["CrossOrigin", "checked_origins"]

EXPOSED = "x-request-id, request-id, retry-after, x-trioserve-reason"
METHODS = "GET, HEAD, POST, DELETE"
ASKED_CHARACTERS_MAX = 2000  # of header names, which are repeated; OpenAI's client for browsers sends about ten
PREFLIGHT_SECONDS = "600"  # for which a browser may remember the response; Chromium allows two hours at most

ORIGIN_FIELD = ("vary", "origin")  # caches must not give one page's answer to another


def checked_origins(origins: Iterable[str]) -> frozenset[str]:
    """Raises StartupError for what no browser would send as its page's origin."""
    checked = frozenset(origins)
    for origin in checked:
        scheme, separator, host = origin.partition("://")
        if origin != "*" and (not scheme or not separator or not host or "/" in host or origin != origin.lower()):
            raise StartupError(
                f"the CORS origin {origin!r} is none: give scheme, host and port in lower case, without a path, such "
                'as "https://chat.example.org", or "*" for every page'
            )
    return checked


class CrossOrigin:
    """A handler around another one. origins: as browsers send them ("https://chat.example.org"), or "*" for all pages.

    on_preflight is told of each response that the other handler will not see, and of its status.
    Raises StartupError as checked_origins does.
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
            # It comes without the API key, so it never gets to where keys are checked.
            self._on_preflight(exchange, 204)
            await exchange.respond(204, [*allowed, *(self._preflight(exchange) if allowed else ())], b"")
            return
        fields = [*allowed, ("access-control-expose-headers", EXPOSED)] if allowed else []
        await self._handler(_Amended(exchange, [*fields, ORIGIN_FIELD]))

    def _allowed(self, origin: str) -> HeaderFields:
        if "*" in self._origins:
            return (("access-control-allow-origin", "*"),)
        if origin in self._origins:
            return (("access-control-allow-origin", origin),)
        return ()

    def _preflight(self, exchange: Exchange) -> HeaderFields:
        """Any header may be sent: none of them means more from a page than from another client."""
        asked = exchange.headers.get("access-control-request-headers") or ""
        names = [name.strip() for name in asked[:ASKED_CHARACTERS_MAX].split(",")]
        return (
            ("access-control-allow-methods", METHODS),
            ("access-control-allow-headers", ", ".join(name for name in names if TOKEN.fullmatch(name))),
            ("access-control-max-age", PREFLIGHT_SECONDS),
            ORIGIN_FIELD,
        )


class _Amended(Exchange):
    """The same exchange, with more header fields in its response."""

    def __init__(self, exchange: Exchange, fields: HeaderFields) -> None:
        self.method = exchange.method
        self.path = exchange.path
        self.query = exchange.query
        self.headers = exchange.headers
        self.http_version = exchange.http_version
        self.peer = exchange.peer
        self._exchange = exchange
        self._fields = fields

    @property
    def started(self) -> bool:
        return self._exchange.started

    async def body(self) -> bytes:
        return await self._exchange.body()

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        await self._exchange.respond(status, [*headers, *self._fields], body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        await self._exchange.start(status, [*headers, *self._fields])

    async def send(self, data: bytes) -> None:
        await self._exchange.send(data)

    async def finish(self, last: bytes = b"") -> None:
        await self._exchange.finish(last)
