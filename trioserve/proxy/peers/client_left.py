"""Tells endpoints of streams that nobody wants any more: their clients have left, and no other router is to wait for
them. An endpoint that does not hear of it ends the stream a few seconds later by itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import TrioserveError

if TYPE_CHECKING:
    from trioserve.http.exchange import HeaderFields
    from trioserve.proxy.remote_endpoint import RemoteEndpoint

__all__ = ["Farewell", "Farewells"]

logger = logging.getLogger(__name__)

PENDING_MAX = 4096  # beyond it endpoints find out by themselves
AT_ONCE_MAX = 64  # requests on their way
SECONDS_MAX = 2.0  # by then the endpoint's own grace is nearly over
RESPONSE_BYTES_MAX = 4096


class Farewell(msgspec.Struct, frozen=True):
    """name: of the stream. reader: only if this one is its last. headers: who says so."""

    endpoint: RemoteEndpoint
    name: str
    reader: int
    headers: HeaderFields


class Farewells:
    """said_total: farewells on their way or there; dropped_total: those for which there was no room."""

    def __init__(self) -> None:
        self.said_total = 0
        self.dropped_total = 0
        self._keepers: set[EndpointId] = set()
        self._pending_count = 0
        self._nursery: trio.Nursery | None = None
        self._at_once = trio.CapacityLimiter(AT_ONCE_MAX)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; what is not sent by then is not sent."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def keeps(self, id: EndpointId) -> bool:
        """Whether this endpoint has kept a stream."""
        return id in self._keepers

    def note_keeper(self, id: EndpointId) -> None:
        self._keepers.add(id)

    def say(self, farewell: Farewell) -> None:
        """At once, and without waiting for it."""
        if self._nursery is None or self._pending_count >= PENDING_MAX:
            self.dropped_total += 1
            return
        self._pending_count += 1
        self.said_total += 1
        self._nursery.start_soon(self._send, farewell)

    async def _send(self, farewell: Farewell) -> None:
        path = f"/v1/kept_streams/{farewell.name}?reader={farewell.reader}"
        try:
            async with self._at_once:
                with trio.move_on_after(SECONDS_MAX):
                    async with farewell.endpoint.request("DELETE", path, list(farewell.headers), b"") as response:
                        await response.whole(RESPONSE_BYTES_MAX)
        except TrioserveError as error:
            logger.debug("farewell lost endpoint=%s reason=%s", farewell.endpoint.id, error)
        finally:
            self._pending_count -= 1
