"""States of a request and the legal transitions between them, for token requests and iterative requests.

    WAITING ──────────► RUNNING ◄──────► PREEMPTED
       │  ▲                │ └──► ENDED      │
       ▼  │                ▼        ▼        │
    WAITING_FOR_          FINISHED ◄┴────────┘
    REMOTE_KV ──────────►  (from every state, once)

A request owns blocks, or a slot, while it is RUNNING. live_request.py and latent_slots.py describe its resources in
other states. No transition leaves FINISHED, so blocks and slots are released exactly once.
"""

from __future__ import annotations

import enum
from typing import Generic, Protocol, TypeVar

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId

__all__ = ["AskedRequest", "RequestLife", "RequestStatus"]


class RequestStatus(enum.Enum):
    """The state of a request in a core."""

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
    """Fields that all request types have in common.

    Attributes:
        id: id, unique among the live requests of a core.
        priority: a lower number runs sooner.
    """

    @property
    def id(self) -> RequestId: ...

    @property
    def priority(self) -> int: ...


Asked = TypeVar("Asked", bound=AskedRequest)


class RequestLife(Generic[Asked]):
    """The state of one unfinished request in a core.

    Args:
        request: the client's request.
        arrival_index: number of requests that arrived at this core before.
    """

    __slots__ = ("abort_reason", "arrival_index", "request", "status", "steps_in_flight")

    def __init__(self, request: Asked, arrival_index: int) -> None:
        self.request = request
        self.arrival_index = arrival_index
        self.status = RequestStatus.WAITING
        self.steps_in_flight = 0  # Number of steps in flight that read or write the request's blocks or slot.
        # If this is set, the request ends when all steps in flight that contain it have returned.
        self.abort_reason: FinishReason | None = None

    def move(self, status: RequestStatus) -> None:
        """Change the state.

        Args:
            status: the next state. An illegal transition fails an assertion, because a second FINISHED would free
                blocks twice.
        """
        assert (self.status, status) in _LEGAL_MOVES, f"{self.request.id}: {self.status.value} -> {status.value}"
        self.status = status

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key for the queue. The request with the smaller key runs first."""
        return (self.request.priority, self.arrival_index)
