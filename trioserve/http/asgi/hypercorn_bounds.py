"""Limits that Hypercorn does not have: on the cost of HTTP/2 frames, and on the number of connections.

Hypercorn has no hook for such limits, but looks up its classes in its modules at each connection. So `bounded` replaces
these classes by subclasses while a server runs.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h2.events
import h2.exceptions
import hypercorn.protocol
import hypercorn.protocol.h2
import hypercorn.trio.run
import hypercorn.trio.tcp_server
import trio
from hypercorn.events import Closed, Event, RawData, Updated

from trioserve.http.counters import ConnectionRefusal
from trioserve.http.http2.connection import BODY_BYTE_CPU_SECONDS, REQUEST_CPU_SECONDS
from trioserve.http.http2.frames import PREFACE, Flood, FrameGate
from trioserve.http.http2.protocol import FieldDecoder, error_code_of
from trioserve.http.limits import FrontendLimits
from trioserve.http.pace import RateBucket
from trioserve.trio_tools.connection_limit import ConnectionLimit, remote_address
from trioserve.trio_tools.http2_client import known_settings

__all__ = ["bounded"]


@contextmanager
def bounded(limits: FrontendLimits) -> Iterator[None]:
    """Apply limits to Hypercorn's connections while a `with` block runs.

    Args:
        limits: limits on frames and connections.
    """
    places = ConnectionLimit(
        connections_max=limits.connections_max,
        strangers_max=limits.connections_max,  # Hypercorn does not report which requests have an API key.
        per_address_max=limits.connections_per_address_max,
    )

    class Protocol(_BoundedH2Protocol):
        bounds = limits

    class Server(_BoundedTCPServer):
        bounds = limits
        shared_places = places

    original_protocol, original_server = hypercorn.protocol.H2Protocol, hypercorn.trio.run.TCPServer
    hypercorn.protocol.H2Protocol = Protocol
    hypercorn.trio.run.TCPServer = Server
    try:
        yield
    finally:
        hypercorn.protocol.H2Protocol = original_protocol
        hypercorn.trio.run.TCPServer = original_server


class _BoundedH2Protocol(hypercorn.protocol.h2.H2Protocol):  # type: ignore[misc]
    """Hypercorn's HTTP/2 connection, with limits on the number and the cost of frames."""

    bounds: FrontendLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        now = trio.current_time()
        limits = self.bounds
        self._gate = FrameGate(limits, now=now)
        self._cpu = RateBucket(per_second=limits.frame_cpu_share_max, burst=limits.frame_cpu_burst_seconds_max, now=now)
        self._preface_left = len(PREFACE)
        self.connection.decoder = FieldDecoder(
            self.connection.config, list_bytes_max=limits.head_bytes_max, fields_max=limits.fields_max
        )

    async def initiate(
        self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | str | None = None
    ) -> None:
        """Start the connection, and remove unknown settings of an upgrade from HTTP/1.1.

        Args:
            headers: header fields of the request that asked for the upgrade, or None without an upgrade.
            settings: the payload of a SETTINGS frame in base64 (RFC 7540, 3.2.1), or None without an upgrade.
        """
        if settings is not None:
            with suppress(binascii.Error, ValueError):  # The h2 library reports the error later.
                settings = base64.urlsafe_b64encode(known_settings(base64.urlsafe_b64decode(settings)))
        await super().initiate(headers, settings)

    async def handle(self, event: Event) -> None:
        if not isinstance(event, RawData) or self.closed:
            await super().handle(event)
            return
        try:
            await self._handle_frames(event.data)
        except h2.exceptions.ProtocolError as error:
            with suppress(h2.exceptions.ProtocolError):
                self.connection.clear_outbound_data_buffer()
                self.connection.close_connection(error_code_of(error))
            await self._flush()
            await self.send(Closed())

    async def _handle_frames(self, data: bytes) -> None:
        preface, data = data[: self._preface_left], data[self._preface_left :]
        self._preface_left -= len(preface)
        if preface:
            self.connection.receive_data(preface)
        is_first = True
        for piece in self._gate.pieces(data, trio.current_time()):
            if not is_first:
                await trio.lowlevel.checkpoint()
            is_first = False
            began_at = time.thread_time()
            events = self.connection.receive_data(piece)
            cost = time.thread_time() - began_at - sum(map(_cpu_credit, events))
            if not self._cpu.take(trio.current_time(), max(0.0, cost)):
                raise Flood("the frames of this connection cost too much work", ConnectionRefusal.FRAME_WORK)
            await self._handle_events(events)


def _cpu_credit(event: h2.events.Event) -> float:
    """Return the CPU seconds that handling an event may cost without counting against frame_cpu_share_max."""
    if isinstance(event, h2.events.RequestReceived):
        return REQUEST_CPU_SECONDS
    if isinstance(event, h2.events.DataReceived):
        return len(event.data or b"") * BODY_BYTE_CPU_SECONDS
    return 0.0


class _BoundedTCPServer(hypercorn.trio.tcp_server.TCPServer):  # type: ignore[misc]
    """Hypercorn's TCP connection, which may be closed while idle to accept another connection."""

    bounds: FrontendLimits
    shared_places: ConnectionLimit

    async def run(self) -> None:
        stream: Any = self.stream
        transport = getattr(stream, "transport_stream", stream)
        place = self.shared_places.crowd_in(remote_address(transport))
        if place is None or self.shared_places.count > self.bounds.connections_max + CROWD_MAX:
            if place is not None:
                self.shared_places.leave(place)
            transport.socket.close()
            return
        self._may_end_at: float | None = trio.current_time()
        try:
            with trio.CancelScope() as scope:
                place.may_end_at, place.end = (lambda: self._may_end_at), scope.cancel
                await super().run()
        finally:
            self.shared_places.leave(place)
            transport.socket.close()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated):
            self._may_end_at = trio.current_time() if event.idle else None
        await super().protocol_send(event)


CROWD_MAX = 64  # At most this number of connections above connections_max may wait until idle connections end.
