"""Context of a request, with the parts of the server that outlive a request."""

from __future__ import annotations

from dataclasses import dataclass

from trioserve.api.batches.batches import Batches
from trioserve.api.page import Page
from trioserve.api.request_context import RequestContext, RequestServices
from trioserve.api.responses.background import BackgroundResponses
from trioserve.api.responses.connection import ResponseConnections
from trioserve.api.streams.detached_streams import DetachedStreams, RouterStreams
from trioserve.trio_tools.fair_slots import FairSlots

__all__ = ["AppServices", "ServerContext", "ServerServices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerServices:
    """Parts of the server whose work outlives the request that began it.

    Attributes:
        background: responses that run without a client.
        connections: websocket connections of the Responses API.
        batches: batches that have not ended.
        batch_endpoints: paths that a batch may use.
        detached: streams that clients may leave and resume.
        router_streams: streams that continue at another router if their router dies.
        uploads: bounds how many uploaded forms are parsed at a time.
        page: the live page.
    """

    background: BackgroundResponses
    connections: ResponseConnections
    batches: Batches
    batch_endpoints: tuple[str, ...]
    detached: DetachedStreams
    router_streams: RouterStreams
    uploads: FairSlots
    page: Page


@dataclass(frozen=True, slots=True, kw_only=True)
class AppServices(RequestServices):
    """All parts of a server that its handlers use.

    Attributes:
        server: parts that outlive the request.
    """

    server: ServerServices


class ServerContext(RequestContext):
    """Context of a request, with the parts of the server that outlive the request. Route handlers get this context."""

    services: AppServices

    @property
    def server(self) -> ServerServices:
        return self.services.server
