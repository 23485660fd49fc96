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

    def body_at_hand(self) -> bytes | None:
        """What is left of the body, if all of it has come already."""

    async def next_body_piece(self) -> bytes | None:
        """None at the end. Raises InvalidRequest when the framing is broken."""

    async def write(self, *events: h11.Event) -> None:
        """Send, or find that the client is gone or takes nothing: then the exchange's scope is cancelled."""

    answers_by_hand: bool
    """Whether an answer to this request after which the connection goes on may be written past h11."""

    async def write_by_hand(self, data: bytes) -> None:
        """The same as write for what is framed already: the way through h11 is most of what an event or a small answer
        costs. It may carry chunks of an answer that h11 began, since it keeps no count of them."""

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
        self._is_by_hand = False

    @property
    def started(self) -> bool:
        return self.answer.started

    async def body(self) -> bytes:
        self.answer.check_body_readable()
        self.share.check_announced(self.headers)
        if not self._body_read and (whole := self._owner.body_at_hand()) is not None:
            self.share.add(whole)
            self._body_read = True
        if self._body_read:
            await trio.lowlevel.checkpoint_if_cancelled()
            return self.share.whole()
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
        if goes_on and self._may_be_by_hand(headers):
            self.answer.finish()
            await self._owner.write_by_hand(_head(status, fields) + body)
            return
        events: list[h11.Event] = [_response(status, fields)]
        if body and not self.answer.bodiless:
            events.append(h11.Data(data=body))
        self.answer.finish()
        await self._owner.write(*events, h11.EndOfMessage())

    async def start(self, status: int, headers: HeaderFields) -> None:
        fields, goes_on = self._begin(status, headers, content_length=None)
        if goes_on and self._may_be_by_hand(headers):
            self._is_by_hand = self._is_chunked = True
            fields.append((b"transfer-encoding", b"chunked"))
            await self._owner.write_by_hand(_head(status, fields))
            return
        await self._owner.write(_response(status, fields))
        self._is_chunked = self.http_version == "1.1"  # h11 sees to it, since no length is given

    async def send(self, data: bytes) -> None:
        self.answer.check_open()
        if data and not self.answer.bodiless:
            if self._is_chunked:
                await self._owner.write_by_hand(_chunk(data))
            else:
                await self._owner.write(h11.Data(data=data))
        else:
            await trio.lowlevel.checkpoint()

    async def finish(self, last: bytes = b"") -> None:
        self.answer.finish()
        if self.answer.bodiless:
            last = b""
        if self._is_by_hand:
            await self._owner.write_by_hand((_chunk(last) if last else b"") + b"0\r\n\r\n")
        elif last:
            await self._owner.write(h11.Data(data=last), h11.EndOfMessage())
        else:
            await self._owner.write(h11.EndOfMessage())

    def _may_be_by_hand(self, headers: HeaderFields) -> bool:
        return self._owner.answers_by_hand and not self.answer.bodiless and not _has_length(headers)

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


def _head(status: int, fields: list[tuple[bytes, bytes]]) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % field for field in fields])
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, REASONS.get(status, b""), lines)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _response(status: int, fields: list[tuple[bytes, bytes]]) -> h11.Response:
    return h11.Response(status_code=status, headers=fields, reason=REASONS.get(status, b""))


def _has_length(headers: HeaderFields) -> bool:
    """Then h11 has to see that it is the body's."""
    return any(name.lower() == "content-length" for name, _ in headers)
