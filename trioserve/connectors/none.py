"""Connector that transfers no KV. It is the smallest correct implementation of KVConnector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, TransferEvent
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest

__all__ = ["NoConnector"]


class NoConnector:
    """KVConnector (see contracts.kv_transfer) that matches no tokens and holds no blocks.

    The core must never call the methods for loads and holds. They raise AssertionError. An EngineCore without a
    connector behaves the same way, but makes no calls.
    """

    knows_windows = True

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        return 0

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        raise AssertionError(f"{request.id}: nothing was matched, so nothing can be loaded")

    def load_abandoned(self, request_id: RequestId) -> None:
        raise AssertionError(f"{request_id}: no load was started, so none can be abandoned")

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        return False

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        raise AssertionError(f"{request_id}: no block of it is held")

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        raise AssertionError(f"{request_id}: no block of it is held")

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        raise AssertionError(f"{request_id}: no block of it is held")

    def progress(self) -> Iterable[TransferEvent]:
        return ()
