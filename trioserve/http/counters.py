"""What the front end counts. Connections add, metrics read a frozen snapshot; nothing here waits or decides."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import msgspec

from trioserve.http.body_budget import BodyBudget

__all__ = ["ConnectionRefusal", "FrontendCounters", "StreamRefusal", "Tally"]


class ConnectionRefusal(enum.StrEnum):
    """Which bound ended a connection. Each has its limit in limits.py, or is a rule of the protocol."""

    RESPONSES_UNREAD = "answers_unread"
    """It does not read the responses to its control frames."""
    ADDRESS = "address"
    """Its address holds as many connections as it may, and all of them are in use."""
    BODY_TIMEOUT = "body_timeout"
    """A body fell too far behind its pace. On HTTP/2 it is the stream that ends, and the connection goes on."""
    CONTROL_FRAMES = "control_frames"
    CROWDED = "crowded"
    """It was idle, or had sent half a head, while others waited for a place."""
    FRAME_WORK = "frame_work"
    """Its HTTP/2 frames cost too much CPU time."""
    FRAME_TOO_LARGE = "frame_too_large"
    HEAD_TIMEOUT = "head_timeout"
    HEAD_TOO_LARGE = "head_too_large"
    MALFORMED = "malformed"
    PING_UNANSWERED = "ping_unanswered"
    """With a stream under way, it did not answer a PING: its program forgot the stream, or does not read."""
    RESETS = "resets"
    SENT_AHEAD = "sent_ahead"
    SILENT = "silent"
    """It never said which protocol it speaks."""
    SLOW_READER = "slow_reader"
    """It took less of a response than the pace. On HTTP/2 it is the stream that ends, and the connection goes on."""
    STALLED = "stalled"
    """It takes nothing, not even from TCP."""
    TLS_HANDSHAKE = "tls_handshake"


class StreamRefusal(enum.StrEnum):
    """Why a request was turned away before its handler: REFUSED_STREAM on HTTP/2, 503 on HTTP/1.1."""

    DRAINING = "draining"
    """It came while the server was leaving, or had not come whole by then."""
    EXCHANGES_MAX = "exchanges_max"
    STREAMS_MAX = "streams_max"
    UNKNOWN_CALLERS = "unknown_callers"
    """Callers without a key hold their share of the exchanges."""


class FrontendCounters(msgspec.Struct, frozen=True, kw_only=True):
    """One moment. `_open` and `_held` can fall, `_total` counts since the server was made."""

    connections_open: int
    connections_known_open: int
    """Of those that were accepted, on which an API key was shown where keys are asked for."""
    connections_max: int
    accepts_failed_total: int
    """For want of files or memory."""
    exchanges_open: int
    exchanges_unknown_open: int
    """Of those, whose caller has shown no API key where keys are asked for."""
    exchanges_behind: int
    """Whose client is slower than its response, so that bytes wait here for it."""
    answer_bytes_held: int
    """All that wait here for clients, the responses to control frames included."""
    request_body_bytes_held: int
    request_body_bytes_total: int
    connections_total: int
    connections_http2_total: int
    connections_failed_total: int
    """Ended by our own fault; each is one line in the log."""
    connections_refused_total: Mapping[ConnectionRefusal, int]
    """Ended because a bound was reached. Every reason is there."""
    exchanges_total: int
    exchanges_left_total: int
    """Cancelled because the client left."""
    exchanges_stalled_total: int
    """Cancelled because the client took nothing for stall_seconds_max, or fell so far behind the pace."""
    exchanges_failed_total: int
    """The handler raised, or returned without a whole response."""
    streams_refused_total: Mapping[StreamRefusal, int]


@dataclasses.dataclass(slots=True)
class Tally:
    """The counts in the making; shared by all connections of a server. Names as in FrontendCounters."""

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

    def snapshot(
        self,
        bodies: BodyBudget,
        *,
        answer_bytes_held: int,
        exchanges_behind: int,
        connections_known_open: int = 0,
        connections_max: int = 0,
    ) -> FrontendCounters:
        return FrontendCounters(
            **dataclasses.asdict(self),
            connections_known_open=connections_known_open,
            connections_max=connections_max,
            request_body_bytes_held=bodies.bytes_held,
            request_body_bytes_total=bodies.bytes_total,
            answer_bytes_held=answer_bytes_held,
            exchanges_behind=exchanges_behind,
        )
