"""Transfer events that wait until the core asks for progress."""

from __future__ import annotations

from collections.abc import Callable

from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, Loaded, LoadFailed, Released, StillRead, TransferEvent

__all__ = ["Reports"]


class Reports:
    """Ordered queue with at most one event per load or hold, so the active transfers bound its size.

    A newer event of a load or hold replaces the older one and moves to the end.

    Args:
        wake: Called after an event is added.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: dict[tuple[HoldKind, RequestId], TransferEvent] = {}

    def add(self, event: Released | StillRead | Loaded | LoadFailed) -> None:
        kind = HoldKind.SEND if isinstance(event, Released | StillRead) else HoldKind.LOAD
        self._waiting.pop((kind, event.request_id), None)
        self._waiting[kind, event.request_id] = event
        self._wake()

    def forget(self, kind: HoldKind, request_id: RequestId) -> None:
        """Drop the event of a hold that has expired, because the core does not expect it any more.

        Args:
            kind: Direction of the hold.
            request_id: Request of the hold.
        """
        self._waiting.pop((kind, request_id), None)

    def take(self) -> tuple[TransferEvent, ...]:
        taken = tuple(self._waiting.values())
        self._waiting.clear()
        return taken
