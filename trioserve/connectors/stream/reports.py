"""What the core is to be told when it asks for progress: in order, once for each hold, and nothing about one that has
expired."""

from __future__ import annotations

from collections.abc import Callable

from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, Loaded, LoadFailed, Released, StillRead, TransferEvent

__all__ = ["Reports"]


class Reports:
    """Bounded by what is out: a load or a hold has one entry, and its end takes the place of a sign of life.

    wake: called when there is something to tell."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: dict[tuple[HoldKind, RequestId], TransferEvent] = {}

    def add(self, event: Released | StillRead | Loaded | LoadFailed) -> None:
        kind = HoldKind.SEND if isinstance(event, Released | StillRead) else HoldKind.LOAD
        self._waiting.pop((kind, event.request_id), None)
        self._waiting[kind, event.request_id] = event
        self._wake()

    def forget(self, kind: HoldKind, request_id: RequestId) -> None:
        """The hold has expired: what was not asked for in time is not told any more."""
        self._waiting.pop((kind, request_id), None)

    def take(self) -> tuple[TransferEvent, ...]:
        taken = tuple(self._waiting.values())
        self._waiting.clear()
        return taken
