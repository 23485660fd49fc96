"""A wrapper around the connector. It checks return values, counts exceptions, and replaces a bad value with a safe
value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, KVConnector, TransferEvent, TransferFault
from trioserve.contracts.request import EngineRequest, KVTransferParams

__all__ = ["TransferFaults", "ConnectorGuard"]


class TransferFaults:
    """Counts the faults of a connector by kind. A fault never stops the engine.

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


Result = TypeVar("Result")


class ConnectorGuard:
    """Calls a KVConnector, and never raises an exception.

    Connectors identify a prompt by its tokens. Two requests with embeddings from clients may have the same tokens but
    different content. So the guard does not pass such requests to the connector.

    Args:
        connector: the connector to call.
        faults: counts exceptions and invalid return values.
    """

    def __init__(self, connector: KVConnector, faults: TransferFaults) -> None:
        self._connector = connector
        self._faults = faults

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        """Return how many tokens the connector can load after the tokens that are already computed.

        Args:
            request: a request that waits.
            computed_count: number of known tokens whose KV is in this engine.

        Returns:
            A count of at least 0. It is smaller than the number of remaining known tokens, because this engine always
            computes the last known token.
        """
        if request.given:
            return 0
        count = self._call(self._connector.num_matched_tokens, (request, computed_count), 0)
        if not isinstance(count, int) or count < 0:
            self._faults.count(TransferFault.BAD_COUNT, f"{request.id}: the connector matched {count!r} tokens")
            return 0
        return min(count, len(request.known_token_ids) - 1 - computed_count)

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> bool:
        """Start to load KV into blocks.

        Args:
            request: a request that waits for the load.
            block_table: blocks of the request, in order. The connector writes to them.
            computed_count: number of known tokens whose KV is in this engine.
            token_count: number of tokens to load after the computed tokens.

        Returns:
            True if the connector will report the end of the load.
        """
        return self._notify(self._connector.start_load, (request, block_table, computed_count, token_count))

    def load_abandoned(self, request_id: RequestId) -> None:
        self._notify(self._connector.load_abandoned, (request_id,))

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        """Notify the connector of a finished request.

        Args:
            block_table: blocks of the computed tokens, in order.
            tokens: tokens whose KV is computed.
            reason: why the request finished.

        Returns:
            True if the connector holds the blocks.
        """
        return not request.given and bool(
            self._call(self._connector.request_finished, (request, block_table, tokens, reason), False)
        )

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        return self._call(self._connector.transfer_params, (request_id,), None)

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        self._notify(self._connector.request_aborted_after_finish, (request_id,))

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        self._notify(self._connector.hold_expired, (request_id, kind))

    def progress(self) -> Iterable[TransferEvent]:
        """Return the connector's reports. Values that are not reports are counted as faults and removed."""
        nothing: tuple[object, ...] = ()
        events = []
        for event in self._call(lambda: tuple(self._connector.progress()), (), nothing):
            if isinstance(event, TransferEvent):
                events.append(event)
            else:
                self._faults.count(TransferFault.UNKNOWN, f"the connector reported {event!r:.200}")
        return events

    def _notify(self, call: Callable[..., object], arguments: tuple[object, ...]) -> bool:
        raised = object()
        return self._call(call, arguments, raised) is not raised

    def _call(self, call: Callable[..., Result], arguments: tuple[object, ...], otherwise: Result) -> Result:
        try:
            return call(*arguments)
        except Exception as error:
            name = getattr(call, "__name__", "a call")
            self._faults.count(TransferFault.RAISED, f"{name} raised {type(error).__name__}: {error}")
            return otherwise
