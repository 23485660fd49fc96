"""Streams whose requests are repeated by clients. The router finds where the stream runs, and resumes it at the
client's position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import trio

from trioserve.api.streams.cursors import (
    CHOICES_NUMBERED_MAX,
    END,
    LAST_EVENT_ID,
    RESUMABLE_HEADER,
    Position,
    parse_position,
)
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, InvalidRequest
from trioserve.proxy.peers.kept_stream import (
    KEPT_STREAMS_PATH,
    ClientLeftNotice,
    ClientLeftNotices,
    Found,
    KeptStream,
    Stream,
    StreamCall,
)
from trioserve.proxy.peers.peer_watch import Greeting, PeerWatch
from trioserve.router.peer_shares import rendezvous_score

if TYPE_CHECKING:
    from trioserve.http.exchange import Headers
    from trioserve.metrics.registry import Metrics
    from trioserve.proxy.fleet import Fleet
    from trioserve.proxy.remote_endpoint import RemoteEndpoint, RemoteRequest

__all__ = ["NoPeers", "PeerStreams", "show_peers"]

RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""Header of OpenAI's and Anthropic's clients that counts their retries."""
# The router asks at most this many endpoints for one stream, in the order of their scores for the stream's name.
SEARCHED_MAX = 1024
AT_ONCE_MAX = 32  # The router asks at most this many endpoints at the same time.
# The number of concurrent searches is limited, because each search asks every endpoint, and many clients repeat their
# requests after an overload.
SEARCHES_MAX = 64
ANSWER_SECONDS_MAX = 1.0
READER_MAX = 2**31 - 1
GONE = 410  # An endpoint sends this status for a stream that runs, but whose beginning is not kept.


class NoPeers:
    """Replaces PeerStreams in a router without peers. No other router can resume its streams."""

    def greeting(self) -> Greeting:
        """Return the response that this router sends when another router checks it."""
        return Greeting(None, "")

    def described(self) -> list[dict[str, object]]:
        """Return the state of the other routers as JSON values, for operators."""
        return []

    async def stream_of(self, call: StreamCall) -> Stream | None:
        """Find the running stream of a request, or make a new one.

        Args:
            call: The request.

        Returns:
            The stream, or None if the client has the whole response.
        """
        return Stream()


