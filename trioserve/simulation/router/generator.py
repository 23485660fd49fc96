"""Generates histories of a router: first settings and endpoints, then events that depend on the run so far.

The generator reads only the live requests with their progress, and the endpoints. It does not read the router's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

import msgspec

from trioserve.contracts.endpoint import Stage
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.policies import POLICIES
from trioserve.simulation.router.history import (
    Add,
    Arrive,
    Ask,
    Check,
    Compute,
    Crash,
    Crowd,
    Drain,
    Fail,
    Hang,
    Leave,
    Load,
    Lose,
    Models,
    Moved,
    Note,
    Probe,
    Remove,
    Replace,
    Response,
    Role,
    RouterEvent,
    RouterWorld,
    Send,
    Silence,
    Stay,
    Stopping,
    Store,
    Token,
    Unload,
    Wait,
)
from trioserve.simulation.router.queue_rules import ExpectedRequest
from trioserve.simulation.router.simulator import RouterSimulation
from trioserve.simulation.runs import line_of

__all__ = ["RouterGenerator"]

BLOCKS = "abcdef"

Value = TypeVar("Value")


class RouterGenerator:
    """Generator of one history. Each call draws from the same source of randomness, so the order of calls matters.

    Args:
        rng: source of randomness.

    Attributes:
        world: the router's settings.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._chance = rng.random
        self.world = _drawn_world(rng)
        self._models: Sequence[tuple[str, ...]] = rng.choice(((("m",),), (("m",),), (("m",), ("n",), ("m", "n"))))
        self._tenants = rng.choice((("",), ("a", "b"), ("a", "b"), ("a", "b", "c", "d")))
        self._priorities = rng.choice(((0,), (0,), (0, 0, 1), (-1, 0, 1)))
        self._prompts = rng.choice(((0,), (0, 10, 100), (10, 300)))
        self._sequences = rng.choice(((1,), (1,), (1, 1, 2), (1, 2, 3, 5), (1, 1, 1, 8, 20)))
        self._live_max = rng.choice((4, 10, 20, 30, 30))
        self._pace = rng.choice((0.05, 0.5, 2.0))  # maximum seconds that pass in one event
        wildness = rng.random()
        self._end_share = rng.choice((0.7, 0.3, 0.1))
        self._fault_share = rng.choice((0.0, 0.1, 0.3, 0.7)) * (0.5 + wildness / 2)
        self._lie_share = rng.choice((0.0, 0.0, 0.3))
        self._roles: Sequence[EngineRole | None] = rng.choice(
            ((None,), (None,), ("prefill", "decode"), ("prefill", "decode", "both", None), ("both",))
        )
        self._disaggregated_share = 0.0 if self._roles == (None,) else rng.choice((0.5, 0.8, 1.0))
        self._names = 0
        # The next request often has the same tenant as the last request, so that tenants come in bursts.
        self._tenant = self._tenants[0]
        endpoint_count = rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 6, 12))
        # True: a rolling upgrade empties one endpoint after another while long streams run.
        is_upgraded = rng.random() < 0.25
        if is_upgraded:
            endpoint_count = rng.choice((2, 2, 3, 4))
            self._fault_share *= 0.3
            self._end_share = 0.1
        self._ids = [f"e{index}" for index in range(endpoint_count)]
        self._opening: list[RouterEvent] = []
        for id in self._ids[: rng.randint(1, endpoint_count)]:
            self._opening.append(self._drawn_endpoint(id))
            if rng.random() < 0.9:
                self._opening.append(Check(id=id))
        self._opening.reverse()
        leaving = rng.choice((0.0, 0.05, 0.1, 0.2))
        self._kinds: tuple[tuple[float, Callable[[RouterSimulation], RouterEvent | None]], ...] = (
            (rng.choice((0.0, 0.005, 0.02)), self._crash),
            (0.12 if is_upgraded else rng.choice((0.0, 0.0, 0.03)), self._empty),
            (rng.choice((0.15, 0.3, 0.5)), self._arrival),
            (leaving * wildness, self._leave),
            (rng.choice((0.0, 0.08, 0.2)), self._report),
            (0.01 + 0.05 * wildness, self._check),
            (rng.choice((0.03, 0.1)), self._wait),
            (rng.choice((0.0, 0.0, 0.01, 0.04)), self._change),
            (rng.choice((0.0, 0.0, 0.003)), self._crowd),
            (0.03 if self._disaggregated_share else 0.0, self._lose),
            (0.02 if self.world.policy == "kv_aware" else 0.0, self._store),
            (rng.choice((0.0, 0.0, 0.0, 0.005)), self._drain),
        )
        self._operator = _Operator(Random(f"adapters {line_of(self.world)}"))
        self._network = _Network(Random(f"network {line_of(self.world)}"))
        self.world = self._network.of(self.world)

    def next_event(self, simulation: RouterSimulation) -> RouterEvent:
        if self._opening:
            return self._opening.pop()
        order = self._operator.next_order(list(simulation.books.endpoints))
        if order is not None:
            return order
        fault = self._network.next_fault(simulation)
        if fault is not None:
            return fault
        chance = self._chance()
        for rate, drawn in self._kinds:
            if chance < rate:
                event = drawn(simulation)
                if event is not None:
                    return event
                break
            chance -= rate
        return self._step(simulation)

    # --- Drawing of events ---

    def _one(self, values: Sequence[Value]) -> Value:
        return values[int(self._chance() * len(values))]

    def _drawn_endpoint(self, id: str) -> Add:
        rng = self._rng
        return Add(
            id=id,
            models=rng.choice(self._models),
            leases_max=rng.choice((None, None, 1, 2, 5)),
            seats=rng.choice((1, 2, 2, 4)),
            strangers=rng.choice((0, 0, 0, 1, 3)),
            tells_seats=rng.random() < 0.6,
            role=rng.choice(self._roles),
            fingerprint=(fingerprint := rng.choice((None, "f", "f", "g"))),
            tells_clock=fingerprint is not None,
        )

    def _step(self, simulation: RouterSimulation) -> RouterEvent:
        """Draw the next event of a request with a lease: it is sent, gets its first token, fails, or ends."""
        busy = [entry for entry in simulation.books.live.values() if entry.state != "waiting"]
        if not busy:
            return self._wait(simulation)
        entry = self._one(busy)
        if entry.next is not None and self._chance() < 0.6:
            if self._chance() < 0.1:
                return Stay(name=entry.name)
            return Moved(name=entry.name, is_given=self._chance() < 0.5)
        if not entry.is_sent:
            return Send(name=entry.name)
        if entry.stage is Stage.PREFILL and self._chance() >= self._fault_share:
            return Compute(name=entry.name, outcome=self._one((None, None, None, None, "not_held", "finished")))
        if entry.is_answered and self._chance() >= self._fault_share:
            if self._chance() < self._end_share:
                return Leave(name=entry.name)
            return Token(name=entry.name, count=self._one((1, 1, 2, 20)), part=self._part())
        if not entry.is_answered and self._chance() >= self._fault_share:
            return Token(name=entry.name, part=self._part(), can_resume=self._chance() < 0.8)
        return self._failure(entry)

    def _part(self) -> float:
        return round(self._chance(), 2) if self._chance() < 0.5 else 0.0

    def _failure(self, entry: ExpectedRequest) -> Fail:
        faults: tuple[str, ...] = ("unreachable", "busy", "broke", "certain", "failed", "invalid", "hung")
        if entry.is_answered:
            faults = ("broke", "certain", "hung", "leaving", "failed", "invalid")
        elif entry.stage is Stage.DECODE:
            faults = ("busy", "broke", "failed", "invalid", "transfer")
        fault = self._one(faults)
        if fault == "certain":
            return Fail(name=entry.name, is_certain=True)
        busy_seconds = self._one((0.1, 1.0, 5.0)) if fault == "busy" else 1.0
        return Fail(name=entry.name, fault=fault, busy_seconds=busy_seconds)  # type: ignore[arg-type]

    def _arrival(self, simulation: RouterSimulation) -> Arrive | None:
        if len(simulation.books.live) >= self._live_max:
            return None
        self._names += 1
        chance = self._chance
        if chance() < 0.4:
            self._tenant = self._one(self._tenants)
        blocks: tuple[str, ...] = ()
        if self.world.policy in ("prefix_aware", "kv_aware"):
            blocks = tuple(BLOCKS[: 1 + int(chance() * len(BLOCKS))])
        can_be_disaggregated = chance() < self._disaggregated_share
        return Arrive(
            name=f"r{self._names}",
            model=self._operator.asked_for(self._one(self._one(self._models)) if chance() < 0.98 else "unknown"),
            tenant=self._tenant,
            priority=self._one(self._priorities),
            sequences=1 if can_be_disaggregated else self._one(self._sequences),
            prompt_tokens=self._one(self._prompts),
            session=self._one(("s", "t", "u")) if self.world.policy == "session" and chance() < 0.8 else None,
            pinned=self._one(self._ids) if chance() < 0.04 else None,
            blocks=blocks,
            patience=round(chance() * 3 * self._pace, 3) if chance() < 0.15 else None,
            can_be_disaggregated=can_be_disaggregated,
        )

    def _leave(self, simulation: RouterSimulation) -> RouterEvent | None:
        """Draw the end of any request, or a late event for a request that has already ended."""
        if self._chance() < 0.85 and simulation.books.live:
            return Leave(name=self._one(list(simulation.books.live)))
        known = list(simulation.entries)[-10:]
        if not known:
            return None
        name = self._one(known)
        events: tuple[RouterEvent, ...] = (Leave(name=name), Token(name=name), Fail(name=name), Compute(name=name))
        events += (Moved(name=name), Stay(name=name))
        return self._one(events)

    def _report(self, simulation: RouterSimulation) -> RouterEvent | None:
        books = list(simulation.books.endpoints.values())
        on_trial = _broken(simulation)
        books = [book for book in books if book.id in on_trial] or books
        if not books:
            return None
        book = self._one(books)
        if book.question is None:
            return Ask(id=book.id)
        if book.question.response is None:
            is_lie = self._chance() < self._lie_share
            return Response(id=book.id, lie=(int(self._chance() * 6), int(self._chance() * 6)) if is_lie else None)
        return Note(id=book.id)

    def _check(self, simulation: RouterSimulation) -> Check | Probe:
        on_trial = _broken(simulation)
        unproved = [book.id for book in simulation.books.endpoints.values() if book.waits_for_probe]
        if unproved and self._chance() < 0.5:
            id, drawn = self._one(unproved), self._chance()
            return Probe(id=id, is_well=False if drawn <= self._fault_share else None if drawn > 0.85 else True)
        ill = [book.id for book in simulation.books.endpoints.values() if not book.is_given or book.id in on_trial]
        if ill and self._chance() < 0.5:
            return Check(id=self._one(ill))
        return Check(id=self._one(self._ids), is_well=self._chance() > self._fault_share)

    def _wait(self, simulation: RouterSimulation) -> Wait:
        return Wait(seconds=round(self._chance() * self._pace, 3), is_late=self._chance() < 0.15)

    def _change(self, simulation: RouterSimulation) -> RouterEvent:
        id = self._one(self._ids)
        book = simulation.books.endpoints.get(id)
        if book is None or book.health == "draining":
            return self._drawn_endpoint(id)
        if self._disaggregated_share and self._chance() < 0.3:
            return Role(id=id, role=self._one(self._roles))
        if self._chance() < 0.3:
            return Models(id=id, models=self._one(self._models))
        return Remove(id=id)

    def _empty(self, simulation: RouterSimulation) -> RouterEvent:
        """Draw an event that stops an endpoint with running requests, or that restarts a stopped endpoint."""
        books = simulation.books.endpoints
        id = self._one(self._ids)
        if id not in books or (books[id].health == "draining" and self._chance() < 0.2):
            return self._drawn_endpoint(id)
        if not books[id].is_given or self._chance() < 0.3:
            return Check(id=id)
        move_seconds = self._one((None, 0.0, self._pace, 20 * self._pace))
        events: tuple[RouterEvent, ...] = (Stopping(id=id, move_seconds=move_seconds), Hang(id=id))
        return self._one(events) if self._chance() < 0.5 else Remove(id=id, move_seconds=move_seconds)

    def _crash(self, simulation: RouterSimulation) -> Crash | None:
        there = [book.id for book in simulation.books.endpoints.values() if book.there]
        if not there:
            return None
        id = self._one(there)
        faults: tuple[Crash, ...] = (
            Crash(id=id),
            Crash(id=id, is_over=True),
            Crash(id=id, fault="unreachable", is_over=True),
            Crash(id=id, fault="hung"),
            Crash(id=id, fault="leaving"),
        )
        return self._one(faults)

    def _lose(self, simulation: RouterSimulation) -> Lose | None:
        held = [entry.name for entry in simulation.books.live.values() if entry.stage is Stage.DECODE]
        return Lose(name=self._one(held)) if held else None

    def _crowd(self, simulation: RouterSimulation) -> Crowd:
        return Crowd(count=120, model=self._one(self._one(self._models)), tenant=self._one(("a", "crowd")))

    def _store(self, simulation: RouterSimulation) -> Store:
        blocks = tuple(BLOCKS[: 1 + int(self._chance() * len(BLOCKS))])
        return Store(id=self._one(self._ids), blocks=blocks, is_removed=self._chance() < 0.3)

    def _drain(self, simulation: RouterSimulation) -> Drain | None:
        return Drain() if self._names >= 10 and not simulation.books.is_draining else None


