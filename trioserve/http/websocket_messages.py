"""The frames of one websocket without I/O: bytes of the client become messages within bounds. wsproto parses them.

The opening handshake is that of RFC 6455, 4.2 on HTTP/1.1, and RFC 8441 on HTTP/2.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from collections import deque

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

from trioserve.contracts.errors import Overloaded
from trioserve.http.body_budget import BodyBudget
from trioserve.http.counters import ConnectionRefusal
from trioserve.http.exchange import HeaderFields, Headers
from trioserve.http.limits import FrontendLimits
from trioserve.http.pace import BodyPace, RateBucket

__all__ = [
    "Broken",
    "MessageReader",
    "UnreadMessages",
    "accept_fields",
    "is_websocket_upgrade",
    "handshake_fault",
    "upgrade_fields",
]


# Parsing this number of frames takes about a millisecond. Then other tasks run.
FRAMES_A_PIECE_MAX = 64
MERGED_BYTES_MAX = 4096  # Pieces of a message are joined up to this size.
MESSAGE_COST_BYTES = 128  # An empty message in the queue takes about this memory.
POLICY, TOO_BIG, TRY_LATER = 1008, 1009, 1013


class Broken(Exception):
    """The client broke the protocol or a limit, so the websocket ends.

    Args:
        reason: the message for the client and the log.
        close_code: code of the close frame.
        refusal: the reason for the counters.
    """

    def __init__(self, reason: str, *, close_code: int, refusal: ConnectionRefusal) -> None:
        super().__init__(reason)
        self.close_code = close_code
        self.refusal = refusal


class UnreadMessages:
    """The messages of one websocket that its handler has not received, and their bytes in the budget of bodies.

    Args:
        budget: counts the bytes of all clients.
        limits: contains the limit of unread bytes.
    """

    def __init__(self, budget: BodyBudget, limits: FrontendLimits) -> None:
        self._budget = budget
        self._limits = limits
        self._messages: deque[tuple[str | bytes, int]] = deque()
        self._unread_bytes = 0
        self._held_bytes = 0  # The bytes in the budget: unread messages, the unfinished one, and the last one received.
        self._received_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def hold(self, byte_count: int) -> None:
        """Count bytes of an unfinished message.

        Args:
            byte_count: bytes that arrived.

        Raises:
            Broken: all clients together hold too many bytes.
        """
        try:
            self._budget.hold(byte_count)
        except Overloaded as error:
            raise Broken(str(error), close_code=TRY_LATER, refusal=ConnectionRefusal.BODIES_FULL) from None
        self._held_bytes += byte_count
        self._budget.bytes_total += byte_count

    def add(self, message: str | bytes, byte_count: int) -> None:
        """Append a whole message, whose bytes are already held.

        Args:
            byte_count: its size in bytes.

        Raises:
            Broken: the client sends too far ahead of the handler.
        """
        cost_bytes = byte_count + MESSAGE_COST_BYTES
        if self._messages and self._unread_bytes + cost_bytes > self._limits.websocket_unread_bytes_max:
            raise Broken(
                f"more than {self._limits.websocket_unread_bytes_max} bytes of messages wait for the server: wait for "
                "its replies",
                close_code=POLICY,
                refusal=ConnectionRefusal.SENT_AHEAD,
            )
        self._messages.append((message, byte_count))
        self._unread_bytes += cost_bytes

    def take(self) -> str | bytes:
        """Remove and return the oldest message. Its bytes stay counted until `release_received`."""
        message, byte_count = self._messages.popleft()
        self._unread_bytes -= byte_count + MESSAGE_COST_BYTES
        self._received_bytes = byte_count
        return message

    def release_received(self) -> None:
        """Return the bytes of the message that the handler received last."""
        self._budget.release(self._received_bytes)
        self._held_bytes -= self._received_bytes
        self._received_bytes = 0

    def release(self) -> None:
        """Drop all messages, and return their bytes. Further calls do nothing."""
        self._budget.release(self._held_bytes)
        self._held_bytes = self._received_bytes = self._unread_bytes = 0
        self._messages.clear()


class MessageReader:
    """Reads the client's frames, and encodes the frames of the server.

    Args:
        unread: gets the whole messages.
        limits: limits on messages and frames.
        now: current time, in Trio's seconds.

    Attributes:
        replies: encoded frames that answer the client's pings and its close frame.
        message_count: number of whole messages that arrived.
        closed_by_client: True once the client's close frame arrived.
        pace: deadline of the unfinished message, or None.
    """

    def __init__(self, unread: UnreadMessages, limits: FrontendLimits, *, now: float) -> None:
        self.replies = bytearray()
        self.message_count = 0
        self.closed_by_client = False
        self.pace: BodyPace | None = None
        self._unread = unread
        self._limits = limits
        self._protocol = Connection(ConnectionType.SERVER)
        self._pieces: list[str | bytes] = []
        self._message_bytes = 0
        self._fragment_count = 0
        self._frames_without_content = RateBucket(
            per_second=limits.websocket_control_frames_per_second_max,
            burst=limits.websocket_control_frames_burst_max,
            now=now,
        )

    @property
    def is_closing(self) -> bool:
        """True once either side has sent a close frame."""
        return self._protocol.state is not ConnectionState.OPEN

    def feed(self, data: bytes | bytearray) -> None:
        """Keep bytes of the client for `parse`.

        Args:
            data: the next bytes.
        """
        if not self.closed_by_client:
            self._protocol.receive_data(bytes(data))

    def parse(self, now: float) -> bool:
        """Read a limited number of frames.

        Args:
            now: current time.

        Returns:
            True if there may be more whole frames.

        Raises:
            Broken: the client broke the protocol or a limit.
        """
        count = 0
        for event in itertools.islice(self._protocol.events(), FRAMES_A_PIECE_MAX):
            count += 1
            if isinstance(event, (TextMessage, BytesMessage)):
                self._add_piece(event, now)
            elif isinstance(event, CloseConnection):
                if self._protocol.state in (ConnectionState.OPEN, ConnectionState.LOCAL_CLOSING):
                    # The client has not closed: wsproto reports an error of the protocol.
                    error_code = int(event.code)
                    raise Broken(event.reason or "", close_code=error_code, refusal=ConnectionRefusal.MALFORMED)
                self.closed_by_client = True
                if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                    self.replies += self._protocol.send(event.response())
                return False
            else:
                self._count_frame(now)
                if isinstance(event, Ping) and not self.is_closing:
                    self.replies += self._protocol.send(event.response())
        return count == FRAMES_A_PIECE_MAX

    def message_frame(self, message: str | bytes) -> bytes:
        """Encode a message as one frame.

        Args:
            message: text or binary.
        """
        if isinstance(message, str):
            return self._protocol.send(TextMessage(data=message))
        return self._protocol.send(BytesMessage(data=message))

    def ping_frame(self) -> bytes:
        return self._protocol.send(Ping())

    def close_frame(self, code: int, reason: str) -> bytes:
        """Encode the close frame of the server, and empty bytes if it was already sent.

        Args:
            code: the close code.
            reason: the text for the client.
        """
        return b"" if self.is_closing else self._protocol.send(CloseConnection(code=code, reason=reason))

    def _add_piece(self, event: TextMessage | BytesMessage, now: float) -> None:
        """Append a piece of a frame's content to the unfinished message."""
        if self.is_closing:
            return  # The server has sent its close frame, and reads only until the client's close frame.
        data = event.data if isinstance(event.data, str) else bytes(event.data)
        byte_count = len(data) if isinstance(data, bytes) or data.isascii() else len(data.encode("utf-8"))
        if byte_count == 0 and event.frame_finished:
            self._count_frame(now)
        limits = self._limits
        if self._message_bytes + byte_count > limits.websocket_message_bytes_max:
            raise Broken(
                f"a message has more than {limits.websocket_message_bytes_max} bytes",
                close_code=TOO_BIG,
                refusal=ConnectionRefusal.MESSAGE_TOO_LARGE,
            )
        self._unread.hold(byte_count)
        self._message_bytes += byte_count
        if event.message_finished:
            self._unread.add(_joined(self._pieces, data), self._message_bytes)
            self.message_count += 1
            self._pieces = []
            self._message_bytes = self._fragment_count = 0
            self.pace = None
            return
        if self._pieces and len(self._pieces[-1]) + len(data) <= MERGED_BYTES_MAX:
            # Short pieces are joined, because a list of single bytes would take fifty times the memory of the message.
            self._pieces[-1] = _joined(self._pieces[-1:], data)
        else:
            self._pieces.append(data)
        self._fragment_count += event.frame_finished
        if self._fragment_count >= limits.websocket_fragments_max:
            raise Broken(
                f"a message has more than {limits.websocket_fragments_max} fragments",
                close_code=POLICY,
                refusal=ConnectionRefusal.FRAGMENTS,
            )
        if self.pace is None:
            self.pace = BodyPace(limits, now=now)
        self.pace.arrived(byte_count, now=now)

    def _count_frame(self, now: float) -> None:
        if not self._frames_without_content.take(now):
            raise Broken(
                "too many frames without content",
                close_code=POLICY,
                refusal=ConnectionRefusal.CONTROL_FRAMES,
            )


