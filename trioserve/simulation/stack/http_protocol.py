"""HTTP of a simulated client. It is strict: everything that a server must not send raises AssertionError."""

from __future__ import annotations

import h2.exceptions
import h11

from trioserve.trio_tools.http2_client import Http2ClientProtocol
from trioserve.trio_tools.http_client import Fields, Http1ClientProtocol, ResponseEnd, ResponseResult

__all__ = ["Response", "StrictClient"]

AUTHORITY = "simulated"


class Response:
    """The received part of one response, as the protocol's listener.

    Attributes:
        number: number of its request.
        status: HTTP status, or None before the head.
        headers: response headers.
        body: received bytes.
        is_complete: True after the whole body.
        lost: why the rest will not come. None: it may come.
    """

    def __init__(self) -> None:
        self.number = 0
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_complete = False
        self.lost: str | None = None

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.lost is not None

    def on_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in fields}

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self, end: ResponseEnd) -> None:
        if end.result is ResponseResult.COMPLETE:
            self.is_complete = True
        elif end.result is ResponseResult.DISCONNECTED:
            self.lost = "the connection ended"
        else:
            self.lost = f"{end.result.value}: {end.error}"


class StrictClient:
    """The client's side of a connection.

    Args:
        http: 1 with any number of requests one after another, or 2 with one stream per request.
        window: bytes of a response that the server may send before it gets credit, over HTTP/2.
    """

    def __init__(self, *, http: int, window: int = 65_535) -> None:
        self._protocol: Http1ClientProtocol | Http2ClientProtocol
        if http == 1:
            self._protocol = Http1ClientProtocol(authority=AUTHORITY)
        else:
            self._protocol = Http2ClientProtocol(authority=AUTHORITY, window_bytes=window)

    def begin(self, response: Response, method: str, path: str, fields: Fields, *, has_body: bool) -> None:
        response.number = self._protocol.begin(method, path, fields, response, has_body=has_body)

    def send_body(self, response: Response, data: bytes, *, is_last: bool) -> None:
        self._protocol.send_body(response.number, data, is_last=is_last)

    def reset(self, response: Response) -> None:
        assert self._protocol.reset(response.number), "HTTP/1.1 has no reset of one request"

    def receive(self, data: bytes) -> None:
        """Process received bytes.

        Args:
            data: the bytes. Empty: the server has ended the connection, or it broke.
        """
        try:
            self._protocol.receive(data)
        except h11.RemoteProtocolError as error:
            raise AssertionError(f"the server broke HTTP/1.1: {error}") from error
        except h2.exceptions.ProtocolError as error:
            raise AssertionError(f"the server broke HTTP/2: {error}") from error
        if isinstance(self._protocol, Http1ClientProtocol):
            assert not self._protocol.informational_count, "the server sent 1xx to a client that asked for none"

    def withhold_credit(self, response: Response) -> bool:
        """Grant no further credit for a response.

        Args:
            response: the response.

        Returns:
            False if the protocol cannot do that.
        """
        return self._protocol.withhold_credit(response.number)

    def give_a_byte(self, response: Response) -> None:
        """Grant credit for one more byte. Only for HTTP/2.

        Args:
            response: the response.
        """
        assert isinstance(self._protocol, Http2ClientProtocol)
        self._protocol.give_a_byte(response.number)

    def give_credit(self, response: Response) -> None:
        self._protocol.give_credit(response.number)

    def say_goaway(self) -> None:
        """Send GOAWAY. Only for HTTP/2."""
        assert isinstance(self._protocol, Http2ClientProtocol)
        self._protocol.say_goaway()

    def unsent(self) -> bytes:
        return self._protocol.take_unsent()
