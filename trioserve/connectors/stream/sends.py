"""The holder's side: which blocks of finished requests others may read, and until when.

    request_finished ──► held ──► a reader has what it wanted, or wants it no more ──► Released
                              ──► aborted here ──────────────────────────────────────► Released
                              ──► its deadline in the core ──────────────────────────► (nothing)

A hold that has ended never lives again; whoever is in the middle of reading it is stopped in the same call, and asks
`is_alive` before each byte that it reads.
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

SIGN_OF_LIFE_SECONDS = 1.0  # a hold lasts for ten: more reports than one a second move nothing


class SendEnd(enum.Enum):
    COMPLETED = "completed"  # its reader has got all that it asked for
    UNWANTED = "unwanted"  # its reader has left before that
    ABORTED = "aborted"  # here
    EXPIRED = "expired"


class Send(msgspec.Struct, eq=False):
    """Blocks that are held. tokens: whose KV is in them, from position held_from on. was_read: somebody got to the end
    of what was asked for. stops: of those who read it."""

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
    """All calls are O(1) plus the readers of the hold."""

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
        """A reader wants these positions: the hold, which has given a sign of life, or why not. proof: that it means
        the same tokens. O(tokens)."""
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
        """Somebody reads the blocks, or waits for them."""
        last = send.reported_alive_at
        if send.is_alive and (last is None or now - last >= SIGN_OF_LIFE_SECONDS):
            send.reported_alive_at = now
            self._reports.add(StillRead(send.request_id))

    def still_wanted(self, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Signs of life from a reader. Returns those that are not held."""
        gone = []
        for request_id in request_ids:
            send = self.get(request_id)
            if send is None:
                gone.append(request_id)
            else:
                self.sign_of_life(send, now)
        return tuple(gone)

    def released(self, request_ids: Iterable[str]) -> None:
        """Readers are done with these. What is not held, or not any more, is no error: a release may come twice."""
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
        """Nobody will be there to read: everything is released."""
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