class _Operator:
    """Loads and unloads adapters in some histories.

    It draws from a separate source of randomness, so each seed of a history without adapters still gives the same
    history.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._adapters = rng.choice(((), (), ("x",), ("x", "y", "z")))
        self._asked_share = rng.choice((0.2, 0.5, 0.9))
        self._order_share = rng.choice((0.02, 0.1))
        self._orders: list[Load | Unload] = []

    def next_order(self, ids: Sequence[str]) -> Load | Unload | None:
        """Return the next call of the operator, or None.

        The operator loads or unloads an adapter at one endpoint after another, while requests continue.
        """
        rng = self._rng
        if not self._adapters:
            return None
        if self._orders:
            return self._orders.pop() if rng.random() < 0.3 else None
        if rng.random() < self._order_share:
            kind, adapter = rng.choice((Load, Load, Unload)), rng.choice(self._adapters)
            self._orders = [kind(id=id, adapter=adapter) for id in ids if rng.random() < 0.8]
            rng.shuffle(self._orders)
        return None

    def asked_for(self, model: str) -> str:
        """Return the model name of a request, which may be an adapter."""
        rng = self._rng
        return rng.choice(self._adapters) if self._adapters and rng.random() < self._asked_share else model


class _Network:
    """Makes connections silent, replaces processes and refuses requests, in some histories.

    It draws from a separate source of randomness.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._is_active = rng.random() < 0.2
        self._fault_share = rng.choice((0.02, 0.05, 0.15))
        self._kind_shares = rng.choice(((1, 0, 0), (0, 1, 0), (0, 0, 1), (3, 1, 2)))

    def of(self, world: RouterWorld) -> RouterWorld:
        """Return the world with limits for silent connections."""
        if not self._is_active:
            return world
        beat_seconds = self._rng.choice((0.25, 0.5, 1.0))
        return msgspec.structs.replace(
            world,
            beat_seconds=beat_seconds,
            silent_seconds_max=(2 * beat_seconds + max(1.0, beat_seconds)) * self._rng.choice((1, 2)),
            stalled_seconds_max=self._rng.choice((2.0, 6.0)),
        )

    def next_fault(self, simulation: RouterSimulation) -> Silence | Replace | Fail | Wait | None:
        rng = self._rng
        if not self._is_active or rng.random() >= self._fault_share:
            return None
        if rng.random() < 0.4:
            return Wait(seconds=round(rng.uniform(0.2, 3.0), 3), is_late=rng.random() < 0.2)
        sent = [entry for entry in simulation.books.live.values() if entry.state != "waiting" and entry.is_sent]
        kind = rng.choices((Silence, Replace, Fail), self._kind_shares)[0]
        if kind is Replace:
            ids = list(simulation.books.endpoints)
            return Replace(id=rng.choice(ids)) if ids else None
        if kind is Fail:
            sent = [entry for entry in sent if not entry.is_answered and entry.stage is not Stage.DECODE]
            sent = [entry for entry in sent if not entry.has_token]
        if not sent:
            return None
        name = rng.choice(sent).name
        return Silence(name=name) if kind is Silence else Fail(name=name, fault="refused")


