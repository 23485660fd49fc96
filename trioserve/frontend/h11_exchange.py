"""One request of an HTTP/1.1 connection as an exchange. Bytes go out where they are given: TCP is the only buffer."""

from __future__ import annotations

from typing import Protocol

import h11
import trio

from trioserve.frontend.answer_state import AnswerState
from trioserve.frontend.body_budget import BodyShare
from trioserve.frontend.body_pace import BodyPace
from trioserve.frontend.exchange import BodyTimeout, Exchange, HeaderFields
from trioserve.frontend.limits import FrontendLimits
from trioserve.frontend.message_head import REASONS, RequestHead, encode_fields

__all__ = ["ExchangeOwner", "H11Exchange"]


class ExchangeOwner(Protocol):
    """What an exchange asks of its connection."""

    async def next_body_piece(self) -> bytes | None:
        """None at the end. Raises InvalidRequest when the framing is broken."""

    async def write(self, *events: h11.Event) -> None:
        """Send, or find that the client is gone or takes nothing: then the exchange's scope is cancelled."""

    async def write_chunk(self, data: bytes) -> None:
        """The same as write(h11.Data(data)) where the answer is chunked, without the way through h11, which is most of
        what an event costs and keeps no count of chunks."""

    takes_whole_answers: bool
    """Whether write_whole may be used for this request."""

    async def write_whole(self, status: int, fields: list[tuple[bytes, bytes]], body: bytes) -> None:
        """The same as writing head, body and end, after which the connection goes on; without the way through h11."""

    def body_too_slow(self) -> None:
        """To be counted: the body was given up."""

    def answer_starts(self) -> bool:
        """Whether the connection can go on after this answer."""

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
        self.answer = AnswerState(method=head.method)
        self.share = share
        self._owner = owner
        self._limits = limits
        self._body_read = False
        self._is_chunked = False

    @property
    def started(self) -> bool:
        return self.answer.started

    async def body(self) -> bytes:
        self.answer.check_body_readable()
        self.share.check_announced(self.headers)
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
            raise BodyTimeout(pace.lost)
        await trio.lowlevel.checkpoint()
        return self.share.whole()

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        fields, goes_on = self._begin(status, headers, content_length=len(body))
        if goes_on and not self.answer.bodiless and self._owner.takes_whole_answers and not _has_length(headers):
            self.answer.finish()
            await self._owner.write_whole(status, fields, body)
            return
        events: list[h11.Event] = [_response(status, fields)]
        if body and not self.answer.bodiless:
            events.append(h11.Data(data=body))
        self.answer.finish()
        await self._owner.write(*events, h11.EndOfMessage())

    async def start(self, status: int, headers: HeaderFields) -> None:
        fields, _ = self._begin(status, headers, content_length=None)
        await self._owner.write(_response(status, fields))
        self._is_chunked = self.http_version == "1.1"  # h11 sees to it, since no length is given

    async def send(self, data: bytes) -> None:
        self.answer.check_open()
        if data and not self.answer.bodiless:
            if self._is_chunked:
                await self._owner.write_chunk(data)
            else:
                await self._owner.write(h11.Data(data=data))
        else:
            await trio.lowlevel.checkpoint()

    async def finish(self) -> None:
        self.answer.finish()
        await self._owner.write(h11.EndOfMessage())

    def _begin(
        self, status: int, headers: HeaderFields, *, content_length: int | None
    ) -> tuple[list[tuple[bytes, bytes]], bool]:
        """The fields of the answer, which starts now, and whether the connection can go on after it."""
        fields = encode_fields(headers, unix_seconds=self._owner.unix_seconds(), content_length=content_length)
        self.answer.start(status)
        goes_on = self._owner.answer_starts()
        if not goes_on:
            fields.append((b"connection", b"close"))
        return fields, goes_on


def _response(status: int, fields: list[tuple[bytes, bytes]]) -> h11.Response:
    return h11.Response(status_code=status, headers=fields, reason=REASONS.get(status, b""))


def _has_length(headers: HeaderFields) -> bool:
    """Then h11 has to see that it is the body's."""
    return any(name.lower() == "content-length" for name, _ in headers)
