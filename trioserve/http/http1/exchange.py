"""One request of an HTTP/1.1 connection as an exchange. Bytes go out where they are given: TCP is the only buffer."""

from __future__ import annotations

from typing import Protocol

import trio

from trioserve.http.body_budget import BodyShare
from trioserve.http.body_pace import BodyPace
from trioserve.http.content_coding import decoded_body
from trioserve.http.exchange import Beats, BodyTimeout, Exchange, HeaderFields
from trioserve.http.http1.protocol import EncodedFields, H1Protocol, interim_response
from trioserve.http.limits import FrontendLimits
from trioserve.http.message_head import RequestHead, encode_fields
from trioserve.http.response_state import ResponseState

__all__ = ["ExchangeOwner", "H11Exchange"]


class ExchangeOwner(Protocol):
    """What an exchange asks of its connection."""

    def body_at_hand(self) -> bytes | None:
        """What is left of the body, if all of it has come already."""

    async def next_body_piece(self) -> bytes | None:
        """None at the end. Raises InvalidRequest when the framing is broken."""

    protocol: H1Protocol
    write_count: int
    """Of the connection, so far."""

    def insert(self, data: bytes) -> None:
        """Send between two writes, without waiting. Nothing happens while another write is under way."""

    async def write(self, data: bytes) -> None:
        """Send, or find that the client is gone or takes nothing: then the exchange's scope is cancelled."""

    def body_too_slow(self) -> None:
        """To be counted: the body was given up."""

    def response_starts(self) -> bool:
        """Whether the connection can go on after this response."""

    def unix_seconds(self) -> int:
        """The time of day."""


class H11Exchange(Exchange):
    """Made, and its scope entered, by the connection."""

    def __init__(self, owner: ExchangeOwner, head: RequestHead, share: BodyShare, limits: FrontendLimits) -> None:
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.http_version = head.http_version
        self.peer = head.peer
        self.scope = trio.CancelScope()
        self.response = ResponseState(method=head.method)
        self.share = share
        self._owner = owner
        self._limits = limits
        self._body_read = False
        self._beats: Beats | None = None
        self._beat_within = b""  # the body
        self._writes_seen = -1

    def expect_beats(self, beats: Beats) -> bool:
        if self.http_version != "1.1":  # older clients know no interim responses
            return False
        self._beats = beats
        self._writes_seen = self._owner.write_count
        return True

    def beat(self) -> None:
        beats, response = self._beats, self.response
        if beats is None or response.finished:
            return
        write_count = self._owner.write_count
        if write_count != self._writes_seen:
            self._writes_seen = write_count
        elif not response.started:
            self._owner.insert(interim_response(beats.fields))
        elif self._beat_within:
            self._owner.insert(self._owner.protocol.send_data(self._beat_within))

    @property
    def started(self) -> bool:
        return self.response.started

    async def body(self) -> bytes:
        self.response.check_body_readable()
        self.share.check_announced(self.headers)
        if not self._body_read and (whole := self._owner.body_at_hand()) is not None:
            self.share.add(whole)
            self._body_read = True
        if self._body_read:
            await trio.lowlevel.checkpoint_if_cancelled()
            return await decoded_body(self.share, self.headers)
        pace = BodyPace(self._limits, now=trio.current_time())
        with trio.CancelScope(deadline=pace.deadline) as patience:
            while not self._body_read:
                piece = await self._owner.next_body_piece()
                if piece is None:
                    self._body_read = True
                else:
                    self.share.add(piece)
                    patience.deadline = pace.arrived(len(piece), now=trio.current_time())
        if patience.cancelled_caught:
            self._owner.body_too_slow()
            raise BodyTimeout(pace.timeout_message)
        await trio.lowlevel.checkpoint()
        return await decoded_body(self.share, self.headers)

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        fields, is_ordinary = self._begin(status, headers, content_length=len(body), has_beats=True)
        body = b"" if self.response.bodiless else body
        data = self._owner.protocol.respond(status, fields, body, is_ordinary=is_ordinary)
        self.response.finish()
        await self._owner.write(data)

    async def start(self, status: int, headers: HeaderFields) -> None:
        if self._beats is not None and not self.response.bodiless:
            media_type = next((value for name, value in headers if name.lower() == "content-type"), "")
            self._beat_within = self._beats.within.get(media_type.partition(";")[0].strip(), b"")
        fields, is_ordinary = self._begin(status, headers, content_length=None, has_beats=bool(self._beat_within))
        is_http_1_1 = self.http_version == "1.1"
        start = self._owner.protocol.start_response
        await self._owner.write(start(status, fields, is_ordinary=is_ordinary, is_http_1_1=is_http_1_1))

    async def send(self, data: bytes) -> None:
        self.response.check_open()
        if data and not self.response.bodiless:
            await self._owner.write(self._owner.protocol.send_data(data))
        else:
            await trio.lowlevel.checkpoint()

    async def finish(self, last: bytes = b"") -> None:
        self.response.finish()
        await self._owner.write(self._owner.protocol.end_response(b"" if self.response.bodiless else last))

    def _begin(
        self, status: int, headers: HeaderFields, *, content_length: int | None, has_beats: bool
    ) -> tuple[EncodedFields, bool]:
        """The fields of the response, which starts now, and whether it is an ordinary one: see H1Protocol.respond.
        has_beats: it is whole, or beats go out within its body."""
        if self._beats is not None and has_beats:
            headers = [*headers, *self._beats.fields]
        fields = encode_fields(headers, unix_seconds=self._owner.unix_seconds(), content_length=content_length)
        self.response.start(status)
        goes_on = self._owner.response_starts()
        if not goes_on:
            fields.append((b"connection", b"close"))
        return fields, goes_on and not self.response.bodiless and not _has_length(headers)


def _has_length(headers: HeaderFields) -> bool:
    """Then h11 has to see that it is the body's."""
    return any(name.lower() == "content-length" for name, _ in headers)
