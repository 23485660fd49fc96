"""Reports that an endpoint pushes: its load, and the blocks in its prefix cache.

A load report includes the requests that had arrived when the endpoint made the report. The report does not cover
requests that are still on their way. Therefore a router that requests a report notes which requests it has sent before.
The router relies on the report only for these requests.

A pushed report is treated as the response to an imaginary request. The time of this request is computed as follows. The
router requests a report once. Each later report has a time of the endpoint's own clock, which gives the time since the
requested report. So a pushed report is used exactly like a requested report. The two clocks may drift apart, so
CLOCK_DRIFT of the passed time is subtracted, and the router requests a report again after ANCHOR_SECONDS. A restarted
server has another clock. Its pushed reports are ignored until the router has requested a report again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
import trio
from msgspec import UNSET

from trioserve.contracts.endpoint import (
    BlocksRemoved,
    BlocksStored,
    EndpointLoad,
    KvEvent,
    LoadReported,
    ResidencySnapshot,
)
from trioserve.contracts.errors import EndpointLost
from trioserve.contracts.ids import HASH_SCHEME, BlockHash
from trioserve.proxy.remote_endpoint import RemoteEndpoint, RemoteResponse
from trioserve.proxy.streams.client_events import BrokenEvents, EventLines
from trioserve.router.policies import Policy
from trioserve.router.residency import BLOCKS_MAX

__all__ = [
    "ANCHOR_SECONDS",
    "RESIDENCY_RETRY_SECONDS_MAX",
    "RETRY_SECONDS_MIN",
    "SILENT_SECONDS",
    "STALE_SECONDS",
    "PushedLoad",
    "watch_residency",
]

logger = logging.getLogger(__name__)

LOAD_EVENTS_PATH = "/kv_events?load=only"
# An endpoint always pushes its load once a second. After a longer silence, the router requests the load.
SILENT_SECONDS = 1.5
BROKEN_SECONDS = 10.0  # After this silence, the router closes the connection and opens a new connection.
ANCHOR_SECONDS = 30.0
CLOCK_DRIFT = 0.001  # CLOCK_DRIFT is twice the maximum slew rate of clocks.
RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 60.0


class PushedLoad:
    """Pushed loads of one endpoint. Times are seconds of Trio's clock."""

    def __init__(self) -> None:
        self._clock: str | None = None
        self._asked_at = 0.0
        self._anchored_at = 0.0
        self._came_at: float | None = None
        self._can_push = trio.Event()

    def note_asked(self, load: EndpointLoad, asked_at: float) -> None:
        """Record a load that the router has asked for.

        Args:
            load: Report of the endpoint.
            asked_at: Time of the request.
        """
        if load.clock is not UNSET and load.told_at is not UNSET:
            self._clock, self._asked_at, self._anchored_at = load.clock, asked_at, load.told_at
            self._can_push.set()

    def asked_at(self, load: EndpointLoad) -> float | None:
        """Compute the time at which the router would have asked for a pushed load.

        Args:
            load: Pushed report.

        Returns:
            The time, or None if it is unknown because the endpoint's clock is new or missing.
        """
        if load.clock is UNSET or load.told_at is UNSET or load.clock != self._clock:
            return None
        seconds = load.told_at - self._anchored_at
        return self._asked_at + seconds - CLOCK_DRIFT * abs(seconds)

    def is_pushing(self, now: float) -> bool:
        """Return True if pushed loads arrive, so that the router need not request the load now.

        Args:
            now: Current time.
        """
        is_heard = self._came_at is not None and now < self._came_at + SILENT_SECONDS
        return is_heard and now < self._asked_at + ANCHOR_SECONDS

    async def listen(
        self,
        remote: RemoteEndpoint,
        headers: Callable[[], list[tuple[str, str]]],
        take: Callable[[EndpointLoad, float], Awaitable[None]],
    ) -> None:
        """Follow the endpoint's pushed loads until cancelled.

        The first requested load with a clock starts the stream. Endpoints without a clock never push.

        Args:
            remote: Client of the endpoint.
            headers: Returns the headers of the request for pushed loads.
            take: Called with each load whose time is known, and the time at which the router would have asked for it.
        """
        await self._can_push.wait()
        retry_seconds = RETRY_SECONDS_MIN
        while True:
            began_at = trio.current_time()
            try:
                with trio.CancelScope(deadline=began_at + BROKEN_SECONDS) as silence:
                    await self._read(remote, headers, take, silence)
                if silence.cancelled_caught:
                    logger.debug("load stream ended endpoint=%s reason=silent", remote.id)
            except (EndpointLost, BrokenEvents) as error:
                logger.debug("load stream ended endpoint=%s reason=%s", remote.id, error)
            was_long = self._came_at is not None and self._came_at > began_at
            retry_seconds = RETRY_SECONDS_MIN if was_long else min(2 * retry_seconds, RETRY_SECONDS_MAX)
            await trio.sleep(retry_seconds)

    async def _read(
        self,
        remote: RemoteEndpoint,
        headers: Callable[[], list[tuple[str, str]]],
        take: Callable[[EndpointLoad, float], Awaitable[None]],
        silence: trio.CancelScope,
    ) -> None:
        """Follow one stream until it ends, breaks, or is silent for BROKEN_SECONDS."""
        async with remote.request("GET", LOAD_EVENTS_PATH, headers(), b"") as response:
            lines: EventLines[LoadReported] = EventLines(LoadReported)
            while response.status == 200 and (piece := await response.next_piece()) is not None:
                silence.deadline = trio.current_time() + BROKEN_SECONDS
                for event in lines.events(piece):
                    await self._take(event.load, take)

    async def _take(self, load: EndpointLoad, take: Callable[[EndpointLoad, float], Awaitable[None]]) -> None:
        asked_at = self.asked_at(load)
        if asked_at is not None:
            self._came_at = trio.current_time()
            await take(load, asked_at)


