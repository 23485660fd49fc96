"""Counters of the front end. Connections increment them, and metrics read an immutable snapshot."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping

import msgspec

from trioserve.http.body_budget import BodyBudget
from trioserve.metrics.registry import Metrics

__all__ = ["ConnectionRefusal", "FrontendCounters", "StreamRefusal", "Tally", "show_counters"]


class ConnectionRefusal(enum.StrEnum):
    """Reasons to end a connection. Each reason has a limit in limits.py, or is a rule of the protocol."""

    RESPONSES_UNREAD = "answers_unread"
    """The client does not read the replies to its control frames."""
    BODIES_FULL = "bodies_full"
    """The bodies and messages of all clients reached bodies_bytes_max. Only a websocket ends for this reason."""
    ADDRESS = "address"
    """The client's address has as many connections as allowed, and all of them are in use."""
    BODY_TIMEOUT = "body_timeout"
    """A request body arrived too slowly. On HTTP/2, only the stream ends, and the connection stays open."""
    CONTROL_FRAMES = "control_frames"
    CROWDED = "crowded"
    """The connection was idle or had an incomplete head while other connections waited to be accepted."""
    FRAGMENTS = "fragments"
    """A websocket message has too many fragments."""
    FRAME_WORK = "frame_work"
    """The HTTP/2 frames of the client cost too much CPU time."""
    FRAME_TOO_LARGE = "frame_too_large"
    HEAD_TIMEOUT = "head_timeout"
    HEAD_TOO_LARGE = "head_too_large"
    MALFORMED = "malformed"
    MESSAGE_TOO_LARGE = "message_too_large"
    """A websocket message has too many bytes."""
    PING_UNANSWERED = "ping_unanswered"
    """The client has a running stream or a websocket, and did not answer a ping: it forgot the stream, or it does not
    read.
    """
    RESETS = "resets"
    SENT_AHEAD = "sent_ahead"
    SILENT = "silent"
    """The client sent nothing, so its protocol stayed unknown."""
    SLOW_READER = "slow_reader"
    """The client read a response too slowly. On HTTP/2 only the stream ends, and the connection stays open."""
    STALLED = "stalled"
    """The client read nothing, so TCP accepted no more bytes."""
    TLS_HANDSHAKE = "tls_handshake"
    WEBSOCKET_IDLE = "websocket_idle"
    """A websocket had no message in either direction for too long."""


class StreamRefusal(enum.StrEnum):
    """Reasons to refuse a request. The client gets REFUSED_STREAM on HTTP/2, 503 on HTTP/1.1."""

    DRAINING = "draining"
    """The server was draining when the request arrived, or before all of it had arrived."""
    EXCHANGES_MAX = "exchanges_max"
    STREAMS_MAX = "streams_max"
    UNKNOWN_CALLERS = "unknown_callers"
    """Callers without an API key have used their share of the exchanges."""
    WEBSOCKETS_MAX = "websockets_max"
    """The server has its maximum number of open websockets. On HTTP/1.1, the client gets 503."""
    WEBSOCKETS_PER_CALLER = "websockets_per_caller"
    """The caller has as many open websockets as allowed. On HTTP/1.1, the client gets 429."""


class FrontendCounters(msgspec.Struct, frozen=True, kw_only=True):
    """The counters at one moment.

    Fields that end with `_total` count since the server was created. The other fields are current values.
    """

    connections_open: int
    connections_known_open: int
    """Accepted connections on which a request showed an API key. 0 if the server requires no keys."""
    connections_max: int
    accepts_failed_total: int
    """Accepts that failed because the process had no free file descriptor or memory."""
    exchanges_open: int
    exchanges_unknown_open: int
    """Open exchanges whose caller showed no API key. 0 if the server requires no keys."""
    exchanges_behind: int
    """Open exchanges with unsent bytes, because the client reads slower than the handler sends."""
    answer_bytes_held: int
    """Unsent bytes of all clients, including the replies to control frames."""
    request_body_bytes_held: int
    request_body_bytes_total: int
    connections_total: int
    connections_http2_total: int
    connections_failed_total: int
    """Connections that ended because of a fault in the server. Each has one line in the log."""
    connections_refused_total: Mapping[ConnectionRefusal, int]
    """Connections that ended at a limit, by reason. Every reason has an entry."""
    exchanges_total: int
    exchanges_left_total: int
    """Exchanges that were cancelled because the client left."""
    exchanges_stalled_total: int
    """Exchanges that were cancelled because the client read nothing for stall_seconds_max, or read too slowly."""
    exchanges_failed_total: int
    """Exchanges whose handler raised, or returned without a complete response."""
    streams_refused_total: Mapping[StreamRefusal, int]
    websockets_open: int
    websockets_max: int
    websockets_total: int
    websocket_messages_received_total: int
    websocket_messages_sent_total: int
    websocket_bytes_received_total: int
    """Bytes of frames from clients, with their heads. HTTP/2 frames around them do not count."""
    websocket_bytes_sent_total: int


