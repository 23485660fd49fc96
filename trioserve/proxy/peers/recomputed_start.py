"""A stream of which nothing is left but what its client has: its tokens are computed once more up to there, and it goes
on behind them, if they are the same.

The client says only how many tokens it has, and their check. So an endpoint is asked for the response from its
beginning; nobody is shown that. Where its tokens pass the check, the endpoint is asked for the rest as for any stream
that goes on (`resume`): its prompt and these tokens are in the prefix cache by then. The seed is the one with which the
stream began, since all routers choose the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from trioserve.contracts.errors import EndpointLost
from trioserve.proxy.event_splitter import EventSplitter
from trioserve.proxy.peers.client_events import NumberedEvents
from trioserve.proxy.peers.not_the_same import not_the_same
from trioserve.proxy.peers.stream_position import Position, PositionKeeper
from trioserve.proxy.routed_body import rewritten

if TYPE_CHECKING:
    from trioserve.proxy.remote_endpoint import RemoteRequest, RemoteResponse
    from trioserve.proxy.router_context import RouterContext

__all__ = ["RecomputedStart"]

RESUME_HEADER = "x-trioserve-resume"
_ID = re.compile(rb"^id: (\d{1,9}):(\d{1,9}(?:,\d{1,9})*)?(!?)(?: ([^\r\n]*))?\r?$", re.MULTILINE)
_END = re.compile(rb"^id: \.\r?$", re.MULTILINE)


class RecomputedStart:
    """As a RemoteRequest. ask: sends a body to the endpoint. body: of the request as the client sent it. known: where
    the client is."""

    def __init__(
        self, ask: Callable[[bytes], RemoteRequest], body: bytes, known: Position, context: RouterContext
    ) -> None:
        self._ask = ask
        self._body = body
        self._known = known
        self._context = context
        self._request: RemoteRequest | None = None

    async def begin(self) -> RemoteResponse:
        """The rest of the response, or an error that stands for it. Raises Refusal (409) for another response, and
        EndpointLost."""
        request = self._request = self._ask(self._body)
        response = await request.begin()
        if response.status != 200:
            return response
        told = response.header(RESUME_HEADER)
        if told is None:
            raise not_the_same("the endpoint does not tell its tokens")
        start = _Start(self._known)
        splitter = EventSplitter()
        while not start.is_there:
            piece = await response.next_piece()
            if piece is None:
                raise EndpointLost("the endpoint ended a response that it was to compute once more")
            start.note(splitter.feed(piece))
        self.end()
        resume = {**msgspec.json.decode(told, type=dict[str, object]), **start.resume(_begun(self._body))}
        self._context.client_events = NumberedEvents(keeper=start.keeper())
        if self._context.continuation is not None:
            self._context.continuation.know(msgspec.json.encode(resume))
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
    """What the request says itself that its client has: its response began elsewhere."""
    return msgspec.json.decode(body, type=_Body).resume or _Begun()


class _Start:
    """The tokens of a response that is computed once more, until the client's are all there."""

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
        """Raises Refusal for a response that does not come to where the client is."""
        for match in _ID.finditer(events):
            choice = int(match[1])
            if choice < len(self._token_ids) and not self.is_there:
                self._token_ids[choice] += match[2].split(b",") if match[2] else []
                self._finished[choice] = self._finished[choice] or bool(match[3])
                self._state = match[4] if match[4] is not None else self._state
        if not self.is_there and _END.search(events):
            raise not_the_same("it ends before it comes to where the client is")
        if self.is_there:
            self._check()

    def _check(self) -> None:
        exact = [len(tokens) for tokens in self._token_ids]
        for tokens, count in zip(self._token_ids, self._known.counts, strict=True):
            del tokens[count:]
        position = self.keeper().position
        if position.check != self._known.check:
            raise not_the_same("its tokens are others")
        ended = zip(exact, self._known.counts, self._known.finished, strict=True)
        if any(finishes and had != count for had, count, finishes in ended):
            raise not_the_same("a choice ends elsewhere")
        if self._state is not None and self._known.state is None and exact != list(self._known.counts):
            raise not_the_same("its events come in other groups")

    def resume(self, begun: _Begun) -> dict[str, object]:
        """As the field of a body says it. begun: what had come before the response began here."""
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
        """At the place where the client is."""
        keeper = PositionKeeper()
        state = "" if self._known.state is None else f" {self._known.state}"
        for choice, (tokens, finishes) in enumerate(zip(self._token_ids, self._known.finished, strict=True)):
            keeper.note(b"%d:%b%b%b" % (choice, b",".join(tokens), b"!" if finishes else b"", state.encode()))
        return keeper
