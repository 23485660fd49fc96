"""One engine of a pair: a real core with the real bookkeeping of a stream connector, and a model without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import EngineEvent, FinishReason, RequestFinished, TokensReady
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, TransferFault
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import StepPlan
from trioserve.core.engine import EngineCore
from trioserve.core.live_request import LiveRequest
from trioserve.core.settings import CoreSettings
from trioserve.simulation.core.progress_rule import check_nobody_could_start
from trioserve.simulation.pair.history import HostName, PairWorld
from trioserve.simulation.pair.network import Connection, Network, Timers
from trioserve.simulation.pair.transport import Holding, PairTransport
from trioserve.testing.fake_executor import FakeExecutor, FakeModel
from trioserve.testing.invariants import check_core

__all__ = ["AbortIds", "Finished", "PairHost", "Refused", "Submit", "Tokens"]

# A correct connector causes none of these faults, whatever its network does.
BROKEN_PROMISES = (
    TransferFault.UNKNOWN,
    TransferFault.DOUBLE,
    TransferFault.LATE,
    TransferFault.BAD_COUNT,
    TransferFault.RAISED,
)


class Submit(msgspec.Struct, frozen=True):
    request: EngineRequest


class AbortIds(msgspec.Struct, frozen=True):
    ids: tuple[RequestId, ...]


class Tokens(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]


class Finished(msgspec.Struct, frozen=True):
    reason: FinishReason
    kv_transfer: KVTransferParams | None


class Refused(msgspec.Struct, frozen=True):
    """The request was not begun, and nothing is held for it."""


def _may_load(live: LiveRequest) -> bool:
    asked = live.request.kv_transfer
    return asked is not None and asked.do_remote_prefill


class PairHost:
    """One engine. Each start creates another engine, without the state of the one before.

    Args:
        name: the host's name.
        world: settings of both engines.
        model: the model of both engines.
        network: the network between them.
        clock: returns the simulated time.
        listener_at: returns the listener of a host, or None if it has none.

    Attributes:
        is_up: whether the engine exists. It may be stopped.
        is_stopped: whether the engine does nothing.
        refuses: whether it refuses the next request.
    """

    def __init__(
        self,
        name: HostName,
        world: PairWorld,
        model: FakeModel,
        network: Network,
        clock: Callable[[], float],
        listener_at: Callable[[str], Holding | None],
    ) -> None:
        self.name: HostName = name
        self.is_up = False
        self._world = world
        self._model = model
        self._network = network
        self._now = clock
        self._listener_at = listener_at
        self._start_count = 0
        self.start()

    def start(self) -> None:
        world, is_prefill = self._world, self.name == "prefill"
        block_count = world.prefill_blocks if is_prefill else world.decode_blocks
        block_size = world.prefill_block_size if is_prefill else world.decode_block_size
        self._start_count += 1
        self.is_up, self.is_stopped, self.refuses = True, False, False
        self.timers = Timers()
        self.executor = FakeExecutor(
            block_count=block_count, block_size=block_size, model=self._model, window_tokens=world.window_tokens
        )
        self.transport = PairTransport(
            self.name,
            f"{self.name}-{self._start_count}",
            self.executor,
            world.chunk_tokens,
            self._network,
            self.timers,
            self._now,
            self._listener_at,
        )
        self.core = EngineCore(
            CoreSettings(
                block_count=block_count,
                block_size=block_size,
                context_tokens_max=world.context_tokens_max,
                max_num_seqs=world.max_num_seqs,
                step_tokens_max=world.step_tokens_max,
                window_tokens=world.window_tokens,
                enable_prefix_caching=world.enable_prefix_caching,
                hold_seconds_max=world.hold_seconds,
                remote_kv_seconds_max=world.load_seconds,
                load_failure_policy="fail" if world.fails_without_kv else "recompute",
            ),
            connector=self.transport.policy,
        )
        self.flight: StepPlan | None = None
        self._asked_by: dict[RequestId, Connection] = {}

    @property
    def runs(self) -> bool:
        return self.is_up and not self.is_stopped

    @property
    def is_idle(self) -> bool:
        """True if no request is live, and no KV is read or loaded."""
        is_quiet = self.flight is None and not any(True for _ in self.core.live_requests())
        return is_quiet and not self.transport.servings and not len(self.transport.policy.loads)

    @property
    def hold_count(self) -> int:
        assert self.core.transfers is not None
        return len(self.core.transfers.holds)

    # --- what happens ---

    def step(self) -> StepPlan | None:
        """Begin a step, or end the step in flight.

        Returns:
            The step that was begun, or None.
        """
        now = self._now()
        if self.flight is None:
            self._pass_on([*self.core.progress(now), *self.core.expire(now)])
            self.flight = self.core.schedule(now)
            if self.flight is None:
                check_nobody_could_start(self.core, _may_load)
            return self.flight
        plan, self.flight = self.flight, None
        result = self.executor.execute(plan, self.core.abandonment(plan))
        if result is None:
            self._pass_on(self.core.drop_plan(plan, now))
        else:
            self._pass_on(self.core.update_from_output(plan, result, now))
        return None

    def next_deadline(self) -> float | None:
        """Next deadline of the core, which checks deadlines between two steps."""
        return self.core.next_deadline() if self.runs and self.flight is None else None

    def expire(self) -> None:
        self._pass_on([*self.core.progress(self._now()), *self.core.expire(self._now())])

    # --- an End of the router's connections ---

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        if isinstance(message, AbortIds):
            self._abort(message.ids)
            return
        assert isinstance(message, Submit)
        if message.request.id in self._asked_by:
            return  # it is a duplicate
        refuses, self.refuses = self.refuses, False
        if refuses:
            connection.send(self.name, Refused())
            return
        try:
            self.core.add(message.request)
        except InvalidRequest:
            connection.send(self.name, Refused())
            return
        self._asked_by[message.request.id] = connection

    def broke(self, connection: Connection, why: str) -> None:
        """Abort the live requests that came over this connection.

        Args:
            connection: the broken connection.
            why: the reason.
        """
        live = {live.request.id for live in self.core.live_requests()}
        self._abort([name for name, asked in self._asked_by.items() if asked is connection and name in live])

    # --- what must hold ---

    def check(self) -> None:
        core, transfers, policy = self.core, self.core.transfers, self.transport.policy
        check_core(core)
        assert transfers is not None
        totals, latest = transfers.faults.totals, transfers.faults.latest
        for fault in BROKEN_PROMISES:
            assert totals[fault] == 0, f"{self.name}: {latest[fault]} ({fault.value})"
        sends = [hold.request_id for hold in transfers.holds if hold.kind is HoldKind.SEND]
        readable_count = sum(policy.sends.get(name) is not None for name in sends)
        assert len(policy.sends) == readable_count, f"{self.name}: a send may be read without a hold, {sends}"
        load_count = transfers.loads.pending_count + len(transfers.holds) - len(sends)
        assert len(policy.loads) <= load_count, (
            f"{self.name}: a load may be written without a waiting request or a hold"
        )

    # --- inside ---

    def _abort(self, ids: Iterable[RequestId]) -> None:
        results = self.core.abort(ids, now=self._now())
        self._pass_on(result.finished for result in results.values() if result.finished is not None)

    def _pass_on(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            connection = self._asked_by[event.request_id]
            if isinstance(event, TokensReady):
                connection.send(self.name, Tokens(event.token_ids))
            elif isinstance(event, RequestFinished):
                connection.send(self.name, Finished(event.reason, event.kv_transfer))
