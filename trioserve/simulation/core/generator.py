"""Generates histories from one source of randomness: first a world, then events that depend on the run so far.

The generator sees only what a client or a step loop would see (live requests, steps in flight), not the inside of the
core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.simulation.core.history import (
    Abort,
    Ahead,
    Arrive,
    Begin,
    Break,
    Drain,
    EndSession,
    Event,
    Fail,
    Forget,
    Forward,
    HintSession,
    Inquire,
    LimitBlocks,
    OpenSession,
    Report,
    Retract,
    Update,
    Wait,
    World,
)
from trioserve.simulation.core.simulator import Simulation
from trioserve.simulation.runs import line_of
from trioserve.testing.automaton_guide import Automaton

__all__ = ["Generator"]

INQUIRE, BEGIN, AHEAD, FORWARD, UPDATE = Inquire(), Begin(), Ahead(), Forward(), Update()
RETRACT, FORGET = Retract(), Forget()
INQUIRE_CHANCE = 0.3  # probability that the core asks for reports before the next step begins
AHEAD_CHANCE = 0.5  # probability that a step is planned ahead before anything else happens to the step in flight
SALTS = (None, None, None, None, None, "", "s")
STOPS: tuple[tuple[int, ...], ...] = ((), (), (0,), (0,), (1, 2), (0, 1))
REPORTS: tuple[Literal["loaded", "failed", "released", "read"], ...] = ("loaded", "failed", "released", "read")
CALLS = (
    "num_matched_tokens",
    "start_load",
    "load_abandoned",
    "request_finished",
    "transfer_params",
    "hold_expired",
    "progress",
)
WAITS_SHARE = 0.5  # fraction of the reports that wait until the core asks for them
GUIDED_WORLDS_SHARE = 0.4
WINDOWED_WORLDS_SHARE = 0.3
RESUMING_WORLDS_SHARE = 0.4
STATE_WORLDS_SHARE = 0.4
RETRACTING_WORLDS_SHARE = 0.2
RETRACT_CHANCE, FORGET_CHANCE = 0.04, 0.03  # probabilities at each event of a world with retractions
LIMITING_WORLDS_SHARE = 0.15
LIMIT_CHANCE = 0.06  # probability at each event of a world in which the blocks are limited
SESSION_WORLDS_SHARE = 0.3
SESSION_CHANCES = (0.02, 0.05, 0.08)  # probabilities of an event that opens, hints at or ends a session, summed
PREFETCHING_WORLDS_SHARE = 0.7  # fraction of the worlds with sessions and a connector that have prefetches
PREFETCH_CHANCES = (0.1, 0.3)  # probabilities of a hint, and of the loss of all cached blocks between requests, summed
IN_SESSION_SHARE = 0.7  # in a world with sessions: fraction of the requests that have a session
NEXT_TURN_SHARE = 0.7  # fraction of the requests with a session that continue its last request
APART_WORLDS_SHARE = 0.4  # fraction of the worlds with overlapping steps that have steps_apart
DRAFT_MODEL_SHARE = 0.5
DRAFT_HEAD_SHARE = 0.3  # fraction of the worlds with a draft model in which a head is the draft model
PROMPT_TOKENS_MAX = 16  # Longer prompts would take more time without adding cases.
OUTPUT_TOKENS_MAX = 10


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Probability of each kind of disturbance as the next event. If none is drawn, the step continues.

    Attributes:
        abort: an abort.
        fail: a failure of requests.
        wait: time passes.
        drain: a drain.
        report: a report about an open transfer.
        strange_report: a wrong report, or a report that belongs to no open transfer.
        break_calls: from then on, the connector raises in one of its calls, or in no call.
        timeout_share: fraction of the requests with a deadline.
        lost_share: fraction of the requests whose transfers are never reported.
        slow_seconds_max: longest time that passes in one event, in seconds.
    """

    abort: float
    fail: float
    wait: float
    drain: float
    report: float
    strange_report: float
    break_calls: float
    timeout_share: float
    lost_share: float
    slow_seconds_max: float


