"""What went wrong with a connector: counted by kind, and the latest of each kind in words. It stops nobody."""

from __future__ import annotations

from trioserve.contracts.kv_transfer import TransferFault

__all__ = ["TransferFaults"]


class TransferFaults:
    """totals has every kind from the start; latest says what came last, for the log of the shell."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(TransferFault, 0)
        self.latest: dict[TransferFault, str] = {}

    def count(self, fault: TransferFault, message: str) -> None:
        self.totals[fault] += 1
        self.latest[fault] = message
