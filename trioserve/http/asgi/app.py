"""An ASGI 3 app that runs a handler under Hypercorn's Trio worker, or mounted in another Trio app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from trioserve.http.asgi.exchange import AsgiExchange, Receive, Send
from trioserve.http.body_budget import BodyBudget, BodyShare
from trioserve.http.counters import ConnectionRefusal, FrontendCounters, Tally
from trioserve.http.exchange import Handler, Headers, RequestHead
from trioserve.http.handler_call import call_handler
from trioserve.http.limits import FrontendLimits

__all__ = ["ResponseBrokenOff", "AsgiApp"]


class ResponseBrokenOff(RuntimeError):
    """The response will not be completed. The app raises this error to the host, because ASGI has no message for a
    partial response.
    """


class AsgiApp:
    """An ASGI app for one handler. It supports `http`, `websocket` and `lifespan`, and its host must run Trio.

    With every host, the app cancels the handler's scope when the host reports http.disconnect, or when the host takes
    no bytes for stall_seconds_max. The app buffers at most stream_buffer_bytes_max for one client, and bounds request
    bodies.

    The app cannot prevent the following behaviour of a host (seen with Hypercorn 0.18):

    - The host may buffer without bound for an HTTP/2 client that does not read. Then the app never notices that the
      client does not read.
    - The host's `send` may not be cancellable. Then the handler ends at once and frees its resources, but the call of
      this app ends later, when `send` returns.
    - If the client has already sent the next HTTP/1.1 request (pipelining), the host reports a disconnect late or
      never.

    Args:
        handler: answers each request.
        limits: limits of the server. If None, the default limits.
    """

    def __init__(self, handler: Handler, limits: FrontendLimits | None = None) -> None:
        self._handler = handler
        self._limits = limits or FrontendLimits()
        self._tally = Tally()
        self._body_budget = BodyBudget(self._limits)
        self._exchanges: set[AsgiExchange] = set()
        self._early: set[AsgiExchange] | None = None  # The exchanges that were open when the drain was announced.
        self._early_ended = trio.Event()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _serve_lifespan(receive, send)
        elif scope["type"] in ("http", "websocket"):
            await self._respond(scope, receive, send)
        else:
            raise NotImplementedError(
                f"scope type {scope['type']!r} is not supported, only http, websocket and lifespan"
            )

    def announce_drain(self) -> None:
        """Remember which exchanges are open now. `wait_until_answered` ignores exchanges that begin later."""
        if self._early is None:
            self._early = set(self._exchanges)
            for exchange in self._early:
                exchange.draining.set()
            if not self._early:
                self._early_ended.set()

    async def wait_until_answered(self) -> None:
        """Wait until all exchanges that were open at `announce_drain` have ended."""
        await self._early_ended.wait()

    def counters(self) -> FrontendCounters:
        """Return the counters. The counters of connections stay 0, because the host owns the connections."""
        unsent = [exchange.unsent_bytes for exchange in self._exchanges if exchange.unsent_bytes]
        return self._tally.snapshot(self._body_budget, answer_bytes_held=sum(unsent), exchanges_behind=len(unsent))

    async def _respond(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        share = BodyShare(self._body_budget)
        exchange = self._new_exchange(scope, share)
        if self._early is not None:
            exchange.draining.set()
        self._tally.exchanges_total += 1
        self._tally.exchanges_open += 1
        self._exchanges.add(exchange)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange.watch, receive)
            nursery.start_soon(exchange.forward, send)
            try:
                with exchange.scope:
                    if not await call_handler(self._handler, exchange, exchange.response):
                        self._tally.exchanges_failed_total += 1
                    if exchange.response.finished:
                        await exchange.drained()
            finally:
                # The handler has ended, so its share of the body budget is released now. The host may delay the end of
                # this call.
                share.release()
                if exchange.response.websocket is not None:
                    exchange.response.websocket.release()
                self._exchanges.discard(exchange)
                if self._early is not None:
                    self._early.discard(exchange)
                    if not self._early:
                        self._early_ended.set()
                self._tally.exchanges_open -= 1
            await exchange.send_last_messages()
            nursery.cancel_scope.cancel()
        self._tally.exchanges_left_total += exchange.gone
        self._tally.exchanges_stalled_total += exchange.stalled
        self._tally.connections_refused_total[ConnectionRefusal.BODY_TIMEOUT] += exchange.body_too_slow
        self._tally.connections_refused_total[ConnectionRefusal.SLOW_READER] += exchange.slow_reader
        if not exchange.gone and (exchange.stalled or not exchange.response.finished):
            raise ResponseBrokenOff(f"the response to {exchange.method} {exchange.path} was broken off")

    def _new_exchange(self, scope: Mapping[str, Any], share: BodyShare) -> AsgiExchange:
        head = _request_head(scope)
        if not head.is_websocket:
            return AsgiExchange(head, share, self._limits)
        # The first websocket loads wsproto.
        from trioserve.http.asgi.websocket import AsgiWebSocketExchange

        return AsgiWebSocketExchange(
            head,
            share,
            self._limits,
            budget=self._body_budget,
            tally=self._tally,
            can_respond="websocket.http.response" in (scope.get("extensions") or {}),
        )


async def _serve_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _request_head(scope: Mapping[str, Any]) -> RequestHead:
    path = scope["path"]
    root = scope.get("root_path", "")
    if root and (path == root or path.startswith(root.rstrip("/") + "/")):
        path = path[len(root.rstrip("/")) :] or "/"
    client = scope.get("client")
    return RequestHead(
        method=scope.get("method", "GET"),
        path=path,
        query=scope.get("query_string", b"").decode("latin-1"),
        headers=Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]),
        http_version=scope["http_version"],
        peer=f"{client[0]}:{client[1]}" if client else "unknown",
        is_websocket=scope["type"] == "websocket",
    )
