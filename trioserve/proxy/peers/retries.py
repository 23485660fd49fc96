"""A client that asks again for a stream that it has lost: whether it does, where the stream runs, and from where on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import trio

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, InvalidRequest
from trioserve.proxy.forwarded_headers import owner_of, request_headers
from trioserve.proxy.peers.client_events import NumberedEvents
from trioserve.proxy.peers.farewells import Farewell, Farewells
from trioserve.proxy.peers.kept_stream import KEPT_STREAMS_PATH, Found, KeptStream, Stream, stream_name
from trioserve.proxy.peers.peer_watch import Greeting, PeerWatch
from trioserve.proxy.peers.stream_position import CHOICES_NUMBERED_MAX, END, LAST_EVENT_ID, Position, parse_position
from trioserve.router.shares import rendezvous_score

if TYPE_CHECKING:
    from trioserve.proxy.remote_endpoint import RemoteEndpoint, RemoteRequest
    from trioserve.proxy.router_context import RouterContext

__all__ = ["NoPeers", "PeerStreams"]

RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""With which OpenAI's and Anthropic's clients say that they ask again."""
RESUMABLE_HEADER = "x-trioserve-resumable"
SEARCHED_MAX = 1024  # endpoints; each is asked once, those first that come first for the stream's name
AT_ONCE_MAX = 32
SEARCHES_MAX = 64  # of this router at a time: each asks every endpoint, and after an overload everybody asks again
ANSWER_SECONDS_MAX = 1.0
READER_MAX = 2**31 - 1
GONE = 410  # it runs, but its beginning is not kept


class NoPeers:
    """Of a router alone: nobody could go on with its streams."""

    def greeting(self) -> Greeting:
        """What this router says of itself to others."""
        return Greeting(None, "")

    def described(self) -> list[dict[str, object]]:
        """The other routers, for operators."""
        return []

    async def stream_of(self, context: RouterContext, raw: bytes, model: str, *, choice_count: int) -> Stream | None:
        """The stream of this request, found where it runs or new; sets what the client gets of it. None: the client
        has all of it already."""
        return Stream()


class PeerStreams(NoPeers):
    """watch: of the other routers. One that has died of late has clients who may ask here without saying so.

    found_total, again_total: retries whose stream ran somewhere, and those that are computed once more.
    """

    def __init__(self, farewells: Farewells, watch: PeerWatch) -> None:
        self.found_total = 0
        self.again_total = 0
        self._farewells = farewells
        self._watch = watch
        self._searches = trio.CapacityLimiter(SEARCHES_MAX)

    def greeting(self) -> Greeting:
        return self._watch.greeting()

    def described(self) -> list[dict[str, object]]:
        return self._watch.described()

    async def stream_of(self, context: RouterContext, raw: bytes, model: str, *, choice_count: int) -> Stream | None:
        """Raises InvalidRequest for a Last-Event-ID that is none, or where there are none."""
        headers = context.exchange.headers
        if headers.get(RESUMABLE_HEADER) is not None:
            return Stream()  # it goes on by itself: a router before this one, for example
        last_seen = headers.get(LAST_EVENT_ID)
        if choice_count > CHOICES_NUMBERED_MAX:
            if last_seen is not None:
                raise InvalidRequest(
                    f"Last-Event-ID is set, and a stream of {choice_count} choices has no ids, as one with more than "
                    f"{CHOICES_NUMBERED_MAX} has none: leave it out, and read the stream from its beginning",
                    param="Last-Event-ID",
                )
            return Stream()
        known = None if last_seen is None else parse_position(last_seen)
        if known == END:
            return None
        assert known is None or isinstance(known, Position)
        name = stream_name(
            owner=owner_of(context),
            tenant=context.named_tenant,
            request_id=context.request_id,
            path=context.exchange.path,
            body=raw,
        )
        found = None
        if last_seen is not None or self._may_be_retry(context):
            found = await self._find(context, name, model, takes_over=last_seen is not None)
            self.found_total += found is not None
            self.again_total += found is None and known is not None
        # What is computed once more begins where the client is.
        is_whole = found is not None or known is None or known.is_empty
        context.client_events = NumberedEvents(known if is_whole else None)
        return KeptStream(context, name, self._farewells, known=known, found=found, choice_count=choice_count)

    def _may_be_retry(self, context: RouterContext) -> bool:
        headers = context.exchange.headers
        if headers.get("x-request-id") is None:
            return False  # nobody knows the id that it gets, so nobody asks again with it
        return headers.get(RETRY_COUNT_HEADER) not in (None, "0") or self._watch.is_lost_lately()

    async def _find(self, context: RouterContext, name: str, model: str, *, takes_over: bool) -> Found | None:
        """takes_over: its client has said that the stream was there; otherwise it is looked for if few others are."""
        if takes_over:
            async with self._searches:
                return await self._search(context, name, model, takes_over=True)
        try:
            self._searches.acquire_nowait()
        except trio.WouldBlock:
            return None
        try:
            return await self._search(context, name, model, takes_over=False)
        finally:
            self._searches.release()

    async def _search(self, context: RouterContext, name: str, model: str, *, takes_over: bool) -> Found | None:
        """Ask the endpoints that serve the model, until one has it. One that does not answer in time has it not."""
        states = [state for state in context.fleet.dispatch.endpoints if model in state.models]
        states.sort(key=lambda state: -rendezvous_score(name, state.id))
        path = f"{KEPT_STREAMS_PATH}{name}{'' if takes_over else '?unread=1'}"
        headers = request_headers(context, None, with_body=False)
        search = _Search(path, headers, name, self._farewells)
        ids = [state.id for state in states[:SEARCHED_MAX]]
        try:
            async with trio.open_nursery() as nursery:
                left = iter(ids)
                for _ in range(min(AT_ONCE_MAX, len(ids))):
                    nursery.start_soon(search.ask, left, context.fleet.remote, nursery.cancel_scope)
        except BaseException:
            search.close()
            raise
        return search.found


class _Search:
    def __init__(self, path: str, headers: list[tuple[str, str]], name: str, farewells: Farewells) -> None:
        self.found: Found | None = None
        self._path = path
        self._headers = headers
        self._name = name
        self._farewells = farewells

    async def ask(
        self, left: Iterable[EndpointId], remote_of: Callable[[EndpointId], RemoteEndpoint], scope: trio.CancelScope
    ) -> None:
        """One endpoint after the other, of those that are left; several tasks take from the same."""
        for id in left:
            endpoint = remote_of(id)
            with trio.move_on_after(ANSWER_SECONDS_MAX):
                request = endpoint.request("GET", self._path, self._headers, b"")
                await self._begin(id, endpoint, request)
            if self.found is not None:
                scope.cancel()
                return

    async def _begin(self, id: EndpointId, endpoint: RemoteEndpoint, request: RemoteRequest) -> None:
        is_taken = False
        try:
            response = await request.begin()
            if response.status == GONE:
                # It would run on beside the one that begins anew.
                self._farewells.say(Farewell(endpoint, self._name, READER_MAX, self._headers))
            elif response.status == 200 and self.found is None:
                self.found, is_taken = Found(id, request, response), True
        except EndpointLost:
            pass
        finally:
            if not is_taken:
                request.end()

    def close(self) -> None:
        if self.found is not None:
            self.found.request.end()
