"""Holds on the blocks of finished requests, which other engines may read until the hold ends.

    request_finished ──► held ──► the reader has finished, or needs no blocks ──► Released
                              ──► aborted in this engine ───────────────────────► Released
                              ──► its deadline in the core passed ──────────────► (no event)

A hold that has ended never becomes alive again. The call that ends a hold also stops its running transfers. A transfer
checks `is_alive` each time before it reads from the blocks.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from trioserve.connectors.stream.proof import proof_of
from trioserve.connectors.stream.reports import Reports
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, Released, StillRead

__all__ = ["Send", "SendEnd", "Sends"]

SIGN_OF_LIFE_SECONDS = 1.0  # a hold lasts ten seconds, so more frequent reports are useless


class SendEnd(enum.Enum):
    COMPLETED = "completed"  # a reader received everything that it asked for
    UNWANTED = "unwanted"  # the reader released the hold before it received everything
    ABORTED = "aborted"  # in this engine
    EXPIRED = "expired"


class Send(msgspec.Struct, eq=False):
    """Hold on the blocks of one finished request.

    Attributes:
        request_id: Request that has finished.
        block_table: Blocks of the request.
        tokens: Tokens of the request. The blocks contain their KV from position `held_from` on.
        cache_salt: Cache salt of the request.
        held_from: First position that a reader may ask for. Positions before it are behind a sliding window.
        is_alive: False once the hold has ended.
        was_read: True once a reader received everything that it asked for.
        reported_alive_at: Time of the last StillRead event, in seconds.
        stops: Functions that stop the transfers that read this hold, by transfer.
    """

    request_id: RequestId
    block_table: Sequence[BlockIndex]
    tokens: Sequence[int]
    cache_salt: str | None
    held_from: int
    is_alive: bool = True
    was_read: bool = False
    reported_alive_at: float | None = None
    stops: dict[object, Callable[[], None]] = msgspec.field(default_factory=dict)

    @property
    def token_count(self) -> int:
        return len(self.tokens)


class Sends:
    """All holds of this engine.

    Cost: O(1) per call and hold, plus the readers of the hold, unless a method says more.

    Args:
        reports: Receives the events for the core.
    """

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._held: dict[RequestId, Send] = {}
        self.ends: Counter[SendEnd] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self,
        request_id: RequestId,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        cache_salt: str | None,
        held_from: int = 0,
    ) -> None:
        self._held[request_id] = Send(request_id, block_table, tokens, cache_salt, held_from)

    def get(self, request_id: str) -> Send | None:
        return self._held.get(RequestId(request_id))

    def asked(self, request_id: str, token_start: int, token_count: int, proof: bytes, now: float) -> Send | str:
        """Check that a reader may read positions of a hold, and report the hold as still read.

        Args:
            request_id: Request whose blocks the reader asks for.
            token_start: First position.
            token_count: Number of positions.
            proof: Hash of the reader's tokens up to the last position (see proof.py).
            now: Current time in seconds.

        Returns:
            The hold, or a sentence that says why the reader may not read it.

        Cost: O(tokens).
        """
        send = self.get(request_id)
        if send is None:
            return f'no block of "{request_id[:200]}" is held: it never was, or it ended before this'
        if token_start < 0 or token_count < 1 or token_start + token_count > send.token_count:
            return f"{token_count} tokens from {token_start} on are asked for, and {send.token_count} are held"
        if token_start < send.held_from:
            return (
                f"tokens from {token_start} on are asked for, and they are held from {send.held_from} on: behind a "
                "sliding window the reader's blocks may be no longer than those here"
            )
        if proof != proof_of(send.cache_salt, send.tokens[: token_start + token_count]):
            return "what is held are the blocks of another prompt, or under another cache_salt"
        self.sign_of_life(send, now)
        return send

    def sign_of_life(self, send: Send, now: float) -> None:
        """Report that a reader reads the blocks or waits for them, at most once per SIGN_OF_LIFE_SECONDS.

        Args:
            send: Hold that the reader uses.
            now: Current time in seconds.
        """
        last = send.reported_alive_at
        if send.is_alive and (last is None or now - last >= SIGN_OF_LIFE_SECONDS):
            send.reported_alive_at = now
            self._reports.add(StillRead(send.request_id))

    def still_wanted(self, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Report requests as still read, because a reader says that it still needs them.

        Args:
            request_ids: Requests that the reader needs.
            now: Current time in seconds.

        Returns:
            Ids of requests that are not held, or no longer held.
        """
        gone = []
        for request_id in request_ids:
            send = self.get(request_id)
            if send is None:
                gone.append(request_id)
            else:
                self.sign_of_life(send, now)
        return tuple(gone)

    def released(self, request_ids: Iterable[str]) -> None:
        """End holds that their reader does not need any more.

        Args:
            request_ids: Requests to release. Unknown ids are ignored, because a release may arrive twice.
        """
        for request_id in request_ids:
            send = self.get(request_id)
            if send is not None:
                self._end(send.request_id, SendEnd.COMPLETED if send.was_read else SendEnd.UNWANTED)

    def aborted(self, request_id: RequestId) -> None:
        self._end(request_id, SendEnd.ABORTED)

    def expired(self, request_id: RequestId) -> None:
        self._end(request_id, SendEnd.EXPIRED)
        self._reports.forget(HoldKind.SEND, request_id)

    def stop(self) -> None:
        """Release all holds, because the transport has ended."""
        for request_id in tuple(self._held):
            self._end(request_id, SendEnd.ABORTED)

    def _end(self, request_id: RequestId, end: SendEnd) -> None:
        send = self._held.pop(request_id, None)
        if send is None:
            return
        send.is_alive = False
        self.ends[end] += 1
        for stop in tuple(send.stops.values()):
            stop()
        if end is not SendEnd.EXPIRED:
            self._reports.add(Released(request_id))
