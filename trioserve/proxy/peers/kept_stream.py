"""One streamed request of a router that has peers: under which name its endpoint keeps the stream for another router,
and how the endpoint is told that its client has left. A router that dies says nothing, and that is what tells the two
apart.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

import msgspec

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import Draining
from trioserve.proxy.peers.farewells import Farewell
from trioserve.proxy.peers.recomputed_start import RecomputedStart

if TYPE_CHECKING:
    from trioserve.proxy.peers.farewells import Farewells
    from trioserve.proxy.peers.stream_position import Position
    from trioserve.proxy.remote_endpoint import RemoteEndpoint, RemoteRequest, RemoteResponse
    from trioserve.proxy.router_context import RouterContext

__all__ = [
    "KEEP_HEADER",
    "KEPT_HEADER",
    "KEPT_STREAMS_PATH",
    "RESUMABLE",
    "SEED_HEADER",
    "EndpointRequest",
    "Found",
    "KeptRequest",
    "KeptStream",
    "Stream",
    "reader_in",
    "stream_name",
]

KEEP_HEADER = "x-trioserve-keep"
KEPT_HEADER = "x-trioserve-kept"
SEED_HEADER = "x-trioserve-seed"
RESUMABLE = ("x-trioserve-resumable", "1")
KEPT_STREAMS_PATH = "/v1/kept_streams/"
KEY_HEADERS = frozenset({"authorization", "x-api-key"})
_READER = re.compile(r"[\d.]+;reader=(\d{1,9})")


class Found(msgspec.Struct, frozen=True):
    """A stream that another router has asked for: its endpoint, and the request that reads it, begun."""

    endpoint: EndpointId
    request: RemoteRequest
    response: RemoteResponse


class EndpointRequest(Protocol):
    """The scope of a request at an endpoint: see RemoteRequest."""

    async def begin(self) -> RemoteResponse: ...
    def end(self) -> None: ...


class Stream:
    """What a request's stream is where nobody would go on with it: nothing is asked for, and nothing said."""

    running_at: EndpointId | None = None
    """Where it runs already."""

    def request(
        self, endpoint: RemoteEndpoint, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> EndpointRequest:
        """As RemoteEndpoint.request."""
        return endpoint.request(method, target, headers, body, computes=True)

    def close(self) -> None:
        """Nobody wants it any more."""


class KeptStream(Stream):
    """name: see stream_name. known: how much of it the client has. found: it runs already."""

    def __init__(
        self,
        context: RouterContext,
        name: str,
        farewells: Farewells,
        *,
        known: Position | None,
        found: Found | None,
        choice_count: int,
    ) -> None:
        self.name = name
        self.running_at = None if found is None else found.endpoint
        self._context = context
        self._farewells = farewells
        self._known = None if known is None else known.of_choices(choice_count)
        self._found = found

    def request(
        self, endpoint: RemoteEndpoint, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> EndpointRequest:
        """The first one at the endpoint where it runs reads it; any other begins it, or goes on with it."""
        found, self._found = self._found, None
        if found is not None:
            read = self._scope(found.request, endpoint, headers, begun=found.response)
            if found.endpoint == endpoint.id:
                return read
            read.end()  # it is not given anything any more
        admission = self._context.admission
        assert admission is not None
        known = self._known
        if known is not None and not admission.has_token and not known.is_empty:
            return RecomputedStart(
                lambda sent: endpoint.request(
                    method, target, [*headers, *self._wishes(is_begun=True)], sent, computes=True
                ),
                body,
                known,
                self._context,
            )
        wishes = self._wishes(is_begun=admission.has_token)
        return self._scope(
            endpoint.request(method, target, [*headers, *wishes], body, computes=True), endpoint, headers
        )

    def close(self) -> None:
        if self._found is not None:
            self._found.request.end()

    def _scope(
        self,
        request: RemoteRequest,
        endpoint: RemoteEndpoint,
        headers: list[tuple[str, str]],
        *,
        begun: RemoteResponse | None = None,
    ) -> KeptRequest:
        own = [(name, value) for name, value in headers if name in KEY_HEADERS]  # they say who asks
        reader = None if begun is None else reader_in(begun.header(KEPT_HEADER))
        farewell = Farewell(endpoint, self.name, reader or 1, own)
        return KeptRequest(request, farewell, self._farewells, self._context, begun=begun)

    def _wishes(self, *, is_begun: bool) -> list[tuple[str, str]]:
        """is_begun: the client has a part of it. What this endpoint would keep is the rest alone, of which nobody could
        say where the client is in it."""
        seed = int.from_bytes(blake2b(self.name.encode(), digest_size=8, person=b"seed").digest(), "big")
        return [RESUMABLE, (SEED_HEADER, str(seed)), *([] if is_begun else [(KEEP_HEADER, self.name)])]


class KeptRequest:
    """One attempt at one endpoint. Leaving it before its response has ended says farewell, since its client has left or
    another endpoint goes on; unless this router is leaving. begun: its response, if that has begun."""

    def __init__(
        self,
        request: RemoteRequest,
        farewell: Farewell,
        farewells: Farewells,
        context: RouterContext,
        *,
        begun: RemoteResponse | None = None,
    ) -> None:
        self._request = request
        self._farewell: Farewell | None = farewell
        self._farewells = farewells
        self._context = context
        self._response = begun
        # Before its head has come nobody knows whether it is kept. One that has kept others may have begun by now.
        self._is_kept = farewells.keeps(farewell.endpoint.id)

    async def begin(self) -> RemoteResponse:
        response = self._response = self._response or await self._request.begin()
        reader = reader_in(response.header(KEPT_HEADER))
        self._is_kept = reader is not None
        if reader is not None and self._farewell is not None:
            self._farewell = msgspec.structs.replace(self._farewell, reader=reader)
            self._farewells.note_keeper(self._farewell.endpoint.id)
        return response

    def end(self) -> None:
        farewell, self._farewell = self._farewell, None
        has_ended = self._response is not None and self._response.has_ended
        self._request.end()
        admission = self._context.admission
        is_leaving = admission is not None and isinstance(admission.end_reason, Draining)
        if farewell is not None and self._is_kept and not has_ended and not is_leaving:
            self._farewells.say(farewell)


def stream_name(*, owner: str | None, tenant: str | None, request_id: str, path: str, body: bytes) -> str:
    """The name of the stream of this request, the same at all routers: of the caller, the request's id and what it asks
    for. So nobody gets another's stream by repeating an id, and a caller that uses an id twice gets two streams."""
    named = blake2b(digest_size=16, person=b"stream")
    for part in (owner, tenant, request_id, path):
        encoded = b"" if part is None else b"=" + part.encode("utf-8", "surrogatepass")
        named.update(len(encoded).to_bytes(8, "big") + encoded)
    named.update(body)
    return named.hexdigest()


def reader_in(kept: str | None) -> int | None:
    """Of a response's header: as which reader of its stream it is read; None: the stream is not kept."""
    match = None if kept is None else _READER.fullmatch(kept)
    return None if match is None else int(match[1])