def _broken(simulation: RouterSimulation) -> set[str]:
    """Return the endpoints that a stream on trial may have broken. Their reports decide the trial."""
    on_trial = (entry for entry in simulation.books.waiting if entry.is_on_trial)
    return {broken.endpoint for entry in on_trial for broken in entry.broken}


def _drawn_world(rng: Random) -> RouterWorld:
    ejection_seconds = rng.choice((0.1, 0.7, 2.0))
    return RouterWorld(
        policy=rng.choice(list(POLICIES)),
        seed=rng.randrange(100),
        queue_requests_max=rng.choice((0, 1, 3, 8, 20, 256, 256)),
        queue_prompt_tokens_max=rng.choice((50, 400, 1_000_000, 1_000_000)),
        queue_seconds_max=rng.choice((0.5, 3.0, 20.0, 60.0)),
        leases_max=rng.choice((1, 2, 3, 4, 7)),
        sequences_max=rng.choice((4, 12, 256, 256)),
        waiting_depth_max=rng.choice((0, 0, 1, 4)),
        lease_until=rng.choice(("first_token", "end")),
        load_seconds_max=rng.choice((0.3, 2.0, 7.0)),
        failures_max=rng.choice((1, 2, 3)),
        sends_probes=rng.random() < 0.5,
        failed_load_seconds=rng.choice((0.2, 10.0)),
        ejection_seconds=ejection_seconds,
        ejection_seconds_max=ejection_seconds * rng.choice((1, 3, 10)),
        slow_start_seconds=rng.choice((0.0, 0.3, 3.0, 10.0)),
        retry_share_max=rng.choice((0.0, 0.2, 1.0)),
        retries_per_second_min=rng.choice((0.0, 0.3, 3.0)),
        attempts_max=rng.choice((1, 2, 3, 4)),
        handover_waiting_max=rng.choice((1, 2, 8)),
        continuations_max=rng.choice((0, 1, 2, 16, 16)),
        continuations_per_second_max=rng.choice((0.5, 3.0, 100.0, 100.0)),
        continuations_in_a_row_max=rng.choice((1, 2, 3)),
        continuation_seconds_max=rng.choice((0.5, 3.0, 30.0)),
        breaks_max=rng.choice((1, 2, 2, 3)),
        progress_tokens_min=rng.choice((1, 3, 16)),
        moves_at_once_max=rng.choice((1, 2, 16)),
    )
