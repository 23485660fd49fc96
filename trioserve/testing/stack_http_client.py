"""HTTP as a simulated client speaks it: bytes in, bytes out, no I/O. Strict: what the server may not send is an
AssertionError. Built on h11 and h2, so that somebody else has read the RFCs for it."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Protocol

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import h11

from trioserve.bench.http2 import FrameSplitter

__all__ = ["Answer", "ClientProtocol", "Http1Client", "Http2Client"]

AUTHORITY = "simulated"

Fields = list[tuple[str, str]]


class Answer:
    """What has come of one answer. lost: why nothing more will come, although it is not complete."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_complete = False
        self.lost: str | None = None

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.lost is not None


class ClientProtocol(Protocol):
    """A connection's side of it. What is to be sent comes out of `unsent`."""

    def begin(self, answer: Answer, method: str, path: str, fields: Fields, *, has_body: bool) -> None: ...

    def send_body(self, answer: Answer, data: bytes, *, is_last: bool) -> None: ...

    def reset(self, answer: Answer) -> None:
        """Only HTTP/2 can."""

    def receive(self, data: bytes) -> None:
        """Take in what came; nothing: the server has ended the connection, or it broke."""

    def withhold_credit(self, answer: Answer) -> bool:
        """Let the server send no more of this answer than it may by now. False: the protocol cannot."""

    def give_a_byte(self, answer: Answer) -> None:
        """Let it send one byte more. Only HTTP/2 can."""

    def give_credit(self, answer: Answer) -> None:
        """Let it send again."""

    def unsent(self) -> bytes: ...


class Http1Client:
    """Any number of requests behind each other, answered in their order. Each answer has a parser of its own."""

    def __init__(self) -> None:
        self._unsent = b""
        self._waiting: deque[tuple[Answer, h11.Connection]] = deque()
        self._last: tuple[Answer, h11.Connection] | None = None

    def begin(self, answer: Answer, method: str, path: str, fields: Fields, *, has_body: bool) -> None:
        parser = h11.Connection(h11.CLIENT)
        self._last = (answer, parser)
        self._waiting.append(self._last)
        self._send(parser, h11.Request(method=method, target=path, headers=[("host", AUTHORITY), *fields]))
        if not has_body:
            self._send(parser, h11.EndOfMessage())

    def send_body(self, answer: Answer, data: bytes, *, is_last: bool) -> None:
        assert self._last is not None
        asked, parser = self._last
        assert asked is answer, "bodies of two requests at a time"
        self._send(parser, h11.Data(data=data))
        if is_last:
            self._send(parser, h11.EndOfMessage())

    def reset(self, answer: Answer) -> None:
        raise AssertionError("HTTP/1.1 has no reset of one request")

    def receive(self, data: bytes) -> None:
        is_end = not data
        while self._waiting:
            answer, parser = self._waiting[0]
            parser.receive_data(data)
            try:
                self._take_events(answer, parser)
            except h11.RemoteProtocolError as error:
                if not is_end:
                    raise AssertionError(f"the server broke HTTP/1.1: {error}") from error
                for waiting, _parser in self._waiting:
                    waiting.lost = "the connection ended"
                return
            if not answer.is_complete:
                return
            self._waiting.popleft()
            data = parser.trailing_data[0]
            if not data and not is_end:
                return
        assert not data, f"the server sent {bytes(data[:80])!r}, which nobody asked for"

    def withhold_credit(self, answer: Answer) -> bool:
        return False

    def give_a_byte(self, answer: Answer) -> None:
        raise AssertionError("HTTP/1.1 has no credit")

    def give_credit(self, answer: Answer) -> None:
        pass

    def unsent(self) -> bytes:
        unsent, self._unsent = self._unsent, b""
        return unsent

    def _send(self, parser: h11.Connection, event: h11.Event) -> None:
        self._unsent += parser.send(event) or b""

    def _take_events(self, answer: Answer, parser: h11.Connection) -> None:
        while not answer.is_complete:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                return
            if isinstance(event, h11.Response):
                answer.status = event.status_code
                answer.headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                answer.body += event.data
            else:
                assert isinstance(event, h11.EndOfMessage), event
                answer.is_complete = True


class Http2Client:
    """A stream a request. window: bytes of an answer that may come before they are credited."""

    def __init__(self, *, window: int) -> None:
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        settings = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window, h2.settings.SettingCodes.ENABLE_PUSH: 0}
        self._http.local_settings = h2.settings.Settings(client=True, initial_values=settings)
        self._http.initiate_connection()
        self._answers: dict[int, Answer] = {}
        self._ids: dict[Answer, int] = {}
        self._withheld: dict[int, int] = {}  # bytes that came and are not credited, by stream
        self._frames = FrameSplitter()

    def begin(self, answer: Answer, method: str, path: str, fields: Fields, *, has_body: bool) -> None:
        stream_id = self._http.get_next_available_stream_id()
        self._answers[stream_id] = answer
        self._ids[answer] = stream_id
        pseudo = [(":method", method), (":scheme", "http"), (":authority", AUTHORITY), (":path", path)]
        self._http.send_headers(stream_id, [*pseudo, *fields], end_stream=not has_body)

    def send_body(self, answer: Answer, data: bytes, *, is_last: bool) -> None:
        self._http.send_data(self._ids[answer], data, end_stream=is_last)

    def reset(self, answer: Answer) -> None:
        self._http.reset_stream(self._ids[answer], h2.errors.ErrorCodes.CANCEL)

    def receive(self, data: bytes) -> None:
        if not data:
            for answer in self._answers.values():
                if not answer.is_over:
                    answer.lost = "the connection ended"
            return
        try:
            events = self._http.receive_data(self._frames.feed(data))
        except h2.exceptions.ProtocolError as error:
            raise AssertionError(f"the server broke HTTP/2: {error}") from error
        for event in events:
            if isinstance(event, h2.events.DataReceived):
                self._take_data(event)
            elif isinstance(event, h2.events.ResponseReceived):
                answer = self._answers[event.stream_id]
                answer.headers = {str(name): str(value) for name, value in event.headers or ()}
                answer.status = int(answer.headers.pop(":status"))
            elif isinstance(event, h2.events.StreamEnded):
                self._answers[event.stream_id].is_complete = True
            elif isinstance(event, h2.events.StreamReset):
                answer = self._answers[event.stream_id]
                if not answer.is_complete:
                    answer.lost = f"reset: {h2.errors.ErrorCodes(event.error_code or 0).name}"

    def withhold_credit(self, answer: Answer) -> bool:
        self._withheld[self._ids[answer]] = 0
        return True

    def give_a_byte(self, answer: Answer) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):  # the stream is over
            self._http.increment_flow_control_window(1, self._ids[answer])

    def give_credit(self, answer: Answer) -> None:
        stream_id = self._ids[answer]
        self._credit(stream_id, self._withheld.pop(stream_id, 0))

    def unsent(self) -> bytes:
        return self._http.data_to_send()

    def _take_data(self, event: h2.events.DataReceived) -> None:
        stream_id, byte_count = event.stream_id, event.flow_controlled_length or 0
        self._answers[stream_id].body += event.data or b""
        if stream_id in self._withheld:
            self._withheld[stream_id] += byte_count
        else:
            self._credit(stream_id, byte_count)

    def _credit(self, stream_id: int, byte_count: int) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):  # the stream is over
            self._http.acknowledge_received_data(byte_count, stream_id)
