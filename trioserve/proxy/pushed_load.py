"""Loads that an endpoint sends by itself, and when each would have been asked for.

A report has the requests that had come to the endpoint when it looked. Of those that are on their way, nobody can
tell; so whoever asks notes which requests were sent before, and counts on no others. A load that nobody asked for is
taken for the response to a question of the moment in which it would have had to be asked: an earlier one was really
asked, and the endpoint's own clock tells how much later it has looked since. So what is believed of a pushed load is
exactly what would be believed of one that was asked for over the same way. The two clocks may drift apart: CLOCK_DRIFT
of the time since the question is taken off, and after ANCHOR_SECONDS it is asked again. By another clock, of a server
that was started anew, nothing follows before the next question.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio
from msgspec import UNSET

from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import EndpointLost
from trioserve.contracts.kv_events import LoadReported
from trioserve.proxy.event_lines import BrokenEvents, EventLines
from trioserve.proxy.remote_endpoint import RemoteEndpoint

__all__ = ["ANCHOR_SECONDS", "SILENT_SECONDS", "PushedLoad"]

logger = logging.getLogger(__name__)

LOAD_EVENTS_PATH = "/kv_events?load=only"
SILENT_SECONDS = 1.5  # an endpoint sends its load once a second, whatever it is; then it is asked again
BROKEN_SECONDS = 10.0  # silent for so long, its connection is given up and another one is opened
ANCHOR_SECONDS = 30.0
CLOCK_DRIFT = 0.001  # twice what clocks are slewed by at most
RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 60.0


class PushedLoad:
    """Of one endpoint. Times are seconds of Trio's clock."""

    def __init__(self) -> None:
        self._clock: str | None = None
        self._asked_at = 0.0
        self._told_at = 0.0
        self._came_at: float | None = None
        self._can_push = trio.Event()

    def note_asked(self, load: EndpointLoad, asked_at: float) -> None:
        """It was asked for this one."""
        if load.clock is not UNSET and load.told_at is not UNSET:
            self._clock, self._asked_at, self._told_at = load.clock, asked_at, load.told_at
            self._can_push.set()

    def asked_at(self, load: EndpointLoad) -> float | None:
        """When it would have had to be asked for this one; None if nobody can tell."""
        if load.clock is UNSET or load.told_at is UNSET or load.clock != self._clock:
            return None
        seconds = load.told_at - self._told_at
        return self._asked_at + seconds - CLOCK_DRIFT * abs(seconds)

    def is_pushing(self, now: float) -> bool:
        """Whether it need not be asked now."""
        is_heard = self._came_at is not None and now < self._came_at + SILENT_SECONDS
        return is_heard and now < self._asked_at + ANCHOR_SECONDS

    async def listen(
        self,
        remote: RemoteEndpoint,
        headers: Callable[[], list[tuple[str, str]]],
        take: Callable[[EndpointLoad, float], Awaitable[None]],
    ) -> None:
        """Runs until cancelled, for endpoints that have told a clock when they were asked. take: is given each load
        that can be believed, and when it would have been asked for."""
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
        """One stream, until it ends, breaks, or is silent for BROKEN_SECONDS."""
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
