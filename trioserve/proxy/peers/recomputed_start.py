"""Resumes a stream that no endpoint has any more. An endpoint computes the beginning again, and the router compares it
with the client's part.

The client only knows the number and the checksum of its tokens. So an endpoint computes the response from its
beginning, and the router does not forward it to the client. If the tokens match the checksum, the router requests the
rest from the endpoint, as for any stream that resumes (`resume`). At that time, the endpoint's prefix cache has the
prompt and the tokens. The seed is the same as before, because all routers derive it from the stream's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from trioserve.api.streams.cursors import GROUP_ID, RESUME_HEADER, Position, PositionKeeper
from trioserve.contracts.errors import EndpointLost
from trioserve.proxy.routed_body import rewritten
from trioserve.proxy.streams.client_events import NumberedEvents, not_the_same
from trioserve.proxy.streams.event_splitter import EventSplitter

if TYPE_CHECKING:
    from trioserve.proxy.remote_endpoint import RemoteRequest, RemoteResponse

__all__ = ["OnRecomputed", "RecomputedStart"]

OnRecomputed = Callable[[NumberedEvents, bytes], None]

_ID = re.compile(rb"^id: " + GROUP_ID.pattern + rb"\r?$", re.MULTILINE)
_END = re.compile(rb"^id: \.\r?$", re.MULTILINE)


class RecomputedStart:
    """Request that recomputes the beginning of a stream. It has the interface of a RemoteRequest.

    Args:
        ask: Makes a request to the endpoint with a body.
        body: Body of the request as the client sent it.
        known: Position of the client.
        on_recomputed: Called with the events that the client gets from here on, and with the field `resume` as JSON.
    """

    def __init__(
        self, ask: Callable[[bytes], RemoteRequest], body: bytes, known: Position, on_recomputed: OnRecomputed
    ) -> None:
        self._ask = ask
        self._body = body
        self._known = known
        self._on_recomputed = on_recomputed
        self._request: RemoteRequest | None = None

    async def begin(self) -> RemoteResponse:
        """Recompute the beginning and request the rest.

        Returns:
            Response with the rest, or an error response of the endpoint.

        Raises:
            Refusal: The endpoint computed another response (409).
            EndpointLost: The connection broke.
        """
        request = self._request = self._ask(self._body)
        response = await request.begin()
        if response.status != 200:
            return response
        resume_values = response.header(RESUME_HEADER)
        if resume_values is None:
            raise not_the_same("the endpoint does not report its tokens")
        start = _Start(self._known)
        splitter = EventSplitter()
        while not start.is_there:
            piece = await response.next_piece()
            if piece is None:
                raise EndpointLost("the endpoint ended a response before the client's position")
            start.note(splitter.feed(piece))
        self.end()
        resume = {**msgspec.json.decode(resume_values, type=dict[str, object]), **start.resume(_begun(self._body))}
        self._on_recomputed(NumberedEvents(keeper=start.keeper()), msgspec.json.encode(resume))
        self._request = self._ask(rewritten(self._body, {"resume": resume}))
        return await self._request.begin()

    def end(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.end()


class _Begun(msgspec.Struct):
    token_ids: list[list[int]] = []
    finished: list[bool] = []


class _Body(msgspec.Struct):
    resume: _Begun | None = None


def _begun(body: bytes) -> _Begun:
    """Return the part of the response that the request itself contains, because it resumes an earlier response."""
    return msgspec.json.decode(body, type=_Body).resume or _Begun()


class _Start:
    """Tokens of a response that is computed again, up to the client's position."""

    def __init__(self, known: Position) -> None:
        self._known = known
        self._token_ids: list[list[bytes]] = [[] for _ in known.counts]
        self._finished = [False for _ in known.counts]
        self._state: bytes | None = None

    @property
    def is_there(self) -> bool:
        return all(
            len(tokens) >= count and (has_finished or not finishes)
            for tokens, count, has_finished, finishes in zip(
                self._token_ids, self._known.counts, self._finished, self._known.finished, strict=True
            )
        )

    def note(self, events: bytes) -> None:
        """Record events.

        Raises:
            Refusal: The response does not reach the client's position, or differs from the client's part.
        """
        for match in _ID.finditer(events):
            choice = int(match[1])
            if choice < len(self._token_ids) and not self.is_there:
                self._token_ids[choice] += match[2].split(b",") if match[2] else []
                self._finished[choice] = self._finished[choice] or bool(match[3])
                self._state = match[4] if match[4] is not None else self._state
        if not self.is_there and _END.search(events):
            raise not_the_same("it ends before the client's position")
        if self.is_there:
            self._check()

    def _check(self) -> None:
        exact = [len(tokens) for tokens in self._token_ids]
        for tokens, count in zip(self._token_ids, self._known.counts, strict=True):
            del tokens[count:]
        position = self.keeper().position
        if position.check != self._known.check:
            raise not_the_same("its tokens differ")
        ended = zip(exact, self._known.counts, self._known.finished, strict=True)
        if any(finishes and had != count for had, count, finishes in ended):
            raise not_the_same("a choice ends at another token")
        if self._state is not None and self._known.state is None and exact != list(self._known.counts):
            raise not_the_same("its events are grouped differently")

    def resume(self, begun: _Begun) -> dict[str, object]:
        """Return the field `resume` of a body.

        Args:
            begun: Part of the response that the request itself contains.
        """
        count = len(self._token_ids)
        before = [*begun.token_ids, *([] for _ in range(count))][:count]
        ended = [*begun.finished, *(False for _ in range(count))][:count]
        token_ids = [[*known, *map(int, tokens)] for known, tokens in zip(before, self._token_ids, strict=True)]
        fields: dict[str, object] = {
            "token_ids": token_ids,
            "finished": [was or now for was, now in zip(ended, self._known.finished, strict=True)],
        }
        state = self._known.state or (None if self._state is None else self._state.decode("latin-1"))
        return fields if state is None else {**fields, "state": state}

    def keeper(self) -> PositionKeeper:
        """Return a keeper at the client's position."""
        keeper = PositionKeeper()
        state = "" if self._known.state is None else f" {self._known.state}"
        for choice, (tokens, finishes) in enumerate(zip(self._token_ids, self._known.finished, strict=True)):
            keeper.note(b"%d:%b%b%b" % (choice, b",".join(tokens), b"!" if finishes else b"", state.encode()))
        return keeper
