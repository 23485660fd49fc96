"""The history of a simulated pair as data, its engines, and the router that uses them.

An event of a history that does not apply does nothing, as in the history of a core.

A host has a real core with the real policy of a stream connector, and a model without weights. The router stands for
any router that uses both engines and whose clients may disconnect.

The router requests a prefill, then a decode with the parameters that the prefill returned. If a stage fails before the
first token, the other engine computes the whole request. Every client's tokens are compared with the tokens of the
reference engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import EngineEvent, FinishReason, RequestFinished, TokensReady
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, TransferFault
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan
from trioserve.core.engine import EngineCore
from trioserve.core.request_state import LiveRequest
from trioserve.core.settings import CoreSettings
from trioserve.simulation.core.step_rules import check_no_request_could_start
from trioserve.simulation.pair.transport import Connection, Holding, Network, PairTransport, Timers
from trioserve.simulation.reference_engine import ReferenceResponse
from trioserve.testing.fake_executor import FakeExecutor, FakeModel
from trioserve.testing.invariants import check_core

__all__ = [
    "HOSTS",
    "ROUTER",
    "AbortIds",
    "Client",
    "Come",
    "Continue",
    "Cut",
    "Deliver",
    "Finished",
    "HostName",
    "Kill",
    "Leave",
    "Lose",
    "PairEvent",
    "PairHistory",
    "PairHost",
    "PairRouter",
    "PairWait",
    "PairWorld",
    "Refuse",
    "Refused",
    "Repeat",
    "Serve",
    "StageRequest",
    "Start",
    "Step",
    "Stop",
    "Submit",
    "Tokens",
    "request_of",
]


HostName = Literal["prefill", "decode"]
HOSTS: tuple[HostName, ...] = ("prefill", "decode")


class PairWorld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pair"):
    """Settings of the two engines and of their common model.

    Attributes:
        chunk_tokens: number of tokens whose KV is sent in one message.
        hold_seconds: how long blocks are held after the last message from their reader.
        load_seconds: how long a request may wait for its KV.
        fails_without_kv: True: a request whose KV does not arrive ends with an error. False: the engine computes the
            KV.
        window_tokens: length of the sliding window of attention. None: no window.
    """

    prefill_blocks: int = 16
    decode_blocks: int = 16
    prefill_block_size: int = 2
    decode_block_size: int = 2
    max_num_seqs: int = 3
    step_tokens_max: int = 8
    chunk_tokens: int = 2
    vocab_size: int = 4
    stop_period: int = 8
    enable_prefix_caching: bool = True
    hold_seconds: float = 10.0
    load_seconds: float = 10.0
    fails_without_kv: bool = False
    window_tokens: int | None = None

    @property
    def context_tokens_max(self) -> int:
        return min(self.prefill_blocks * self.prefill_block_size, self.decode_blocks * self.decode_block_size)


class Come(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="come"):
    """A client sends a request to the router."""

    id: str
    prompt: tuple[int, ...]
    output: int = 1
    stops: tuple[int, ...] = ()
    temperature: float = 0.0


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The client disconnects. The router ends every stage that it has begun for this client."""

    id: str


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """An engine begins a step, or ends the step in flight."""

    host: HostName


class Deliver(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="deliver"):
    """The oldest message in one direction of a connection arrives.

    Attributes:
        index: index of the direction among all directions with messages, modulo their number. Other events with an
            index choose in the same way.
    """

    index: int = 0


class Repeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="repeat"):
    """The network duplicates the oldest message in one direction."""

    index: int = 0


class Serve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="serve"):
    """The engine that holds blocks sends the next chunk that another engine has requested."""

    index: int = 0


class Lose(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="lose"):
    """A connection dies silently: its present and future messages are lost, and neither end is notified."""

    index: int = 0


class Cut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cut"):
    """A connection breaks, and both ends are notified."""

    index: int = 0


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The host is stopped, as by SIGSTOP: it does nothing, and its connections stay open."""

    host: HostName


class Continue(msgspec.Struct, frozen=True, kw_only=True, tag="continue"):
    host: HostName


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """The host is killed: it loses all of its state, and its connections break."""

    host: HostName


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The host starts again at the same address, with a new engine id."""

    host: HostName


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """The host will refuse the next request from the router."""

    host: HostName


