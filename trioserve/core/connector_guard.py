"""Asks the connector, and believes only what can be true. What it raises is counted and taken for the safe answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, KVConnector, TransferEvent, TransferFault
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest
from trioserve.core.transfer_faults import TransferFaults

__all__ = ["ConnectorGuard"]

Result = TypeVar("Result")


class ConnectorGuard:
    """A KVConnector's calls, which do not raise. Connectors know a prompt by its tokens, so they are told nothing of a
    request whose embeddings are given: two of them may differ in nothing else."""

    def __init__(self, connector: KVConnector, faults: TransferFaults) -> None:
        self._connector = connector
        self._faults = faults

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        """0 <= answer < what is known beyond computed_count: the last known token is always computed here."""
        if request.given:
            return 0
        count = self._call(self._connector.num_matched_tokens, (request, computed_count), 0)
        if not isinstance(count, int) or count < 0:
            self._faults.count(TransferFault.BAD_COUNT, f"{request.id}: {count!r} tokens are said to match")
            return 0
        return min(count, len(request.known_token_ids) - 1 - computed_count)

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> bool:
        """Whether an end of this load can be expected."""
        return self._tell(self._connector.start_load, (request, block_table, computed_count, token_count))

    def load_abandoned(self, request_id: RequestId) -> None:
        self._tell(self._connector.load_abandoned, (request_id,))

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        """Whether the connector holds the blocks."""
        return not request.given and bool(
            self._call(self._connector.request_finished, (request, block_table, tokens, reason), False)
        )

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        return self._call(self._connector.transfer_params, (request_id,), None)

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        self._tell(self._connector.request_aborted_after_finish, (request_id,))

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        self._tell(self._connector.hold_expired, (request_id, kind))

    def progress(self) -> Iterable[TransferEvent]:
        """What it reports, as far as it is a report."""
        nothing: tuple[object, ...] = ()
        events = []
        for event in self._call(lambda: tuple(self._connector.progress()), (), nothing):
            if isinstance(event, TransferEvent):
                events.append(event)
            else:
                self._faults.count(TransferFault.UNKNOWN, f"a report is {event!r:.200}")
        return events

    def _tell(self, call: Callable[..., object], arguments: tuple[object, ...]) -> bool:
        raised = object()
        return self._call(call, arguments, raised) is not raised

    def _call(self, call: Callable[..., Result], arguments: tuple[object, ...], otherwise: Result) -> Result:
        try:
            return call(*arguments)
        except Exception as error:
            name = getattr(call, "__name__", "a call")
            self._faults.count(TransferFault.RAISED, f"{name} raised {type(error).__name__}: {error}")
            return otherwise
