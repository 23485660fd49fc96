"""The client side of an HTTP connection: the interface for all HTTP versions, and HTTP/1.1. No I/O.

The owner of the network stream reads and writes the bytes, in pieces of any size. `receive` calls the listeners of the
responses whose bytes arrive.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple, Protocol

import h11

__all__ = ["Fields", "HttpClientProtocol", "ResponseEnd", "ResponseListener", "ResponseResult", "Http1ClientProtocol"]


Fields = list[tuple[str, str]]


class ResponseResult(enum.Enum):
    """The ways in which a response can end."""

    COMPLETE = "complete"
    RESET = "reset"  # The server reset the HTTP/2 stream.
    UNPROCESSED = "unprocessed"  # The server sent GOAWAY and did not process the request.
    DISCONNECTED = "disconnected"  # The connection ended before the response was complete.


class ResponseEnd(NamedTuple):
    """End of a response.

    Attributes:
        result: How the response ended.
        error: Name of an HTTP/2 error, or "" if there was none.
        was_request_sent: False if the request's body was not completely sent. The rest will not be sent any more.
    """

    result: ResponseResult
    error: str = ""
    was_request_sent: bool = True


class ResponseListener(Protocol):
    """Receives one response. HttpClientProtocol.receive calls its methods, which must not wait or raise."""

    def on_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Receive the final status and the header fields.

        Args:
            status: HTTP status, 200 or more.
            fields: Header fields without pseudo-headers. Names are in lower case.
        """

    def on_body(self, data: bytes) -> None: ...

    def on_end(self, end: ResponseEnd) -> None:
        """Receive the end of the response. Called once, unless the client has reset the request.

        Args:
            end: How the response ended.
        """


class HttpClientProtocol(Protocol):
    """The client's state of one connection. Each request has a number, which is never reused."""

    def begin(self, method: str, path: str, fields: Fields, listener: ResponseListener, *, has_body: bool) -> int:
        """Begin a request: queue its head for sending.

        Args:
            method: HTTP method.
            path: Path with query.
            fields: Header fields without host and pseudo-headers.
            listener: Receives the response.
            has_body: True if `send_body` follows.

        Returns:
            The number of the request.
        """

    def send_body(self, number: int, data: bytes, *, is_last: bool) -> None:
        """Append data to the body of a request. Does nothing if the response has ended.

        Data beyond the server's flow control window waits until the server gives credit.

        Args:
            number: Number of the request.
            data: Bytes to send.
            is_last: True if the body ends with this data.
        """

    def unsent_bytes(self, number: int) -> int:
        """Return how many bytes of a request's body wait for the server's credit.

        Args:
            number: Number of the request.
        """

    def reset(self, number: int) -> bool:
        """Queue a reset, which informs the server that the client does not want the response. The listener gets no
        further calls.

        Args:
            number: Number of the request.

        Returns:
            False if the protocol has no reset. Then the caller must close the connection.
        """

    def withhold_credit(self, number: int) -> bool:
        """Stop giving credit for a response, so that the server can send only the rest of its window.

        Args:
            number: Number of the request.

        Returns:
            False if the protocol has no flow control.
        """

    def grant_credit(self, number: int) -> None:
        """Give credit for a response again, after `withhold_credit`.

        Args:
            number: Number of the request.
        """

    def receive(self, data: bytes) -> None:
        """Process received bytes.

        Args:
            data: Received bytes, or b"" if the connection has ended.

        Raises:
            h11.RemoteProtocolError: the server violated HTTP/1.1. The connection is unusable.
            h2.exceptions.ProtocolError: the server violated HTTP/2. The connection is unusable.
        """

    def pop_unsent(self) -> bytes:
        """Remove and return the bytes to send now. The caller must send them."""


INTERIM_RESPONSES_MAX = 100
"""Maximum number of heads with a status of 1xx before a response. Real servers send one or two. h11 accepts any number.
"""