class PairWait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Time passes. Timers and deadlines expire."""

    seconds: float


PairEvent = (
    Come | Leave | Step | Deliver | Repeat | Serve | Lose | Cut | Stop | Continue | Kill | Start | Refuse | PairWait
)


class PairHistory(msgspec.Struct, frozen=True):
    world: PairWorld
    events: tuple[PairEvent, ...]


# A correct connector causes none of these faults, however the network behaves.
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
    """Message: the engine has refused the request, and holds no blocks for it."""


def _may_load(live: LiveRequest) -> bool:
    asked = live.request.kv_transfer
    return asked is not None and asked.do_remote_prefill


class PairHost:
    """A host of one engine. Each start creates a new engine without the state of the former engine.

    Args:
        name: the host's name.
        world: settings of both engines.
        model: the model of both engines.
        network: the network between them.
        clock: returns the simulated time.
        listener_at: returns the listener of a host, or None if the host does not listen.

    Attributes:
        is_up: True if the engine exists. A stopped engine exists too.
        is_stopped: True if the engine is stopped and does nothing.
        refuses: True if the engine will refuse the next request.
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
        """True if the engine has no live request, and no transfer of KV is open."""
        is_quiet = self.flight is None and not any(True for _ in self.core.live_requests())
        return is_quiet and not self.transport.servings and not len(self.transport.policy.loads)

    @property
    def hold_count(self) -> int:
        assert self.core.transfers is not None
        return len(self.core.transfers.holds)

    # --- Steps ---

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
                check_no_request_could_start(self.core, _may_load, lambda _live: False)
            return self.flight
        plan, self.flight = self.flight, None
        result = self.executor.execute(plan, self.core.flights.abandonment(plan))
        if result is None:
            self._pass_on(self.core.drop_plan(plan, now))
        else:
            self._pass_on(self.core.update_from_output(plan, result, now))
        return None

    def next_deadline(self) -> float | None:
        """Return the core's next deadline, or None during a step. The core checks deadlines only between steps."""
        return self.core.next_deadline() if self.runs and self.flight is None else None

    def expire(self) -> None:
        self._pass_on([*self.core.progress(self._now()), *self.core.expire(self._now())])
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self._now(), f"the deadline {deadline} has passed, but expire() left it"

    # --- Messages from the router ---

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        if isinstance(message, AbortIds):
            self._abort(message.ids)
            return
        assert isinstance(message, Submit)
        if message.request.id in self._asked_by:
            return  # The network has duplicated the message.
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

    # --- Rules ---

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

    # --- Helpers ---

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


ROUTER = "router"
ROUTER_PATIENCE_SECONDS = 60.0  # The router waits this long for the next message of a response.

StageKind = Literal["prefill", "decode", "whole"]
State = Literal["open", "done", "left", "failed"]


class Client:
    """Progress of one client's request.

    Args:
        event: the request.
        response: the expected response.

    Attributes:
        tokens: tokens received so far.
        stage: the running stage.
        prefilled: id of the prefill request whose blocks may be held for the decode.
    """

    def __init__(self, event: Come, response: ReferenceResponse) -> None:
        self.event = event
        self.response = response
        self.tokens: list[int] = []
        self.state: State = "open"
        self.stage: StageRequest | None = None
        self.prefilled: RequestId | None = None
        self.stage_count = 0
        self.was_refused = False


class StageRequest:
    """A request that the router has sent to an engine, and the router's end of its connection.

    Args:
        client: client that gets the response.
        kind: the stage.
        host: the engine.
    """

    def __init__(self, router: PairRouter, client: Client, kind: StageKind, host: HostName) -> None:
        self.router = router
        self.client = client
        self.kind = kind
        self.host = host
        self.id = RequestId(f"{client.event.id}.{kind}{client.stage_count}")
        self.connection: Connection | None = None

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        self.router.take_from_engine(self, connection, message)

    def broke(self, connection: Connection, why: str) -> None:
        self.router.lost(self)


class OneMessageEnd:
    """The router's end of a connection that carries only one message."""

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        pass

    def broke(self, connection: Connection, why: str) -> None:
        pass


