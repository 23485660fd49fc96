"""The states of a request and the table of its legal moves, whatever the request asks for.

    WAITING ──────────► RUNNING ◄──────► PREEMPTED
       │  ▲                │ └──► ENDED      │
       ▼  │                ▼        ▼        │
    WAITING_FOR_          FINISHED ◄┴────────┘
    REMOTE_KV ──────────►  (from every state, once)

A request owns blocks, or a slot, while it is RUNNING. What it has in other states is said where that is decided
(live_request, live_iteration). FINISHED is left by no move: that is what makes giving back happen once.
"""

from __future__ import annotations

import enum
from typing import Generic, Protocol, TypeVar

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId

__all__ = ["AskedRequest", "RequestLife", "RequestStatus"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"
    FINISHED = "finished"


_LEGAL_MOVES: frozenset[tuple[RequestStatus, RequestStatus]] = frozenset(
    {
        (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KV),
        (RequestStatus.WAITING, RequestStatus.RUNNING),
        (RequestStatus.WAITING, RequestStatus.FINISHED),
        (RequestStatus.WAITING_FOR_REMOTE_KV, RequestStatus.WAITING),
        (RequestStatus.WAITING_FOR_REMOTE_KV, RequestStatus.FINISHED),
        (RequestStatus.RUNNING, RequestStatus.PREEMPTED),
        (RequestStatus.RUNNING, RequestStatus.ENDED),
        (RequestStatus.RUNNING, RequestStatus.FINISHED),
        (RequestStatus.PREEMPTED, RequestStatus.RUNNING),
        (RequestStatus.PREEMPTED, RequestStatus.FINISHED),
        (RequestStatus.ENDED, RequestStatus.FINISHED),
    }
)


class AskedRequest(Protocol):
    """What is common to everything that may be asked of a core. priority: a lower number runs sooner."""

    @property
    def id(self) -> RequestId: ...

    @property
    def priority(self) -> int: ...


Asked = TypeVar("Asked", bound=AskedRequest)


class RequestLife(Generic[Asked]):
    """What a core knows of every request that has not finished."""

    __slots__ = ("abort_reason", "arrival_index", "request", "status", "steps_in_flight")

    def __init__(self, request: Asked, arrival_index: int) -> None:
        self.request = request
        self.arrival_index = arrival_index
        self.status = RequestStatus.WAITING
        self.steps_in_flight = 0  # that read and write what it owns
        self.abort_reason: FinishReason | None = None  # marked: ends with the last of these

    def move(self, status: RequestStatus) -> None:
        """Change the state. An illegal move is our bug, and a second FINISHED would be a second free."""
        assert (self.status, status) in _LEGAL_MOVES, f"{self.request.id}: {self.status.value} -> {status.value}"
        self.status = status

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the smaller one."""
        return (self.request.priority, self.arrival_index)
