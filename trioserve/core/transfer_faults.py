"""Faults of a connector, counted by kind. A fault never stops the engine."""

from __future__ import annotations

from trioserve.contracts.kv_transfer import TransferFault

__all__ = ["TransferFaults"]


class TransferFaults:
    """Counts of all faults.

    Attributes:
        totals: number of faults by kind. Every kind has an entry from the start.
        latest: the latest fault of each kind as text, for the engine's log.
    """

    def __init__(self) -> None:
        self.totals = dict.fromkeys(TransferFault, 0)
        self.latest: dict[TransferFault, str] = {}

    def count(self, fault: TransferFault, message: str) -> None:
        self.totals[fault] += 1
        self.latest[fault] = message
