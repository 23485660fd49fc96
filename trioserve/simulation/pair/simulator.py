"""Runs one history of two real cores with the real policy of a connector, and checks all rules after each event.

The router (host.py) and the transport (transport.py) are models. Every client's tokens must equal the tokens of the
reference engine. The executors detect KV that belongs to another request. The invariants read the state of both
cores, and a connector may report only pending transfers. After all requests have ended, both pools must become free:
immediately if no connection broke, and within one deadline otherwise.

The generator draws a world first, then one event after another.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from trioserve.contracts.ids import RequestId
from trioserve.simulation.pair.host import (
    HOSTS,
    ROUTER,
    Client,
    Come,
    Continue,
    Cut,
    Deliver,
    HostName,
    Kill,
    Leave,
    Lose,
    PairEvent,
    PairHost,
    PairRouter,
    PairWait,
    PairWorld,
    Refuse,
    Repeat,
    Serve,
    StageRequest,
    Start,
    Step,
    Stop,
    request_of,
)
from trioserve.simulation.pair.transport import Holding, Network, Serving
from trioserve.simulation.reference_engine import ReferenceEngine
from trioserve.simulation.runs import EventSimulation, Trace, line_of
from trioserve.testing.fake_executor import FakeModel
from trioserve.testing.invariants import check_idle

__all__ = ["PairGenerator", "PairSimulation"]

ROUNDS_TO_END_MAX = 5_000  # No history needs this many rounds. A client that has not ended by then never ends.


class PairSimulation(EventSimulation[PairWorld]):
    """Runs one history of two engines.

    Args:
        world: settings of both engines.
        trace: called with a line for each effect.

    Attributes:
        clients: clients by name, in order of arrival.
        is_calm: True as long as no connection has broken and no message was lost.
    """

    def __init__(self, world: PairWorld, *, trace: Trace | None = None) -> None:
        super().__init__(world, trace)
        self.now = 0.0
        self.clients: dict[str, Client] = {}
        self.is_calm = True
        self.network = Network(self._runs, self._exists)
        model = FakeModel(vocab_size=world.vocab_size, stop_token_id=0, stop_period=world.stop_period)
        self.hosts: dict[HostName, PairHost] = {
            name: PairHost(name, world, model, self.network, lambda: self.now, self._listener_at) for name in HOSTS
        }
        self._router = PairRouter(world, self.network, self.hosts, clock=lambda: self.now, count=self._count)
        self._reference = ReferenceEngine(model)

    def apply(self, event: PairEvent) -> None:
        """Apply one event.

        Raises:
            AssertionError: a contract is broken. Exceptions of an engine pass through too.
        """
        _HANDLERS[type(event)](self, event)
        self._settle()
        self._count("events")

    def run_to_end(self) -> None:
        """Run until every request has ended, then check that both engines are empty."""
        for name, host in self.hosts.items():
            self.apply(Continue(host=name))
            if not host.is_up:
                self.apply(Start(host=name))
        gone_at = None
        for _ in range(ROUNDS_TO_END_MAX):
            if self._advance():
                continue
            moment = self._next_moment()
            if moment is not None and moment <= self.now:
                self.apply(PairWait(seconds=0.0))
                continue
            is_gone = all(host.is_idle for host in self.hosts.values())
            if is_gone and self.is_calm:
                for host in self.hosts.values():
                    assert host.hold_count == 0, f"{host.name} holds blocks, although nothing went wrong"
            if is_gone:
                gone_at = self.now if gone_at is None else gone_at
                for host in self.hosts.values():
                    is_in_time = self.now < gone_at + self.world.hold_seconds
                    assert host.hold_count == 0 or is_in_time, f"{host.name} holds blocks beyond their deadline"
            if moment is None:
                break
            if self.is_calm:
                waiting = [name for name, client in self.clients.items() if client.state == "open"]
                assert not waiting, f"{waiting} wait for a deadline, although nothing is broken"
            self.apply(PairWait(seconds=moment - self.now))
        waiting = [name for name, client in self.clients.items() if client.state == "open"]
        assert not waiting, f"{', '.join(waiting)} did not end"
        for host in self.hosts.values():
            check_idle(host.core)
            assert len(host.transport.policy.sends) == len(host.transport.policy.loads) == 0
            self._note_transfers(host)
        for client in self.clients.values():
            self._count(f"clients: {client.state}")
            is_excused = not self.is_calm or self.world.fails_without_kv or client.was_refused
            assert client.state != "failed" or is_excused, f"{client.event.id} failed, although nothing went wrong"

    # --- Events ---

    def _come(self, event: Come) -> None:
        if event.id in self.clients:
            return
        response = self._reference.response(request_of(event, RequestId(event.id), event.output, None))
        self.clients[event.id] = client = Client(event, response)
        self._count("requests")
        self._router.begin(client, "prefill", "prefill")

    def _leave(self, event: Leave) -> None:
        client = self.clients.get(event.id)
        if client is None or client.state != "open":
            return
        assert client.stage is not None
        self._count(f"leaves: {self._phase(client.stage)}")
        client.state = "left"
        self._router.end_stage(client)
        self._router.release(client)

    def _step(self, event: Step) -> None:
        host = self.hosts[event.host]
        if not host.runs:
            return
        plan = host.step()
        if plan is not None:
            self._count(f"steps: {host.name}")
            if self._trace is not None:
                self._trace(f"  {host.name}: {' '.join(str(chunk.request.id) for chunk in plan.chunks)}")

    def _deliver(self, event: Deliver) -> None:
        ways = self.network.deliverable()
        if ways:
            connection, party = ways[event.index % len(ways)]
            if self._trace is not None:
                self._trace(f"  to {party}: {connection.ways[party][0]}")
            self.network.deliver(connection, party)
            self._count("messages")

    def _repeat(self, event: Repeat) -> None:
        ways = self.network.deliverable()
        if ways:
            connection, party = ways[event.index % len(ways)]
            if (
                connection.is_open and ROUTER not in connection.ends
            ):  # The router's connections use HTTP, which never duplicates a message.
                connection.ways[party].appendleft(connection.ways[party][0])
                self._count("messages that arrived twice")

    def _serve(self, event: Serve) -> None:
        servings = self.servings()
        if servings:
            servings[event.index % len(servings)].proceed()

    def servings(self) -> list[Serving]:
        """Return the transfers for which an engine could send a chunk now."""
        return [serving for host in self.hosts.values() if host.runs for serving in host.transport.servings]

    def _lose(self, event: Lose) -> None:
        if self.network.connections:
            connection = self.network.connections[event.index % len(self.network.connections)]
            connection.is_dead = True
            for way in connection.ways.values():
                way.clear()
            self.is_calm = False
            self._count("connections that broke without a notice")

    def _cut(self, event: Cut) -> None:
        if self.network.connections:
            self.network.cut(self.network.connections[event.index % len(self.network.connections)], "it broke")
            self.is_calm = False
            self._count("connections that broke")

    def _stop(self, event: Stop) -> None:
        host = self.hosts[event.host]
        if host.runs:
            host.is_stopped = True
            self._count("stops")

    def _continue(self, event: Continue) -> None:
        self.hosts[event.host].is_stopped = False
        self._wait(PairWait(seconds=0.0))

    def _kill(self, event: Kill) -> None:
        host = self.hosts[event.host]
        if not host.is_up:
            return
        self._note_transfers(host)
        host.is_up = False
        self.is_calm = False
        self._count("kills")
        for connection in [one for one in self.network.connections if host.name in one.ends]:
            self.network.cut(connection, "the other side was killed")

    def _start(self, event: Start) -> None:
        host = self.hosts[event.host]
        if not host.is_up:
            host.start()

    def _refuse(self, event: Refuse) -> None:
        self.hosts[event.host].refuses = True
        self._count("refusals")

    def _wait(self, event: PairWait) -> None:
        until = self.now + event.seconds
        while True:
            moment = self._next_moment()
            if moment is None or moment > until:
                self.now = until
                return
            self.now = max(self.now, moment)
            self._run_due()
            self._settle()

    def _next_moment(self) -> float | None:
        """Return the next time at which a timer or a deadline expires, or None."""
        moments = [self.network.next_impatience()]
        for host in self.hosts.values():
            if host.runs:
                moments += [host.timers.next_moment, host.next_deadline()]
        return min((moment for moment in moments if moment is not None), default=None)

    def _run_due(self) -> None:
        """Handle one timer or deadline that has expired."""
        impatient = self.network.impatient(self.now)
        if impatient is not None:
            self.is_calm = False
            self.network.abandon(*impatient)
            return
        for host in self.hosts.values():
            if host.runs and host.timers.ring(self.now):
                return
        for host in self.hosts.values():
            deadline = host.next_deadline()
            if deadline is not None and deadline <= self.now:
                host.expire()

    def _advance(self) -> bool:
        """Apply an event that makes progress without time passing.

        Returns:
            False if only time can make progress.
        """
        if self.network.deliverable():
            self.apply(Deliver())
            return True
        if self.servings():
            self.apply(Serve())
            return True
        before = [self._progress_of(host) for host in self.hosts.values()]
        for name in self.hosts:
            self.apply(Step(host=name))
        after = [self._progress_of(host) for host in self.hosts.values()]
        return before != after or bool(self.network.deliverable())

    def _progress_of(self, host: PairHost) -> tuple[object, ...]:
        return host.flight, host.hold_count, self.counts.get(f"steps: {host.name}", 0)

    # --- Rules ---

    def _settle(self) -> None:
        """Let the transports do their pending work, then check both engines."""
        for host in self.hosts.values():
            if host.runs:
                host.transport.work()
        for host in self.hosts.values():
            if host.is_up:
                host.check()
        self._count("checks of both engines")

    # --- Helpers ---

    def _phase(self, stage: StageRequest) -> str:
        """Describe the state of a stage, for the counts."""
        core = self.hosts[stage.host].core
        live = next((live for live in core.live_requests() if live.request.id == stage.id), None)
        if live is None:
            return f"{stage.kind} is on its way"
        return f"{stage.kind} is {live.status.value}"

    def _runs(self, party: str) -> bool:
        return party == ROUTER or any(host.runs for name, host in self.hosts.items() if name == party)

    def _exists(self, party: str) -> bool:
        return party == ROUTER or any(host.is_up for name, host in self.hosts.items() if name == party)

    def _listener_at(self, name: str) -> Holding | None:
        return next((host.transport.listener for host in self.hosts.values() if host.name == name and host.is_up), None)

    def _note_transfers(self, host: PairHost) -> None:
        policy = host.transport.policy
        for load_end, count in policy.loads.ends.items():
            self._count(f"loads: {load_end.value}", count)
        for send_end, count in policy.sends.ends.items():
            self._count(f"holds: {send_end.value}", count)
        self._count("loads resumed over another connection", policy.loads.resumed_total)


_HANDLERS: dict[type[PairEvent], Callable[[PairSimulation, Any], None]] = {
    Come: PairSimulation._come,
    Leave: PairSimulation._leave,
    Step: PairSimulation._step,
    Deliver: PairSimulation._deliver,
    Repeat: PairSimulation._repeat,
    Serve: PairSimulation._serve,
    Lose: PairSimulation._lose,
    Cut: PairSimulation._cut,
    Stop: PairSimulation._stop,
    Continue: PairSimulation._continue,
    Kill: PairSimulation._kill,
    Start: PairSimulation._start,
    Refuse: PairSimulation._refuse,
    PairWait: PairSimulation._wait,
}


INDEX_MAX = 100  # larger than the number of messages in a network at any time
STOPS: tuple[tuple[int, ...], ...] = ((), (), (0,), (1, 2))
WINDOWED_WORLDS_SHARE = 0.3


class PairGenerator:
    """Generates one history. In some histories no connection breaks, so no request may have to wait for a deadline.

    Args:
        rng: source of all random choices, used in the order of the calls.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.world = self._drawn_world()
        # Windows are drawn from a separate source. So each seed of a world without a window gives the same history as
        # before this module could draw windows.
        window_rng = Random(line_of(self.world))
        # If the decode engine has longer blocks, it may need KV that the prefill engine has already freed. It
        # then computes that KV itself, which is no error. So worlds with such blocks have no window.
        can_have_window = self.world.prefill_block_size % self.world.decode_block_size == 0
        if can_have_window and window_rng.random() < WINDOWED_WORLDS_SHARE:
            self.world = msgspec.structs.replace(self.world, window_tokens=window_rng.choice((2, 3, 4, 6, 9)))
        wildness = rng.choice((0.0, 0.0, 0.3, 1.0))
        self._kinds: tuple[tuple[float, Callable[[PairSimulation], PairEvent | None]], ...] = (
            (rng.choice((0.03, 0.06)), self._arrival),
            (rng.choice((0.0, 0.01, 0.03)), self._leave),
            (0.25, lambda simulation: Step(host=self._host())),
            (0.15, self._serve),
            (0.02, self._wait),
            (rng.choice((0.0, 0.01)), lambda simulation: Refuse(host=self._host())),
            (0.02 * wildness, lambda simulation: Repeat(index=self._index())),
            (0.01 * wildness, lambda simulation: Lose(index=self._index())),
            (0.01 * wildness, lambda simulation: Cut(index=self._index())),
            (0.01 * wildness, lambda simulation: Stop(host=self._host())),
            (0.006 * wildness, lambda simulation: Kill(host=self._host())),
        )
        self._families = [self._tokens(self.world.context_tokens_max) for _ in range(2)]
        self._arrivals = 0

    def next_event(self, simulation: PairSimulation) -> PairEvent:
        for host in simulation.hosts.values():
            if not host.runs and self._rng.random() < 0.1:
                return Continue(host=host.name) if host.is_up else Start(host=host.name)
        chance = self._rng.random()
        for rate, drawn in self._kinds:
            if chance < rate:
                event = drawn(simulation)
                if event is not None:
                    return event
                break
            chance -= rate
        return Deliver(index=self._index()) if simulation.network.deliverable() else Step(host=self._host())

    # --- Drawing of events ---

    def _host(self) -> HostName:
        return HOSTS[self._rng.random() < 0.5]

    def _index(self) -> int:
        return int(self._rng.random() * INDEX_MAX)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(self.world.vocab_size), k=count))

    def _drawn_world(self) -> PairWorld:
        rng = self._rng
        return PairWorld(
            prefill_blocks=rng.randint(4, 16),
            decode_blocks=rng.randint(4, 16),
            prefill_block_size=rng.choice((1, 2, 3, 4)),
            decode_block_size=rng.choice((1, 2, 3, 4)),
            max_num_seqs=rng.choice((1, 2, 3)),
            step_tokens_max=rng.choice((3, 4, 8, 16)),
            chunk_tokens=rng.choice((1, 2, 3, 100)),
            vocab_size=rng.choice((2, 4, 50)),
            stop_period=rng.choice((4, 8)),
            enable_prefix_caching=rng.random() < 0.7,
            hold_seconds=rng.choice((2.0, 10.0)),
            load_seconds=rng.choice((2.0, 10.0)),
            fails_without_kv=rng.random() < 0.15,
        )

    def _arrival(self, simulation: PairSimulation) -> Come | None:
        rng = self._rng
        context = self.world.context_tokens_max
        if sum(client.state == "open" for client in simulation.clients.values()) >= 6:
            return None
        family = self._families[rng.random() < 0.5]
        prompt = (family[: 1 + int(rng.random() * 10)] + self._tokens(int(rng.random() * 4)))[: context - 1]
        self._arrivals += 1
        return Come(
            id=f"c{self._arrivals}",
            prompt=prompt,
            output=1 + int(rng.random() * min(8, context - len(prompt))),
            stops=rng.choice(STOPS),
            temperature=rng.choice((0.0, 1.0)),
        )

    def _leave(self, simulation: PairSimulation) -> Leave | None:
        waiting = [name for name, client in simulation.clients.items() if client.state == "open"]
        return Leave(id=self._rng.choice(waiting)) if waiting else None

    def _serve(self, simulation: PairSimulation) -> Serve | None:
        return Serve(index=self._index()) if simulation.servings() else None

    def _wait(self, _simulation: PairSimulation) -> PairWait:
        return PairWait(seconds=round(self._rng.choice((0.3, 1.0, 3.0, 8.0)) * self._rng.random(), 3))
