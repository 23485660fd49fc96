"""Reader of the prefix cache events of one remote endpoint.

While there is no stream of events, the content of the endpoint's cache is unknown.
"""

from __future__ import annotations

import logging

import msgspec
import trio

from trioserve.contracts.block_hash import HASH_SCHEME, BlockHash
from trioserve.contracts.errors import EndpointLost
from trioserve.contracts.kv_events import BlocksRemoved, BlocksStored, KvEvent, ResidencySnapshot
from trioserve.proxy.event_lines import BrokenEvents, EventLines
from trioserve.proxy.remote_endpoint import RemoteEndpoint, RemoteResponse
from trioserve.router.policies import Policy
from trioserve.router.residency import BLOCKS_MAX

__all__ = ["RETRY_SECONDS_MAX", "RETRY_SECONDS_MIN", "STALE_SECONDS", "watch_residency"]

logger = logging.getLogger(__name__)

KV_EVENTS_PATH = "/kv_events"
STALE_SECONDS = 7.0  # an endpoint sends at least an empty event every two seconds
RETRY_SECONDS_MIN = 0.5
# also the interval of attempts at a server without these events (vLLM), in case it starts to send them
RETRY_SECONDS_MAX = 10.0


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
            retry_seconds = RETRY_SECONDS_MIN if watch.is_known else min(2 * retry_seconds, RETRY_SECONDS_MAX)
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
        self._sequence: int | None = None  # number of the next change; None while a snapshot is incomplete
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
            self._sequence = None  # changes before the new snapshot were missed
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
        if reason != self._reason_logged:  # log a lasting reason once
            logger.info(
                "residency unknown endpoint=%s reason=%s", self._remote.id, msgspec.json.encode(reason).decode()
            )
            self._reason_logged = reason