KV_EVENTS_PATH = "/kv_events"
STALE_SECONDS = 7.0  # An endpoint sends at least an empty event every two seconds.
# The router also tries again at this interval if a server does not send these events (vLLM), in case it starts to send
# them.
RESIDENCY_RETRY_SECONDS_MAX = 10.0


async def watch_residency(remote: RemoteEndpoint, policy: Policy) -> None:
    """Follow the prefix cache events of an endpoint until cancelled. Afterwards, its cache content is unknown.

    Args:
        remote: Client of the endpoint.
        policy: Routing policy that uses the cache content.
    """
    watch = _Watch(remote, policy)
    retry_seconds = RETRY_SECONDS_MIN
    while True:
        try:
            await watch.listen()
            retry_seconds = RETRY_SECONDS_MIN if watch.is_known else min(2 * retry_seconds, RESIDENCY_RETRY_SECONDS_MAX)
        finally:
            watch.lose()
        await trio.sleep(retry_seconds)


class _Watch:
    """State of one event stream.

    Attributes:
        is_known: True if the cache content of the endpoint is known.
    """

    def __init__(self, remote: RemoteEndpoint, policy: Policy) -> None:
        self.is_known = False
        self._remote = remote
        self._policy = policy
        self._snapshot: list[BlockHash] = []
        self._sequence: int | None = None  # The number of the next change. None while a snapshot is incomplete.
        self._reason_logged = ""

    async def listen(self) -> None:
        """Follow one stream until it ends, breaks or is silent."""
        self._snapshot, self._sequence = [], None
        with trio.CancelScope(deadline=trio.current_time() + STALE_SECONDS) as silence:
            try:
                async with self._remote.request("GET", KV_EVENTS_PATH, [], b"") as response:
                    if response.status == 200:
                        await self._read(response, silence)
                        self._say("the stream ended")
                    else:
                        self._say(f"status {response.status} {response.header('x-trioserve-reason') or ''}".rstrip())
            except (EndpointLost, BrokenEvents) as error:
                self._say(str(error))
        if silence.cancelled_caught:
            self._say(f"no event for {STALE_SECONDS:g} s")

    def lose(self) -> None:
        """Forget the cache content of the endpoint."""
        self.is_known = False
        self._policy.note_unknown(self._remote.id)

    async def _read(self, response: RemoteResponse, silence: trio.CancelScope) -> None:
        lines: EventLines[KvEvent] = EventLines(ResidencySnapshot | BlocksStored | BlocksRemoved)
        while (piece := await response.next_piece()) is not None:
            silence.deadline = trio.current_time() + STALE_SECONDS
            for event in lines.events(piece):
                self._take(event)

    def _take(self, event: KvEvent) -> None:
        if isinstance(event, ResidencySnapshot):
            self._take_snapshot(event)
            return
        if self._sequence is None or event.sequence != self._sequence:
            expected = "a snapshot" if self._sequence is None else self._sequence
            raise BrokenEvents(f"received change {event.sequence}, expected {expected}")
        self._sequence += len(event.hashes)
        if isinstance(event, BlocksStored):
            self._policy.note_stored(self._remote.id, event.hashes)
        else:
            self._policy.note_removed(self._remote.id, event.hashes)

    def _take_snapshot(self, part: ResidencySnapshot) -> None:
        if part.hash_scheme != HASH_SCHEME or part.block_size < 1:
            raise BrokenEvents(f'the endpoint names blocks by "{part.hash_scheme}", and this router by "{HASH_SCHEME}"')
        if self._sequence is not None:
            self._sequence = None  # The stream missed the changes before the new snapshot.
            self.lose()
        self._snapshot += part.hashes[: BLOCKS_MAX - len(self._snapshot)]
        if part.left:
            return
        window_tokens = part.window_tokens
        if window_tokens is not None and window_tokens < 1:
            raise BrokenEvents(f"the sliding window of the model has {window_tokens} tokens, allowed are 1 or more")
        self._policy.note_resident(self._remote.id, part.block_size, self._snapshot, window_tokens)
        logger.info("residency known endpoint=%s blocks=%d", self._remote.id, len(self._snapshot))
        self.is_known = True
        self._reason_logged = ""
        self._snapshot, self._sequence = [], part.sequence

    def _say(self, reason: str) -> None:
        if reason != self._reason_logged:  # A reason that lasts is logged only once.
            logger.info(
                "residency unknown endpoint=%s reason=%s", self._remote.id, msgspec.json.encode(reason).decode()
            )
            self._reason_logged = reason