class PairRouter:
    """A router that sends each request to both engines, stage after stage.

    Args:
        world: settings of both engines.
        network: connects the router with both engines.
        hosts: both engines.
        clock: returns the simulated time.
        count: counts occurrences by name.
    """

    def __init__(
        self,
        world: PairWorld,
        network: Network,
        hosts: Mapping[HostName, PairHost],
        *,
        clock: Callable[[], float],
        count: Callable[[str], None],
    ) -> None:
        self._world = world
        self._network = network
        self._hosts = hosts
        self._clock = clock
        self._count = count

    def begin(self, client: Client, kind: StageKind, host: HostName, params: KVTransferParams | None = None) -> None:
        """Send a stage of the client's request to an engine.

        Args:
            kind: the stage.
            host: the engine.
            params: for a decode, the transfer parameters of the prompt's KV.
        """
        client.stage_count += 1
        client.stage = stage = StageRequest(self, client, kind, host)
        self._count(f"stages: {kind}")
        output = 1 if kind == "prefill" else client.event.output
        asked = KVTransferParams(do_remote_decode=True) if kind == "prefill" else params
        if not self._hosts[host].is_up:
            self.lost(stage)
            return
        stage.connection = self._network.open({ROUTER: stage, host: self._hosts[host]})
        stage.connection.send(ROUTER, Submit(request_of(client.event, stage.id, output, asked)))
        stage.connection.patience[ROUTER] = self._clock() + ROUTER_PATIENCE_SECONDS

    def take_from_engine(self, stage: StageRequest, connection: Connection, message: msgspec.Struct) -> None:
        client = stage.client
        connection.patience[ROUTER] = self._clock() + ROUTER_PATIENCE_SECONDS
        if isinstance(message, Refused):
            self.end_stage(client)
            self.lost(stage, is_refused=True)
        elif isinstance(message, Tokens):
            if stage.kind != "prefill":
                client.tokens += message.token_ids
                self._check_response(client)
        else:
            assert isinstance(message, Finished)
            self.end_stage(client)
            self._record_end(stage, message)

    def _record_end(self, stage: StageRequest, end: Finished) -> None:
        client = stage.client
        if end.reason not in (FinishReason.LENGTH, FinishReason.STOP):
            assert end.reason is FinishReason.ERROR, f"{stage.id} ends with {end.reason}, but was not aborted"
            assert self._world.fails_without_kv, f"{stage.id} failed, but missing KV should be computed"
            self.lost(stage)
        elif stage.kind == "prefill":
            client.prefilled = None if end.kv_transfer is None else stage.id
            self.begin(client, "decode", "decode", end.kv_transfer)
        else:
            client.state = "done"
            assert tuple(client.tokens) == client.response.token_ids, f"{client.event.id} got {client.tokens}"
            assert end.reason is client.response.reason, f"{client.event.id} ends with {end.reason}"

    def lost(self, stage: StageRequest, *, is_refused: bool = False) -> None:
        """Handle the loss or refusal of a stage. If the client has no token yet, the other engine computes the request.

        Args:
            is_refused: True if the engine refused the stage.
        """
        client = stage.client
        if client.state != "open" or client.stage is not stage:
            return
        self._count(f"stages {'refused' if is_refused else 'lost'}: {stage.kind}")
        client.stage = None
        client.was_refused = client.was_refused or is_refused
        if stage.kind == "decode":
            self.release(client)
        if stage.kind == "whole" or client.tokens:
            client.state = "failed"
            return
        self.begin(client, "whole", "decode" if stage.kind == "prefill" else "prefill")

    def end_stage(self, client: Client) -> None:
        """Close the connection of the client's stage, which ends its computation."""
        assert client.stage is not None
        connection = client.stage.connection
        if connection is not None:
            if client.stage.kind == "prefill" and client.state == "left":
                # The prefill may already have ended. Without this abort, its blocks would be held although no decode
                # follows.
                connection.send(ROUTER, AbortIds((client.stage.id,)))
            self._network.close(connection, ROUTER)

    def release(self, client: Client) -> None:
        """Release the blocks that are held for the client, because no decode will read them."""
        host = self._hosts["prefill"]
        if client.prefilled is not None and host.is_up:
            connection = self._network.open({ROUTER: OneMessageEnd(), host.name: host})
            connection.send(ROUTER, AbortIds((client.prefilled,)))
            self._network.close(connection, ROUTER)
        client.prefilled = None

    def _check_response(self, client: Client) -> None:
        count = len(client.tokens)
        assert tuple(client.tokens) == client.response.token_ids[:count], (
            f"{client.event.id} got {client.tokens}, the reference has {client.response.token_ids}"
        )


def request_of(event: Come, name: RequestId, output: int, kv_transfer: KVTransferParams | None) -> EngineRequest:
    """Create an engine's request for a client.

    Args:
        event: the client's request.
        name: id of the new request.
        output: maximum number of output tokens.
        kv_transfer: parameters of the KV transfer.
    """
    return EngineRequest(
        id=name,
        prompt_token_ids=event.prompt,
        sampling=SamplingParams(temperature=event.temperature),
        output_tokens_max=output,
        stop_token_ids=frozenset(event.stops),
        seed=0,
        kv_transfer=kv_transfer,
    )