class PeerStreams(NoPeers):
    """Streams of a router that has peers.

    Args:
        fleet: Endpoints of the router.
        notices: Sender of client-left notices.
        watch: State of the other routers. Clients of a router that died lately may repeat requests without a retry
            header.

    Attributes:
        found_total: Repeated requests whose stream was found running.
        recomputed_total: Repeated requests whose stream is computed again.
    """

    def __init__(self, fleet: Fleet, notices: ClientLeftNotices, watch: PeerWatch) -> None:
        self.found_total = 0
        self.recomputed_total = 0
        self._fleet = fleet
        self._notices = notices
        self._watch = watch
        self._searches = trio.CapacityLimiter(SEARCHES_MAX)

    def greeting(self) -> Greeting:
        return self._watch.greeting()

    def described(self) -> list[dict[str, object]]:
        return self._watch.described()

    async def stream_of(self, call: StreamCall) -> Stream | None:
        """Find the running stream of a request, or make a new one.

        Args:
            call: The request.

        Returns:
            The stream, or None if the client has the whole response.

        Raises:
            InvalidRequest: The header Last-Event-ID is invalid, or the stream has too many choices for ids.
        """
        if call.headers.get(RESUMABLE_HEADER) is not None:
            return Stream()  # The client resumes the stream by itself. The client may be another router.
        last_seen, choice_count = call.headers.get(LAST_EVENT_ID), call.choice_count
        if choice_count > CHOICES_NUMBERED_MAX:
            if last_seen is not None:
                raise InvalidRequest(
                    f"Last-Event-ID is set, but the stream has {choice_count} choices, and only streams with at most "
                    f"{CHOICES_NUMBERED_MAX} have ids: leave it out, and read the stream from its beginning",
                    param="Last-Event-ID",
                )
            return Stream()
        known = None if last_seen is None else parse_position(last_seen)
        if known == END:
            return None
        assert known is None or isinstance(known, Position)
        name, found = call.stream_name(), None
        if last_seen is not None or self._may_be_retry(call.headers):
            found = await self._find(call, name, takes_over=last_seen is not None)
            self.found_total += found is not None
            self.recomputed_total += found is None and known is not None
        return KeptStream(name, self._notices, known=known, found=found, choice_count=choice_count)

    def _may_be_retry(self, headers: Headers) -> bool:
        if headers.get("x-request-id") is None:
            return False  # The client does not know the id of its request, so it cannot repeat the id.
        return headers.get(RETRY_COUNT_HEADER) not in (None, "0") or self._watch.is_lost_lately()

    async def _find(self, call: StreamCall, name: str, *, takes_over: bool) -> Found | None:
        """Search for a stream.

        Args:
            call: The request.
            name: Name of the stream.
            takes_over: Whether the client knows that the stream exists. Otherwise, the search is skipped if too many
                searches run.
        """
        if takes_over:
            async with self._searches:
                return await self._search(call, name, takes_over=True)
        try:
            self._searches.acquire_nowait()
        except trio.WouldBlock:
            return None
        try:
            return await self._search(call, name, takes_over=False)
        finally:
            self._searches.release()

    async def _search(self, call: StreamCall, name: str, *, takes_over: bool) -> Found | None:
        """Ask the endpoints that serve the model, until an endpoint has the stream.

        An endpoint that does not answer in time is skipped.
        """
        states = [state for state in self._fleet.dispatch.endpoints if call.model in state.models]
        states.sort(key=lambda state: -rendezvous_score(name, state.id))
        path = f"{KEPT_STREAMS_PATH}{name}{'' if takes_over else '?unread=1'}"
        search = _Search(path, call.endpoint_headers(), name, self._notices)
        ids = [state.id for state in states[:SEARCHED_MAX]]
        try:
            async with trio.open_nursery() as nursery:
                left = iter(ids)
                for _ in range(min(AT_ONCE_MAX, len(ids))):
                    nursery.start_soon(search.ask, left, self._fleet.remote, nursery.cancel_scope)
        except BaseException:
            search.close()
            raise
        return search.found


class _Search:
    def __init__(self, path: str, headers: list[tuple[str, str]], name: str, notices: ClientLeftNotices) -> None:
        self.found: Found | None = None
        self._path = path
        self._headers = headers
        self._name = name
        self._notices = notices

    async def ask(
        self, left: Iterable[EndpointId], remote_of: Callable[[EndpointId], RemoteEndpoint], scope: trio.CancelScope
    ) -> None:
        """Ask endpoints one after another, until the stream is found. Several tasks share the iterator.

        Args:
            left: Endpoints that were not asked yet.
            remote_of: Returns the client of an endpoint.
            scope: Scope of all tasks of the search.
        """
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
                # Without this notice, the old stream would run at the same time as the new stream.
                self._notices.send(ClientLeftNotice(endpoint, self._name, READER_MAX, self._headers))
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


def show_peers(metrics: Metrics, watch: PeerWatch, streams: PeerStreams) -> None:
    """Update the metrics at every scrape. Call this once for each router.

    Args:
        metrics: Metrics of the router.
        watch: State of the other routers.
        streams: Streams whose requests clients repeated.
    """
    shown: dict[str, int] = {}

    def show() -> None:
        metrics.peers.set(watch.peer_count)
        metrics.peers_well.set(watch.well_count)
        totals = {
            "peers_lost_total": watch.lost_total,
            "streams_found_total": streams.found_total,
            "streams_recomputed_total": streams.recomputed_total,
        }
        for name, value in totals.items():
            getattr(metrics, name).inc(value - shown.get(name, 0))
            shown[name] = value

    metrics.on_scrape(show)
