"""The core's side of the connector contract: what is asked and told when, and what a report changes.

| event                            | owner before         | owner after                | the blocks are free           |
|----------------------------------|----------------------|----------------------------|-------------------------------|
| a request ends, not held         | the request          | nobody                     | at once                       |
| a request ends, held             | the request          | the connector (SEND)       | at Released, or deadline      |
| it is aborted after that         | the connector (SEND) | the same, told once        | as before                     |
| a load begins                    | the request          | the request                | when it ends                  |
| a load arrives                   | the request          | the request                | when it ends                  |
| a load fails                     | the request          | nobody                     | at once                       |
| a load takes too long            | the request          | the connector (LOAD)       | at its report, or deadline    |
| a request ends while it loads    | the request          | the connector (LOAD, SEND) | at both reports, or deadlines |
| a late, second or unknown report | whoever it is        | the same                   | as before                     |

A block with other users or holders besides is free when the last of these has gone, too. Blocks of a load that is out
count as used while their request waits for it, and as held from then on.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import (
    HoldKind,
    KVConnector,
    Loaded,
    Released,
    StillRead,
    TransferEvent,
    TransferFault,
)
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest
from trioserve.core.block_holds import BlockHolds
from trioserve.core.connector_guard import ConnectorGuard
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.live_request import LiveRequest
from trioserve.core.remote_loads import RemoteLoads
from trioserve.core.settings import CoreSettings
from trioserve.core.transfer_faults import TransferFaults

__all__ = ["Transfers", "Unserved"]

Unserved = tuple[LiveRequest, str]
"""A request that was waiting for KV and does not get it, and why."""


class Transfers:
    """All calls are O(1) plus the blocks of the request."""

    def __init__(self, settings: CoreSettings, pool: BlockPool, connector: KVConnector) -> None:
        self._settings = settings
        self._pool = pool
        self.faults = TransferFaults()
        self._connector = ConnectorGuard(connector, self.faults)
        self.holds = BlockHolds(pool, settings.hold_seconds_max, self.faults)
        self.loads = RemoteLoads(settings, self._connector)
        self.loaded_tokens_total = 0
        self.holds_refused_total = 0
        self._held_blocks_max = int(settings.block_count * settings.held_share_max)

    def request_ends(self, live: LiveRequest, reason: FinishReason, now: float) -> KVTransferParams | None:
        """To be called once, while the request still has its blocks: those that somebody needs are held from now on.
        Returns how that somebody gets at them. Where too much is held already, the connector does not learn that this
        request asks for it, too. To the connector, one that is handed over has ended by itself, and asked for it."""
        self._abandon(live, now)
        settings, computed_count = self._settings, live.computed_count
        if live.gone_count > settings.first_block_kept(computed_count):
            computed_count = 0  # it has not run: what was found or was to be loaded is less than another one needs
        table = tuple(live.blocks[: settings.blocks_for(computed_count)])
        blocks = table[live.gone_count :]
        tokens = tuple(live.tokens[:computed_count])
        request = live.request
        if reason is FinishReason.HANDED_OVER:
            request, reason = _asking(request), FinishReason.STOP
        if _asks_to_be_held(request) and self._pool.held_count + len(blocks) > self._held_blocks_max:
            self.holds_refused_total += 1
            request = _without_asking(request)
        if not self._connector.request_finished(request, table, tokens, reason):
            return None
        self.holds.add(live.request.id, HoldKind.SEND, blocks, now)
        return self._connector.transfer_params(live.request.id)

    def aborted_after_finish(self, request_id: RequestId) -> None:
        """Tell the connector, if it holds blocks of this request and was not told before."""
        hold = self.holds.get(request_id, HoldKind.SEND)
        if hold is not None and not hold.is_aborted:
            hold.is_aborted = True
            self._connector.request_aborted_after_finish(request_id)

    def progress(self, now: float) -> list[Unserved]:
        """Take whatever the connector has to report. Returns the requests that do not get their KV."""
        return [unserved for event in self._connector.progress() for unserved in self.report(event, now)]

    def report(self, event: TransferEvent, now: float) -> list[Unserved]:
        """The connector has reported something. Returns the request that does not get its KV, if that is what it was;
        the rest is done when this returns."""
        request_id = event.request_id
        if isinstance(event, StillRead):
            self.holds.extend(request_id, HoldKind.SEND, now)
            return []
        if isinstance(event, Released):
            self.holds.let_go(request_id, HoldKind.SEND)
            return []
        load = self.loads.take(request_id)
        if load is None:
            self.holds.let_go(request_id, HoldKind.LOAD)
            return []
        self.holds.note_ended(request_id, HoldKind.LOAD)
        if not isinstance(event, Loaded):
            self.faults.count(TransferFault.LOAD_FAILED, f"{request_id}: {event.message}")
            return [(load.live, event.message)]
        if not isinstance(event.token_count, int) or not 0 <= event.token_count <= load.token_count:
            message = f"{event.token_count} tokens of it are said to have come, and {load.token_count} were asked for"
            self.faults.count(TransferFault.BAD_COUNT, f"{request_id}: {message}")
            return [(load.live, message)]
        if event.token_count == 0:
            return [(load.live, "nothing of it came")]
        end = load.live.computed_count + event.token_count
        if self._settings.first_block_read(end) < load.live.gone_count:
            # It had blocks for what the window reaches behind all of it.
            message = f"{event.token_count} of {load.token_count} tokens came, and the window reaches further back"
            self.faults.count(TransferFault.LOAD_FAILED, f"{request_id}: {message}")
            return [(load.live, message)]
        self.loaded_tokens_total += event.token_count
        self.loads.arrived(load.live, event.token_count)
        return []

    def expire(self, now: float) -> list[Unserved]:
        """End the patience and the holds that are overdue. Returns the requests that do not get their KV."""
        unserved = []
        for live in self.loads.overdue(now):
            message = f"it did not come within {self._settings.remote_kv_seconds_max} seconds"
            self.faults.count(TransferFault.LOAD_EXPIRED, f"{live.request.id}: {message}")
            self._abandon(live, now)
            unserved.append((live, message))
        for hold in self.holds.expire(now):
            self._connector.hold_expired(hold.request_id, hold.kind)
        return unserved

    def give_up_loads(self, now: float) -> list[LiveRequest]:
        """Nobody waits for KV any more. Returns who did."""
        lives = self.loads.pending
        for live in lives:
            self._abandon(live, now)
        return lives

    def next_deadline(self) -> float | None:
        """When expire() has something to do; None: nothing is waited for."""
        deadlines = [self.holds.next_deadline(), self.loads.next_deadline()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _abandon(self, live: LiveRequest, now: float) -> None:
        """Wait no longer for a load, if one is out; the blocks that it may still write to are held."""
        request_id = live.request.id
        if self.loads.take(request_id) is None:
            return
        written = live.blocks[max(live.gone_count, live.computed_count // self._settings.block_size) :]
        self.holds.add(request_id, HoldKind.LOAD, written, now)
        self._connector.load_abandoned(request_id)


def _asks_to_be_held(request: EngineRequest) -> bool:
    return request.kv_transfer is not None and request.kv_transfer.do_remote_decode


def _asking(request: EngineRequest) -> EngineRequest:
    kv_transfer = msgspec.structs.replace(request.kv_transfer or KVTransferParams(), do_remote_decode=True)
    return msgspec.structs.replace(request, kv_transfer=kv_transfer)


def _without_asking(request: EngineRequest) -> EngineRequest:
    """What it has read elsewhere is still to be let go there."""
    assert request.kv_transfer is not None
    kv_transfer = msgspec.structs.replace(request.kv_transfer, do_remote_decode=False)
    return msgspec.structs.replace(request, kv_transfer=kv_transfer)