@dataclasses.dataclass(slots=True)
class Tally:
    """Mutable counters that all connections of a server share. FrontendCounters explains the names."""

    connections_open: int = 0
    accepts_failed_total: int = 0
    exchanges_open: int = 0
    exchanges_unknown_open: int = 0
    connections_total: int = 0
    connections_http2_total: int = 0
    connections_failed_total: int = 0
    connections_refused_total: dict[ConnectionRefusal, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(ConnectionRefusal, 0)
    )
    exchanges_total: int = 0
    exchanges_left_total: int = 0
    exchanges_stalled_total: int = 0
    exchanges_failed_total: int = 0
    streams_refused_total: dict[StreamRefusal, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(StreamRefusal, 0)
    )
    websockets_open: int = 0
    websockets_total: int = 0
    websocket_messages_received_total: int = 0
    websocket_messages_sent_total: int = 0
    websocket_bytes_received_total: int = 0
    websocket_bytes_sent_total: int = 0

    def snapshot(
        self,
        bodies: BodyBudget,
        *,
        answer_bytes_held: int,
        exchanges_behind: int,
        connections_known_open: int = 0,
        connections_max: int = 0,
        websockets_max: int = 0,
    ) -> FrontendCounters:
        return FrontendCounters(
            **dataclasses.asdict(self),
            connections_known_open=connections_known_open,
            connections_max=connections_max,
            websockets_max=websockets_max,
            request_body_bytes_held=bodies.bytes_held,
            request_body_bytes_total=bodies.bytes_total,
            answer_bytes_held=answer_bytes_held,
            exchanges_behind=exchanges_behind,
        )


def show_counters(metrics: Metrics, read: Callable[[], FrontendCounters]) -> None:
    """Update `metrics` from the counters of a front end at each scrape. Call this once per front end.

    Args:
        metrics: the registry to update.
        read: returns the current counters of the front end.
    """
    shown: dict[tuple[str, str], int] = {}

    def show() -> None:
        counters = read()
        metrics.connections_open.set(counters.connections_open)
        metrics.connections_known_open.set(counters.connections_known_open)
        metrics.connections_max.set(counters.connections_max)
        metrics.clients_slow.set(counters.exchanges_behind)
        metrics.answer_bytes_held.set(counters.answer_bytes_held)
        metrics.request_body_bytes_held.set(counters.request_body_bytes_held)
        metrics.websockets_open.set(counters.websockets_open)
        metrics.websockets_max.set(counters.websockets_max)
        # Counters of prometheus_client have no setter. So the increase since the last scrape is added.
        totals = {
            "connections_total": counters.connections_total,
            "accepts_failed_total": counters.accepts_failed_total,
            "clients_left_total": counters.exchanges_left_total,
            "clients_stalled_total": counters.exchanges_stalled_total,
            "request_body_bytes_total": counters.request_body_bytes_total,
            "websockets_total": counters.websockets_total,
            "websocket_messages_received_total": counters.websocket_messages_received_total,
            "websocket_messages_sent_total": counters.websocket_messages_sent_total,
            "websocket_bytes_received_total": counters.websocket_bytes_received_total,
            "websocket_bytes_sent_total": counters.websocket_bytes_sent_total,
        }
        for name, value in totals.items():
            getattr(metrics, name).inc(value - shown.get((name, ""), 0))
            shown[name, ""] = value
        for name in ("connections_refused_total", "streams_refused_total"):
            for reason, value in getattr(counters, name).items():
                getattr(metrics, name).labels(reason).inc(value - shown.get((name, reason), 0))
                shown[name, reason] = value

    metrics.on_scrape(show)
