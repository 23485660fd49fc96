"""Notices to endpoints that the client of a stream has left, so that no other router will resume the stream.

An endpoint that misses a notice ends the stream by itself some seconds later.
"""

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

__all__ = ["ClientLeftNotice", "ClientLeftNotices"]

logger = logging.getLogger(__name__)

PENDING_MAX = 4096  # more notices are dropped, and endpoints notice by themselves
AT_ONCE_MAX = 64  # notices that are sent at a time
SECONDS_MAX = 2.0  # later, the endpoint ends the stream by itself
RESPONSE_BYTES_MAX = 4096


class ClientLeftNotice(msgspec.Struct, frozen=True):
    """Notice that a client has left.

    Attributes:
        endpoint: Client of the endpoint that keeps the stream.
        name: Name of the stream, see stream_name.
        reader: Number of this router's reader. The notice counts only if it is the last reader of the stream.
        headers: Headers that identify the caller.
    """

    endpoint: RemoteEndpoint
    name: str
    reader: int
    headers: HeaderFields


class ClientLeftNotices:
    """Sender of client-left notices.

    Attributes:
        sent_total: Notices that were accepted for sending.
        dropped_total: Notices that were dropped, because too many were waiting.
    """

    def __init__(self) -> None:
        self.sent_total = 0
        self.dropped_total = 0
        self._keepers: set[EndpointId] = set()
        self._pending_count = 0
        self._nursery: trio.Nursery | None = None
        self._at_once = trio.CapacityLimiter(AT_ONCE_MAX)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send notices until cancelled. Notices that are not sent by then are dropped.

        Args:
            task_status: Reports to the parent task that notices can be sent.
        """
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def has_kept(self, id: EndpointId) -> bool:
        """Return True if the endpoint has kept a stream before.

        Args:
            id: Endpoint of the fleet.
        """
        return id in self._keepers

    def note_keeper(self, id: EndpointId) -> None:
        self._keepers.add(id)

    def send(self, notice: ClientLeftNotice) -> None:
        """Send a notice in the background. This never waits.

        Args:
            notice: Notice.
        """
        if self._nursery is None or self._pending_count >= PENDING_MAX:
            self.dropped_total += 1
            return
        self._pending_count += 1
        self.sent_total += 1
        self._nursery.start_soon(self._send, notice)

    async def _send(self, notice: ClientLeftNotice) -> None:
        path = f"/v1/kept_streams/{notice.name}?reader={notice.reader}"
        try:
            async with self._at_once:
                with trio.move_on_after(SECONDS_MAX):
                    async with notice.endpoint.request("DELETE", path, list(notice.headers), b"") as response:
                        await response.whole(RESPONSE_BYTES_MAX)
        except TrioserveError as error:
            logger.debug("client-left notice lost endpoint=%s reason=%s", notice.endpoint.id, error)
        finally:
            self._pending_count -= 1
