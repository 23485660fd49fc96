"""Tests several routers with the same endpoints in steady traffic: their contracts, and the table of results.

The planted bugs of this simulation show that a broken contract is found.
"""

from __future__ import annotations

from random import Random

import pytest

from trioserve.cli import main
from trioserve.commands.simulate import Row
from trioserve.contracts.errors import StartupError
from trioserve.router import policies
from trioserve.router.endpoint_state import EndpointState
from trioserve.simulation.router.routers_books import Come, Die, RoutersBooks, RoutersRow, RoutersWorld
from trioserve.simulation.router.routers_generator import Traffic, drawn_traffic

FLEET = {"routers": 8, "endpoints": 8, "seats": 8, "leases_max": 12, "waiting_depth_max": 4}


def simulated(*, seed: int = 0, dies: bool = False, seconds: float = 8.0, **settings) -> RoutersRow:
    row = Row(RoutersWorld(**{**FLEET, **settings}), Traffic(seconds=seconds, dies=dies))
    verdict, simulation = row.run(seed)
    assert verdict.failure is None, verdict.failure
    return simulation.figures.row(dies=dies)


@pytest.mark.parametrize("policy", policies.POLICIES)
@pytest.mark.parametrize("shares", [False, True])
def test_several_routers_keep_their_contracts(policy, shares):
    row = simulated(policy=policy, shares=shares, leases_max=12 if shares else 64)
    assert row.requests > 200
    assert row.refused == 0


@pytest.mark.parametrize("leases_max", [3, 8, 13])
def test_routers_keep_the_shared_limit_while_a_router_dies_and_returns(leases_max):
    assert simulated(shares=True, dies=True, leases_max=leases_max, seed=leases_max).requests > 200


def test_seed_of_several_routers_always_gives_the_same_history():
    assert simulated(seed=4) == simulated(seed=4) != simulated(seed=5)


def test_queue_waits_stay_short_with_many_routers():
    """Waits would grow if each router chose the endpoint with the least reported load."""
    fleet = {"endpoints": 32, "seats": 16, "leases_max": 64, "seconds": 12.0}
    assert simulated(routers=32, **fleet).wait_p99 < 1.0


def test_routers_keep_their_contracts_with_simultaneous_requests_and_a_dying_router():
    world = RoutersWorld(**FLEET)
    events = list(drawn_traffic(Random(0), world, Traffic(seconds=8.0, dies=True)))
    first = [event for event in events if isinstance(event, Come)][: world.routers]
    assert len({event.at for event in first}) == 1
    assert {event.router for event in first} == set(range(world.routers))
    assert [event.router for event in events if isinstance(event, Die)] == [world.routers - 1]
    assert [event.at for event in events] == sorted(event.at for event in events)


def test_simulate_command_prints_a_table_for_several_routers(capsys):
    assert main(["simulate", "--router", "--routers", "1", "2", "--endpoints", "2", "--seeds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 1 + 3
    assert all(line.startswith("|") and line.count("|") == lines[0].count("|") for line in lines)


def test_failing_row_of_the_table_is_shrunk_and_can_be_replayed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(EndpointState, "set_lease_share", lambda state, share: None)
    monkeypatch.setattr("trioserve.commands.simulate.REPLAYED_LINES_MAX", 20_000)
    counts = ["--routers", "2", "--endpoints", "1"]
    assert main(["simulate", *counts, "--seeds", "7"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = next(index for index, line in enumerate(lines) if line.startswith("seed 7 failed: "))
    assert f"--replay 7 {' '.join(counts)}" in lines[failed + 1]
    script = tmp_path / "history.txt"
    script.write_text("\n".join(lines[failed + 3 :]), encoding="utf-8")
    for replay in (["7", *counts], [str(script)]):
        assert main(["simulate", "--replay", *replay]) == 1
        assert capsys.readouterr().out.splitlines()[-1].startswith("failed: AssertionError in routers_books.py, ")


@pytest.mark.parametrize("settings", [{"routers": 0}, {"endpoints": 0}, {"seats": 0}])
def test_simulation_settings_of_routers_out_of_range_are_refused(settings):
    with pytest.raises(StartupError, match="must be"):
        RoutersWorld(**settings)


def test_simulation_detects_a_request_that_ends_twice():
    books = RoutersBooks(RoutersWorld(), 0.0)
    books.end(1)
    with pytest.raises(AssertionError, match="ends twice"):
        books.end(1)
