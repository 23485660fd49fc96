"""Decisions of a connector that moves KV between two processes, and the state of all transfers.

An engine may be both holder and reader. `Sends` tracks blocks that other engines may read here. `Loads` tracks blocks
that this engine reads from other engines. `Reports` queues events for the core. This code never waits or reads a clock.
The transport (transport.py) moves the bytes. Before each piece, the transport checks with this code that the blocks may
be used. After each transfer, the transport reports the result to this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from trioserve.connectors.stream.options import StreamOptions
from trioserve.connectors.stream.signature import origin_of, signed
from trioserve.connectors.stream.transfers import LoadEnd, Loads, Reports, SendEnd, Sends, proof_of
from trioserve.connectors.windowed_tables import first_place, first_position
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import ConnectorSetup, HoldKind, TransferEvent
from trioserve.contracts.request import EngineRequest, KVTransferParams

__all__ = ["StreamPolicy"]

NAMED_COUNTS = (
    "blocks_sent_total",
    "blocks_received_total",
    "bytes_sent_total",
    "bytes_received_total",
    "load_seconds_total",
    "heartbeats_sent_total",
    "heartbeats_received_total",
    "peers_refused_total",
    "transfers_refused_total",
)


class StreamPolicy:
    """KVConnector (see contracts.kv_transfer) that moves KV over TCP connections.

    Args:
        setup: Engine id, KV cache and wake function of the engine.
        options: Options of the connector.
        on_work: Called when the transport has something to do.
        key: Key with which the engines of this group sign their addresses.

    Attributes:
        address: Host and port where readers find this engine. None until the engine listens. Without an address, the
            engine holds no blocks for readers.
    """

    knows_windows = True

    def __init__(
        self, setup: ConnectorSetup, options: StreamOptions, on_work: Callable[[], None], *, key: bytes
    ) -> None:
        self.setup = setup
        self.options = options
        self.key = key
        self.reports = Reports(setup.wake)
        self.sends = Sends(self.reports)
        self.loads = Loads(self.reports, on_work)
        self.address: tuple[str, int] | None = None
        self.totals: dict[str, float] = dict.fromkeys(NAMED_COUNTS, 0)
        self._asked: set[RequestId] = set()  # running requests whose load has started; `Loads` releases their holds

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        """Return how many tokens after the computed tokens another engine holds, without the last known token.

        With invalid kv_transfer_params, the whole prompt matches. The core then starts a load, which fails and reports
        the reason.

        Args:
            request: Request whose prompt is looked up.
            computed_count: Number of tokens whose KV this engine already has.
        """
        params = request.kv_transfer
        if params is None or not params.do_remote_prefill:
            return 0
        count = len(request.known_token_ids) - 1
        origin = origin_of(params, self.options, self.key)
        if not isinstance(origin, str) and origin.token_count is not None:
            count = min(count, origin.token_count)
        return max(0, count - computed_count)

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        assert request.kv_transfer is not None, f"{request.id}: nothing was matched"
        self._asked.add(request.id)
        origin = origin_of(request.kv_transfer, self.options, self.key)
        end = computed_count + token_count
        proof = proof_of(request.cache_salt, request.known_token_ids[:end])
        start = first_position(block_table, self.setup.pages.layout.block_size, computed_count)
        self.loads.start(request.id, origin, tuple(block_table), start, end - start, proof, asked_count=token_count)

    def load_abandoned(self, request_id: RequestId) -> None:
        """Stop a load. After the return, nothing writes to its blocks.

        Args:
            request_id: Request whose load is stopped.
        """
        self.loads.abandoned(request_id)

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        params = request.kv_transfer
        was_asked = request.id in self._asked
        self._asked.discard(request.id)
        if params is None:
            return False
        if params.do_remote_prefill and not was_asked:
            origin = origin_of(params, self.options, self.key)
            if not isinstance(origin, str):
                self.loads.not_needed(origin)
        is_wanted = params.do_remote_decode and reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not is_wanted or not block_table or self.address is None:
            return False
        held_from = first_place(block_table) * self.setup.pages.layout.block_size
        self.sends.hold(request.id, tuple(block_table), tuple(tokens), request.cache_salt, held_from)
        return True

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        send = self.sends.get(request_id)
        if send is None or self.address is None:
            return None
        host, port = self.address
        params = KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.setup.engine_id,
            remote_request_id=request_id,
            remote_block_ids=tuple(send.block_table),
            remote_host=host,
            remote_port=port,
            remote_block_size=self.setup.pages.layout.block_size,
            remote_num_tokens=send.token_count,
        )
        return signed(params, self.key)

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        """End the hold of a request. After the return, nothing reads its blocks.

        Args:
            request_id: Request whose hold is ended.
        """
        self.sends.aborted(request_id)

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        if kind is HoldKind.SEND:
            self.sends.expired(request_id)
        else:
            self.loads.expired(request_id)

    def progress(self) -> Iterable[TransferEvent]:
        return self.reports.take()

    def counts(self) -> dict[str, float]:
        """Return totals since the start: NAMED_COUNTS, and the numbers of sends and loads by outcome."""
        sends, loads = self.sends.ends, self.loads.ends
        return {
            **self.totals,
            "transfers_resumed_total": self.loads.resumed_total,
            **{f"loads_{end.value}_total": loads[end] for end in LoadEnd},
            **{f"sends_{end.value}_total": sends[end] for end in SendEnd},
            "sends_failed_total": sends.total() - sends[SendEnd.COMPLETED],
        }

    def stop(self) -> None:
        """End all loads and holds, because the transport has ended."""
        self.address = None
        self.loads.stop()
        self.sends.stop()