class Http1ClientProtocol:
    """An HttpClientProtocol for HTTP/1.1 on h11. Requests may be pipelined. Responses arrive in the order of the
    requests. Each request has its own parser.

    The only flow control is that of the transport. A request cannot be reset: to stop a response, the caller closes the
    connection.

    Args:
        authority: Value of the host header.

    Attributes:
        informational_count: Number of responses such as 100 Continue, which are not passed to listeners.
    """

    def __init__(self, *, authority: str) -> None:
        self.informational_count = 0
        self._authority = authority
        self._number = 0
        self._unsent = b""
        self._waiting: deque[_Request] = deque()
        self._last: _Request | None = None

    @property
    def waiting_count(self) -> int:
        """Return the number of requests whose response has not ended."""
        return len(self._waiting)

    def begin(self, method: str, path: str, fields: Fields, listener: ResponseListener, *, has_body: bool) -> int:
        self._number += 1
        request = self._last = _Request(self._number, listener)
        self._waiting.append(request)
        self._send(request, h11.Request(method=method, target=path, headers=[("host", self._authority), *fields]))
        if not has_body:
            self._send(request, h11.EndOfMessage())
        return request.number

    def send_body(self, number: int, data: bytes, *, is_last: bool) -> None:
        request = self._last
        assert request is not None
        assert request.number == number, "bodies of two requests at a time"
        if request not in self._waiting:
            return
        if data:
            self._send(request, h11.Data(data=data))
        if is_last:
            self._send(request, h11.EndOfMessage())

    def unsent_bytes(self, number: int) -> int:
        return 0

    def reset(self, number: int) -> bool:
        return False

    def withhold_credit(self, number: int) -> bool:
        return False

    def grant_credit(self, number: int) -> None:
        pass

    def receive(self, data: bytes) -> None:
        is_end = not data
        while self._waiting:
            request = self._waiting[0]
            request.parser.receive_data(data)
            try:
                is_whole = self._read_events(request)
            except h11.RemoteProtocolError:
                if not is_end:
                    raise
                while self._waiting:
                    self._end(ResponseResult.DISCONNECTED)
                return
            if not is_whole:
                return
            data = request.parser.trailing_data[0]
            self._end(ResponseResult.COMPLETE)
            if not data and not is_end:
                return
        if data:
            raise h11.RemoteProtocolError(f"the server sent {bytes(data[:80])!r} without a request")

    def pop_unsent(self) -> bytes:
        unsent, self._unsent = self._unsent, b""
        return unsent

    def _send(self, request: _Request, event: h11.Event) -> None:
        self._unsent += request.parser.send(event) or b""

    def _read_events(self, request: _Request) -> bool:
        """Pass the events of h11 to the listener. Return False if the response has not ended."""
        while True:
            event = request.parser.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED):
                return False
            if isinstance(event, h11.InformationalResponse):
                self.informational_count += 1
                request.interim_count += 1
                if request.interim_count > INTERIM_RESPONSES_MAX:
                    raise h11.RemoteProtocolError(f"more than {INTERIM_RESPONSES_MAX} interim responses came")
            elif isinstance(event, h11.Response):
                request.listener.on_head(event.status_code, list(event.headers))
            elif isinstance(event, h11.Data):
                request.listener.on_body(bytes(event.data))
            else:
                assert isinstance(event, h11.EndOfMessage), event
                return True

    def _end(self, result: ResponseResult) -> None:
        request = self._waiting.popleft()
        was_sent = request.parser.our_state is h11.DONE or request.parser.our_state is h11.MUST_CLOSE
        request.listener.on_end(ResponseEnd(result, was_request_sent=was_sent))


class _Request:
    def __init__(self, number: int, listener: ResponseListener) -> None:
        self.number = number
        self.interim_count = 0
        self.listener = listener
        self.parser = h11.Connection(h11.CLIENT)
