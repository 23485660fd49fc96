"""Tests the simulation of a prefill engine and a decode engine: scripts, seeds, disconnects and lost engines."""

from __future__ import annotations

from collections import Counter

import pytest

from trioserve.connectors.stream.policy import Sends
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.kv_transfer import HoldKind
from trioserve.simulation.pair.host import (
    Come,
    Continue,
    Cut,
    Deliver,
    Kill,
    Leave,
    Lose,
    PairHistory,
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
from trioserve.simulation.runs import case_of, runs_of, script_of

PROMPT = (1, 2, 3, 1, 2)

EVERYTHING = PairHistory(
    PairWorld(decode_block_size=3, chunk_tokens=1, hold_seconds=2.0),
    (
        Come(id="a", prompt=PROMPT, output=4, stops=(0,), temperature=1.0),
        Come(id="b", prompt=PROMPT[:2], output=2),
        Deliver(),
        Deliver(),
        Step(host="prefill"),
        Step(host="prefill"),
        Refuse(host="decode"),
        *(Deliver(index=index) for index in range(8)),
        Step(host="decode"),
        Deliver(index=3),
        Serve(),
        Repeat(),
        PairWait(seconds=0.25),
        Lose(index=1),
        Cut(index=2),
        Stop(host="prefill"),
        Leave(id="b"),
        Continue(host="prefill"),
        Kill(host="decode"),
        Start(host="decode"),
    ),
)

MOMENTS = [
    *(f"clients: {state}" for state in ("done", "left", "failed")),
    *(f"leaves: prefill is {where}" for where in ("on its way", "waiting", "running")),
    *(f"leaves: decode is {where}" for where in ("on its way", "waiting", "waiting_for_remote_kv", "running")),
    *(f"holds: {end}" for end in ("completed", "unwanted", "aborted", "expired")),
    *(f"loads: {end}" for end in ("completed", "failed", "abandoned")),
    *(f"stages lost: {kind}" for kind in ("prefill", "decode", "whole")),
    "stages refused: decode",
    "loads resumed over another connection",
    "messages that arrived twice",
    "stops",
    "kills",
]


class Played:
    """A simulated pair with events that the test chooses. `until` applies events until a condition holds."""

    def __init__(self, **world: object) -> None:
        self.simulation = PairSimulation(PairWorld(**{"chunk_tokens": 1, "step_tokens_max": 4, **world}))
        self.prefill, self.decode = self.simulation.hosts["prefill"], self.simulation.hosts["decode"]
        self.simulation.apply(Come(id="a", prompt=PROMPT, output=4))

    @property
    def client(self):
        return self.simulation.clients["a"]

    def do(self, *events) -> Played:
        for event in events:
            self.simulation.apply(event)
        return self

    def until(self, is_so) -> Played:
        moves = [Step(host="prefill"), Deliver(), Step(host="decode"), Serve()]
        for turn in range(400):
            if is_so():
                return self
            self.do(moves[turn % len(moves)])
        raise AssertionError("it never comes to that")

    def end(self) -> Counter[str]:
        self.simulation.run_to_end()
        return Counter(self.simulation.counts)

    # --- Phases of the request ---

    def is_held(self) -> bool:
        return self.prefill.hold_count == 1

    def is_loading(self) -> bool:
        return self.decode.core.stats().remote_kv_count == 1

    def is_half_read(self) -> bool:
        return self.is_loading() and any(load.next_chunk == 2 for load in self.loads())

    def is_loaded(self) -> bool:
        return self.decode.core.stats().loaded_tokens_total == 4

    def is_decoding(self) -> bool:
        return len(self.client.tokens) == 2

    def loads(self):
        return self.decode.transport.policy.loads._out.values()


PHASES = ["is_held", "is_loading", "is_half_read", "is_loaded", "is_decoding"]


def test_decode_continues_from_the_kv_of_prefill():
    played = Played()
    counts = played.end()
    assert played.client.state == "done"
    assert played.is_loaded()
    assert (counts["loads: completed"], counts["holds: completed"]) == (1, 1)
    assert played.simulation.now < 10.0, "and no deadline was waited for"


@pytest.mark.parametrize("phase", PHASES)
def test_leaving_client_frees_blocks_of_both_engines_at_once(phase):
    """Scenarios S07 and S10 of tests/README.md: this test loses no message, so no block may wait for a deadline."""
    played = Played()
    played.until(getattr(played, phase)).do(Leave(id="a"))
    played.end()
    assert played.client.state == "left"
    assert played.simulation.now < 10.0


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("host", ["prefill", "decode"])
def test_killed_engine_leaves_no_blocks_at_the_other_and_no_wrong_response(phase, host):
    played = Played()
    played.until(getattr(played, phase)).do(Kill(host=host))
    played.end()
    expected = "failed" if (host, phase) == ("decode", "is_decoding") else "done"
    assert played.client.state == expected, "without a token yet, another engine has begun anew"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("host", ["prefill", "decode"])
def test_engine_stopped_longer_than_a_hold_loses_no_blocks(phase, host):
    """Scenario S08 of tests/README.md: if a hold expires while its blocks are read, the engine does not use this KV."""
    played = Played()
    played.until(getattr(played, phase)).do(Stop(host=host), PairWait(seconds=15.0), Continue(host=host))
    played.end()
    assert played.client.state == "done"


def test_hold_that_expires_while_read_is_noticed():
    """Scenario S08 of tests/README.md: the decode engine does not use the KV that it read before the hold expired."""
    played = Played(hold_seconds=2.0)
    played.until(played.is_half_read).do(PairWait(seconds=2.5))
    assert not played.is_held()
    assert played.prefill.transport.policy.sends.ends
    counts = played.end()
    assert played.client.state == "done"
    assert (counts["holds: expired"], counts["loads: failed"], counts["loads: completed"]) == (1, 1, 0)


def test_slow_reader_keeps_its_hold():
    """Scenario S08 of tests/README.md: heartbeats of the reader extend the hold, even while no KV is sent."""
    played = Played(load_seconds=100.0)
    played.until(played.is_half_read)
    for _ in range(6):
        played.do(PairWait(seconds=2.6))
        while played.simulation.network.deliverable():
            played.do(Deliver())
        played.do(Step(host="prefill"), Serve(), Deliver())
    counts = played.end()
    assert (counts["holds: expired"], counts["loads: completed"]) == (0, 1)


def test_prefill_engine_responds_if_decode_engine_refuses():
    """Scenario S07 of tests/README.md: the decode engine refuses, and no block stays in use."""
    played = Played()
    counts = played.do(Refuse(host="decode")).end()
    assert played.client.state == "done"
    assert (counts["stages: whole"], counts["holds: aborted"]) == (1, 1)
    assert played.simulation.now < 10.0


def test_parsing_a_script_of_an_engine_pair_restores_the_case():
    assert case_of(script_of(EVERYTHING), PairHistory) == EVERYTHING


@pytest.mark.parametrize("script", ["", "deliver", "pair\npair"])
def test_script_without_settings_first_is_refused(script):
    with pytest.raises(InvalidRequest, match="begins with 'pair"):
        case_of(script, PairHistory)


@pytest.mark.parametrize("missing", range(len(EVERYTHING.events)))
def test_pair_history_still_runs_without_some_of_its_events(missing):
    events = EVERYTHING.events[:missing] + EVERYTHING.events[missing + 1 :]
    for kept in (events, events[::-1]):
        assert runs_of("pair").run_script(script_of(PairHistory(EVERYTHING.world, kept))).failure is None


@pytest.mark.slow
def test_pair_seeds_pass_and_reach_every_phase():
    totals: Counter[str] = Counter()
    for seed in range(150):
        verdict = runs_of("pair").run_seed(seed, 300)
        assert verdict.failure is None, (seed, verdict.failure)
        totals.update(verdict.counts)
    assert [moment for moment in MOMENTS if totals[moment] == 0] == []


@pytest.mark.slow
def test_failing_pair_history_is_shrunk(monkeypatch):
    monkeypatch.setattr(Sends, "aborted", lambda sends, request_id: None)
    monkeypatch.setattr(Sends, "expired", lambda sends, request_id: sends._reports.forget(HoldKind.SEND, request_id))
    failure = next(filter(None, (runs_of("pair").run_seed(seed, 300).failure for seed in range(50))))
    plainest = runs_of("pair").shrunk(failure, replays_max=1_000)
    assert plainest.is_like(failure)
    assert plainest.script.count("\n") <= 12, plainest.script
    assert runs_of("pair").run_script(plainest.script).failure is not None