def drawn_faults(rng: Random, *, has_connector: bool) -> Faults:
    wildness = rng.random()
    return Faults(
        abort=rng.choice((0.0, 0.05, 0.1, 0.2)) * 2 * wildness,
        fail=rng.choice((0.0, 0.0, 0.03, 0.1)) * wildness,
        wait=0.08,
        drain=rng.choice((0.0, 0.0, 0.0, 0.02)),
        report=rng.choice((0.1, 0.2)) if has_connector else 0.0,
        strange_report=0.04 * wildness if has_connector else 0.0,
        break_calls=rng.choice((0.0, 0.0, 0.02)) if has_connector else 0.0,
        lost_share=rng.choice((0.0, 0.1, 0.5)),
        timeout_share=rng.choice((0.0, 0.0, 0.1, 0.4)),
        slow_seconds_max=rng.choice((0.05, 1.0)),
    )


class Generator:
    """Generator of one history. Each call draws from the same source of randomness, so the order of calls matters.

    Args:
        rng: source of randomness.

    Attributes:
        world: the world.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._random = rng.random
        self.world = self._drawn_world()
        # States are drawn from a separate source of randomness. So each seed of a world without states still gives the
        # history that it gave before this module could draw states.
        self._state_rng = Random(line_of(self.world) + "states")
        can_have_states = self.world.keeps_kv and not (self.world.has_connector or self.world.draft_tokens)
        if can_have_states and self._state_rng.random() < STATE_WORLDS_SHARE:
            slots = {"states": self._state_rng.randint(1, 6), "snapshots": self._state_rng.choice((0, 1, 2, 3, 8))}
            self.world = msgspec.structs.replace(self.world, **slots)
        # Windows and guides are also drawn from separate sources.
        window_rng = Random(line_of(self.world) + "window")
        self._guide_rng = Random(line_of(msgspec.structs.replace(self.world, states=0, snapshots=0)))
        has_guides = self.world.keeps_kv and self._guide_rng.random() < GUIDED_WORLDS_SHARE
        self._guided_share = self._guide_rng.choice((0.2, 0.6, 1.0)) if has_guides else 0.0
        # Resumed responses are also drawn from a separate random source.
        self._resume_rng = Random(line_of(msgspec.structs.replace(self.world, states=0, snapshots=0)) + "resume")
        can_resume = self.world.keeps_kv and self._resume_rng.random() < RESUMING_WORLDS_SHARE
        self._resumed_share = self._resume_rng.choice((0.1, 0.3, 0.6)) if can_resume else 0.0
        if self.world.draft_tokens:
            drafts_rng = Random(line_of(self.world) + "draft model")
            by_model = drafts_rng.random() < DRAFT_MODEL_SHARE
            by_head = by_model and drafts_rng.random() < DRAFT_HEAD_SHARE
            self.world = msgspec.structs.replace(self.world, drafts_by_model=by_model, drafts_by_head=by_head)
        # A draft model may read tokens outside of the window, so a world with a draft model has no window.
        may_have_window = self.world.keeps_kv and not self.world.drafts_by_model
        if may_have_window and window_rng.random() < WINDOWED_WORLDS_SHARE:
            self.world = msgspec.structs.replace(self.world, window_tokens=window_rng.choice((2, 3, 4, 6, 9, 40)))
        if self.world.overlaps and Random(line_of(self.world) + "apart").random() < APART_WORLDS_SHARE:
            self.world = msgspec.structs.replace(self.world, apart=True)
        # Retractions are also drawn from a separate source.
        self._retract_rng = Random(line_of(self.world) + "retract")
        self._retracts = self._retract_rng.random() < RETRACTING_WORLDS_SHARE
        # Sessions are also drawn from a separate source.
        self._session_rng = Random(line_of(self.world) + "sessions")
        if self.world.enable_prefix_caching and self._session_rng.random() < SESSION_WORLDS_SHARE:
            sessions = {"sessions": self._session_rng.randint(1, 4)}
            share = self._session_rng.choice((0.3, 0.75, 1.0))
            self.world = msgspec.structs.replace(self.world, session_share=share, **sessions)
            seconds = Random(line_of(self.world) + "cold turns").choice((0.0, 0.3, 5.0))
            self.world = msgspec.structs.replace(self.world, cold_turn_seconds=seconds)
            if self.world.has_connector and self.world.window_tokens is None:
                prefetches = Random(line_of(self.world) + "prefetches").random() < PREFETCHING_WORLDS_SHARE
                self.world = msgspec.structs.replace(self.world, prefetches=prefetches)
        self._prefetch_rng = Random(line_of(self.world) + "prefetches")
        # Limits of blocks are also drawn from a separate source.
        self._limit_rng = Random(line_of(self.world) + "limits")
        world = self.world
        if world.keeps_kv and world.held_blocks_max <= world.block_count:
            limits_blocks = self._limit_rng.random() < LIMITING_WORLDS_SHARE
            self.world = msgspec.structs.replace(world, limits_blocks=limits_blocks)
        self._was_forgotten = False  # True if the last event of _prefetch_event was the loss of the cached blocks.
        self._last_turns: dict[str, str] = {}  # The last request of each session.
        self._arrived: dict[str, Arrive] = {}  # Each sequence is stored as a request with one choice.
        self._faults = drawn_faults(rng, has_connector=self.world.has_connector)
        self._arrival_rate = rng.choice((0.1, 0.25, 0.4))
        self._live_max = rng.choice((3, 6, 10))
        self._priorities = rng.choice(((0,), (0,), (0, 0, 1), (-1, 0, 1)))
        self._arrivals = 0
        self._aborted: tuple[str, ...] = ()
        self._lost: set[str] = set()  # requests whose transfers the connector never reports
        faults = self._faults
        self._kinds: tuple[tuple[float, Callable[[Simulation], Event | None]], ...] = (
            (self._arrival_rate, self._arrival),
            (faults.abort, self._abort),
            (faults.wait, self._wait),
            (faults.fail, self._fail),
            (faults.drain, self._drain),
            (faults.report, self._report),
            (faults.strange_report, self._strange_report),
            (faults.break_calls, self._break),
        )
        # A shared prefix of several prompts is the beginning of one of these token sequences.
        self._families = [self._tokens(self.world.context_tokens_max) for _ in range(rng.choice((1, 2, 2)))]

    def next_event(self, simulation: Simulation) -> Event:
        if self._retracts and (event := self._retraction(simulation)) is not None:
            return event
        if self.world.limits_blocks and self._limit_rng.random() < LIMIT_CHANCE:
            return LimitBlocks(count=self._limit_rng.randint(self.world.held_blocks_max, self.world.block_count))
        if self.world.sessions and (event := self._session_event()) is not None:
            return event
        if self.world.prefetches and (event := self._prefetch_event(simulation)) is not None:
            return event
        chance = self._random()
        for rate, drawn in self._kinds:
            if chance < rate:
                event = drawn(simulation)
                if event is not None:
                    return event
                break
            chance -= rate
        flights = simulation.flights
        transfers = simulation.transfers
        if transfers is not None and transfers.connector.outbox and self._random() < INQUIRE_CHANCE:
            return INQUIRE
        if not flights:
            return BEGIN
        if self.world.overlaps and len(flights) == 1 and self._random() < AHEAD_CHANCE:
            return AHEAD
        if not flights[0].is_computed:
            return FORWARD
        # The second forward pass may end before the core processes the result of the first one.
        is_next = len(flights) == 2 and not flights[1].is_computed
        return FORWARD if is_next and self._random() < 0.5 else UPDATE

    def _retraction(self, simulation: Simulation) -> Event | None:
        chance = self._retract_rng.random()
        if chance < FORGET_CHANCE:
            return FORGET
        is_between = not simulation.flights
        return RETRACT if is_between and chance < FORGET_CHANCE + RETRACT_CHANCE else None

    def _session_event(self) -> Event | None:
        rng = self._session_rng
        chance = rng.random()
        if chance >= SESSION_CHANCES[-1]:
            return None
        name = f"s{rng.randrange(self.world.sessions)}"
        if chance < SESSION_CHANCES[0]:
            weight, idle = rng.choice((0.0, 0.1, 1.0, 4.0)), rng.choice((0.05, 0.5, 5.0))
            return OpenSession(id=name, weight=weight, idle=idle, tenant=rng.choice((None, "t")))
        if chance < SESSION_CHANCES[1]:
            return HintSession(id=name, seconds=rng.choice((0.0, 0.3, 100.0)))
        return EndSession(id=name)

    def _prefetch_event(self, simulation: Simulation) -> Event | None:
        """Draw an event that makes prefetches likely: a hint, the loss of the cached blocks, or the end of a load."""
        rng = self._prefetch_rng
        pending = [] if simulation.transfers is None else simulation.transfers.prefetches()
        if pending and rng.random() < PREFETCH_CHANCES[0]:
            load = rng.choice(pending)
            tokens = None if rng.random() < 0.7 else rng.randrange(load.token_count + 1)
            return Report(id=load.request.id, what="loaded", tokens=tokens)
        chance = rng.random()
        if self._was_forgotten or chance < PREFETCH_CHANCES[0]:
            self._was_forgotten = False
            return HintSession(id=f"s{rng.randrange(self.world.sessions)}", seconds=rng.choice((0.0, 0.0, 2.1, 100.0)))
        self._was_forgotten = chance < PREFETCH_CHANCES[1] and not simulation.live
        return FORGET if self._was_forgotten else None

    # --- Drawing of events ---

    def _below(self, count: int) -> int:
        return int(self._random() * count)

    def _one(self, values: Sequence[str]) -> str:
        return values[int(self._random() * len(values))]

    def _some(self, values: Sequence[str]) -> list[str]:
        """Return a list of one or two values. The same value may be drawn twice."""
        return [self._one(values) for _ in range(1 + (self._random() < 0.3))]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(self.world.vocab_size), k=count))

    def _drawn_world(self) -> World:
        rng = self._rng
        block_size = rng.choice((1, 2, 3, 4))
        max_num_seqs = rng.choice((1, 2, 3, 3, 4, 5))
        draft_tokens = rng.choice((0, 0, 1, 3, 8))
        keeps_kv = rng.random() < 0.9
        if not keeps_kv:
            return World(
                block_count=rng.randint(3, 24),
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                step_tokens_max=max_num_seqs + rng.choice((0, 1, 3, 8, 16)),
                vocab_size=rng.choice((2, 4, 50)),
                enable_prefix_caching=False,
                overlaps=rng.random() < 0.6,
                keeps_kv=False,
            )
        return World(
            block_count=rng.randint(3, 9) if rng.random() < 0.6 else rng.randint(10, 24),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            step_tokens_max=max_num_seqs + rng.choice((0, 1, 3, 8, 16)),
            # Draft tokens are copied from repetitions in the text. With few different tokens, repetitions are likely.
            vocab_size=rng.choice((1, 2, 2, 4) if draft_tokens else (2, 4, 4, 50)),
            stop_period=rng.choice((2, 4, 8)),
            enable_prefix_caching=rng.random() < 0.8,
            draft_tokens=draft_tokens,
            draft_step_tokens=rng.choice((2, 4, 16)),
            has_poor_hash=rng.random() < 0.2,
            has_connector=rng.random() < 0.4,
            overlaps=draft_tokens == 0 and rng.random() < 0.6,
            hold_seconds=rng.choice((0.2, 1.0)),
            load_seconds=rng.choice((0.2, 1.0)),
            fails_without_kv=rng.random() < 0.3,
            overtakes_max=rng.choice((0, 1, 2, 5, 64)),
        )

    def _wait(self, _simulation: Simulation) -> Wait:
        return Wait(seconds=round(self._random() * self._faults.slow_seconds_max, 3))

    def _fail(self, simulation: Simulation) -> Fail | None:
        in_step = _in_step(simulation)
        return Fail(ids=tuple(self._some(in_step))) if in_step else None

    def _drain(self, simulation: Simulation) -> Drain | None:
        if self._arrivals < 10 or simulation.is_draining:
            return None
        return Drain(seconds=round(self._random() * 2, 3))

    def _report(self, simulation: Simulation) -> Report | None:
        """Draw a report about an open transfer: loaded completely or partly, failed, read, or released."""
        assert simulation.transfers is not None
        connector = simulation.transfers.connector
        loads = [name for name in connector.loads if name not in self._lost]
        sends = [name for name in connector.sends if name not in self._lost]
        waits = self._random() < WAITS_SHARE
        if sends and (not loads or self._random() < 0.5):
            return Report(id=self._one(sends), what="read" if self._random() < 0.4 else "released", waits=waits)
        if not loads:
            return None
        name = self._one(loads)
        chance = self._random()
        if chance < 0.2:
            return Report(id=name, what="failed", waits=waits)
        if chance < 0.7:
            return Report(id=name, what="loaded", waits=waits)
        tokens = self._below(connector.loads[RequestId(name)].token_count + 1)
        return Report(id=name, what="loaded", tokens=tokens, waits=waits)

    def _strange_report(self, simulation: Simulation) -> Report:
        """Draw a wrong report.

        The report may be repeated or late, name an unknown request, have the wrong kind, or have an impossible count.
        """
        names = list(simulation.entries)[-12:]
        name = self._one(names) if names and self._random() < 0.8 else "nobody"
        what = REPORTS[self._below(len(REPORTS))]
        tokens = (-1, 0, 1, 1000)[self._below(4)] if what == "loaded" and self._random() < 0.5 else None
        return Report(id=name, what=what, tokens=tokens, waits=self._random() < WAITS_SHARE)

    def _break(self, _simulation: Simulation) -> Break:
        return Break(calls=() if self._random() < 0.5 else (self._one(CALLS),))

    def _arrival(self, simulation: Simulation) -> Arrive | None:
        arrival = self._new_arrival(simulation)
        if arrival is not None and self.world.sessions and self._session_rng.random() < IN_SESSION_SHARE:
            arrival = self._in_session(arrival, simulation)
        if arrival is None or arrival.pooled is not None:
            return arrival
        if self._resumed_share:
            arrival = self._resumed(arrival, simulation)
            for index, name in enumerate(arrival.sequence_ids):
                self._arrived[name] = msgspec.structs.replace(arrival, choices=1, seed=arrival.seed + index)
        return arrival

    def _in_session(self, arrival: Arrive, simulation: Simulation) -> Arrive:
        """Make an arrival a turn of a session. Most turns continue the last request of their session."""
        rng = self._session_rng
        name = f"s{rng.randrange(self.world.sessions)}"
        last = simulation.entries.get(self._last_turns.get(name, ""))
        self._last_turns[name] = arrival.sequence_ids[-1]
        continues = last is not None and rng.random() < NEXT_TURN_SHARE
        if last is None or not continues or arrival.pooled is not None or not arrival.can_run(self.world):
            return msgspec.structs.replace(arrival, session=name)
        more = rng.choices(range(self.world.vocab_size), k=rng.randint(0, 2))
        prompt = (*last.known, *more)[: self.world.context_tokens_max - arrival.output]
        return msgspec.structs.replace(arrival, session=name, prompt=prompt, salt=last.request.cache_salt)

    def _resumed(self, arrival: Arrive, simulation: Simulation) -> Arrive:
        """Turn some arrivals into requests that resume a response.

        The known output comes from a request that was aborted in this history, or from another engine.
        """
        rng = self._resume_rng
        if rng.random() >= self._resumed_share:
            return arrival
        broken = [
            name
            for name, entry in simulation.entries.items()
            if name in self._arrived and entry.aborted_for is not None and entry.finished is not None
        ]
        if broken and rng.random() < 0.5:
            name = rng.choice(broken)
            known = max(1, simulation.entries[name].output_count)
            return msgspec.structs.replace(self._arrived[name], id=arrival.id, known=known)
        return msgspec.structs.replace(arrival, known=rng.randint(1, max(1, arrival.output - (rng.random() < 0.98))))

    def _new_arrival(self, simulation: Simulation) -> Arrive | None:
        arrival = self._free_arrival(simulation)
        if arrival is None or arrival.pooled is not None or self._guide_rng.random() >= self._guided_share:
            return arrival
        # With `min_tokens`, the mask would also hide stop tokens, and then it might allow no token at all.
        return msgspec.structs.replace(arrival, guide=self._automaton(), min_tokens=0)

    def _automaton(self) -> Automaton:
        """Draw a chain of states that ends or repeats. Each state allows one to three tokens."""
        rng, tokens = self._guide_rng, range(self.world.vocab_size)
        state_count = rng.randint(1, 6)
        ends = rng.random() < 0.6
        states = []
        for state in range(state_count):
            is_last = state == state_count - 1
            allowed = rng.sample(tokens, min(len(tokens), rng.choice((1, 1, 1, 2, 3))))
            next_states = (state_count if ends else 0,) if is_last else (state + 1, state + 1, state + 1, state)
            states.append(tuple((token, rng.choice(next_states)) for token in sorted(allowed)))
        return (*states, ()) if ends else tuple(states)

    def _free_arrival(self, simulation: Simulation) -> Arrive | None:
        if len(simulation.live) >= self._live_max:
            return None
        chance = self._random
        name = f"r{self._arrivals}"
        self._arrivals += 1
        context = self.world.context_tokens_max
        prompt = self._prompt(simulation)[: min(PROMPT_TOKENS_MAX, context - 1)]
        output = 1 + self._below(min(OUTPUT_TOKENS_MAX, context - len(prompt)))
        priority = self._priorities[self._below(len(self._priorities))]
        if chance() < 0.02:  # This request can never run.
            defect = self._below(4)
            prompt = () if defect == 0 else prompt
            output = (output, 0, context, output)[defect]
            priority = 1000 if defect == 3 else priority
        remote = self._below(len(prompt) + 2) if self.world.has_connector and chance() < 0.5 else 0
        is_sent = self.world.has_connector and chance() < 0.4
        if chance() < self._faults.lost_share:
            self._lost.add(name)
        timeout = round(chance() * 2, 3) if chance() < self._faults.timeout_share else None
        if not self.world.keeps_kv or chance() < 0.12:
            pooled: Literal["chunks", "whole"] = "whole"
            if self.world.keeps_kv and chance() < 0.5:
                pooled = "chunks"
            elif chance() < 0.95:
                prompt = prompt[: self.world.whole_tokens_max]
            return Arrive(
                id=name,
                prompt=prompt,
                output=output,
                pooled=pooled,
                choices=2 + self._below(2) if chance() < 0.1 else 1,
                priority=priority,
                salt=SALTS[self._below(len(SALTS))],
                timeout=timeout,
                remote=remote,
                is_sent=is_sent,
            )
        if chance() < 0.6:  # Most requests have no special options.
            return Arrive(
                id=name,
                prompt=prompt,
                output=output,
                priority=priority,
                timeout=timeout,
                remote=remote,
                is_sent=is_sent,
            )
        return Arrive(
            id=name,
            prompt=prompt,
            output=output,
            choices=2 + self._below(2) if chance() < 0.25 else 1,
            priority=priority,
            salt=SALTS[self._below(len(SALTS))],
            stops=STOPS[self._below(len(STOPS))],
            min_tokens=2 if chance() < 0.2 and output >= 2 else 0,
            logprobs=1 if chance() < 0.15 else None,
            prompt_logprobs=1 if chance() < 0.15 else None,
            temperature=1.0 if chance() < 0.3 else 0.0,
            seed=self._below(3),
            timeout=timeout,
            remote=remote,
            is_sent=is_sent,
        )

    def _prompt(self, simulation: Simulation) -> tuple[int, ...]:
        chance = self._random()
        if chance < 0.15:
            return self._tokens(1 + self._below(8))
        if chance < 0.35 and simulation.live:
            # The prompt begins with the tokens of another request, as in the next turn of a chat.
            known = simulation.live[self._one(list(simulation.live))].known
            return tuple(known[: 1 + self._below(len(known))]) + self._tokens(self._below(3))
        family = self._families[self._below(len(self._families))]
        return family[: 1 + self._below(12)] + self._tokens(self._below(4))

    def _abort(self, simulation: Simulation) -> Abort:
        chance = self._random()
        ids: list[str]
        in_step = _in_step(simulation)
        if chance < 0.4 and simulation.live:
            ids = self._some(list(simulation.live))
        elif chance < 0.65 and in_step:
            ids = self._some(in_step)
        elif chance < 0.75 and in_step:
            ids = in_step  # After this abort, no request waits for the step any more.
        elif chance < 0.85 and simulation.entries:
            ids = self._some(list(simulation.entries)[-8:])  # Most of these requests have ended.
        elif chance < 0.93 and self._aborted:
            ids = list(self._aborted)  # The last abort is repeated.
        else:
            known = self._one(list(simulation.live)) if simulation.live else "r"
            ids = [(known[:-1], f"{known}0", "nobody", "")[self._below(4)], *self._some([known])]
        self._aborted = tuple(ids)
        chance = self._random()
        reasons = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.STOP, FinishReason.HANDED_OVER)
        reason = reasons[(chance >= 0.7) + (chance >= 0.85) + (chance >= 0.95)]
        return Abort(ids=self._aborted, reason=reason)


def _in_step(simulation: Simulation) -> list[str]:
    """Return the requests of all steps in flight."""
    return [chunk.request.id for flight in simulation.flights for chunk in flight.plan.chunks]