def _joined(pieces: list[str | bytes], last: str | bytes) -> str | bytes:
    """Join the pieces of one message. All of them have the same type."""
    if not pieces:
        return last
    if isinstance(last, str):
        return "".join([*pieces, last])  # type: ignore[list-item]
    return b"".join([*pieces, last])  # type: ignore[list-item]


VERSION = "13"
KEY_BYTES = 16
SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3 defines this text.


def is_websocket_upgrade(method: str, http_version: str, headers: Headers) -> bool:
    """Return True if an HTTP/1.1 request asks to upgrade its connection to a websocket.

    Args:
        method: method of the request.
        http_version: version of the request.
        headers: header fields of the request.
    """
    return (
        method == "GET"
        and http_version == "1.1"
        and "websocket" in _words(headers.get("upgrade"))
        and "upgrade" in _words(headers.get("connection"))
    )


def handshake_fault(headers: Headers, *, has_key: bool) -> tuple[int, str, HeaderFields] | None:
    """Check the fields of a request that opens a websocket.

    Args:
        headers: header fields of the request.
        has_key: True on HTTP/1.1. Over HTTP/2, the handshake has no key.

    Returns:
        Status, message and header fields of the response that refuses the websocket, or None.
    """
    version = headers.get("sec-websocket-version")
    if version != VERSION:
        message = f"sec-websocket-version is {(version or '')[:40]!r}, allowed is {VERSION}"
        return 426, message, (("sec-websocket-version", VERSION),)
    if has_key and not _is_key(headers.get("sec-websocket-key") or ""):
        return 400, f"sec-websocket-key must be {KEY_BYTES} bytes in base64: use a websocket client", ()
    if "transfer-encoding" in headers or (headers.get("content-length") or "0") != "0":
        return 400, "the request opens a websocket and has a body: send the body as a message", ()
    return None


def accept_fields(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the header fields that accept a websocket on HTTP/1.1.

    Args:
        headers: header fields of the request, which `handshake_fault` has checked.
    """
    key = (headers.get("sec-websocket-key") or "").encode("ascii")
    token = base64.b64encode(hashlib.sha1(key + SUFFIX, usedforsecurity=False).digest())
    return [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", token)]


def upgrade_fields(status: int) -> list[tuple[bytes, bytes]]:
    """Return the header fields that name the required protocol in a response 426 on HTTP/1.1 (RFC 9110, 15.5.22).

    Args:
        status: status of any response. Other responses get no fields.
    """
    return [(b"upgrade", b"websocket"), (b"connection", b"Upgrade")] if status == 426 else []


def _is_key(key: str) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == KEY_BYTES
    except (binascii.Error, ValueError):
        return False


def _words(value: str | None) -> list[str]:
    return [word.strip().lower() for word in (value or "").split(",")]
