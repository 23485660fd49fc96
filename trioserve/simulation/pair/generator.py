"""Generates histories of a pair of engines: first a world, then one event after another."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from trioserve.simulation.pair.history import (
    HOSTS,
    Come,
    Continue,
    Cut,
    Deliver,
    HostName,
    Kill,
    Leave,
    Lose,
    PairEvent,
    PairWait,
    PairWorld,
    Refuse,
    Repeat,
    Serve,
    Start,
    Step,
    Stop,
)
from trioserve.simulation.pair.simulator import PairSimulation
from trioserve.simulation.script import line_of

__all__ = ["PairGenerator"]

INDEX_MAX = 100  # more messages than a network carries at a time
STOPS: tuple[tuple[int, ...], ...] = ((), (), (0,), (1, 2))
WINDOWED_WORLDS_SHARE = 0.3


class PairGenerator:
    """Generates one history. In some histories nothing breaks, and then nothing may wait for a deadline.

    Args:
        rng: source of all random choices, used in the order of the calls.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.world = self._drawn_world()
        # From a source of its own, so that a world without a window keeps the history it had before windows existed.
        window_rng = Random(line_of(self.world))
        # Longer blocks at the reader may need KV that the sender has freed: then the reader computes it, which is no
        # fault.
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

    # --- the parts ---

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
