"""Several routers before the same endpoints, simulated: what they promise together, and that its breach is found."""

from __future__ import annotations

import pytest

from trioserve.cli import main
from trioserve.contracts.errors import StartupError
from trioserve.router import policies
from trioserve.router.endpoint_state import EndpointState
from trioserve.simulation.routers import simulator
from trioserve.simulation.routers.books import RoutersBooks
from trioserve.simulation.routers.figures import RoutersRow
from trioserve.simulation.routers.simulator import RoutersSimulation
from trioserve.simulation.routers.world import RoutersWorld


def simulated(**settings) -> RoutersRow:
    simulation = RoutersSimulation(RoutersWorld(**{"routers": 8, "endpoints": 8, "seconds": 8.0, **settings}))
    simulation.run()
    return simulation.figures.row()


@pytest.mark.parametrize("policy", policies.POLICIES)
@pytest.mark.parametrize("shares", [False, True])
def test_several_routers_keep_what_they_promise(policy, shares):
    row = simulated(policy=policy, shares=shares, leases_max=12 if shares else 64)
    assert row.requests > 200
    assert row.refused == 0


@pytest.mark.parametrize("leases_max", [3, 8, 13])
def test_with_shares_a_limit_is_kept_while_a_router_goes_and_comes(leases_max):
    assert simulated(shares=True, dies=True, leases_max=leases_max, seed=leases_max).requests > 200


def test_a_seed_is_one_history():
    assert simulated(seed=4) == simulated(seed=4) != simulated(seed=5)


def test_waits_stay_short_with_many_routers():
    """As they would if each went to the endpoint that reports the least."""
    fleet = {"endpoints": 32, "seats": 16, "leases_max": 64, "load": 0.9, "seconds": 12.0}
    assert simulated(routers=32, **fleet).wait_p99 < 1.0


def test_the_command_makes_a_table(capsys):
    assert main(["simulate", "--router", "--routers", "1", "2", "--endpoints", "2", "--seeds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 1 + 3
    assert all(line.startswith("|") and line.count("|") == lines[0].count("|") for line in lines)


@pytest.mark.parametrize("settings", [{"routers": 0}, {"endpoints": 0}, {"routers": 1, "dies": True}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(StartupError, match=r"must be|simulate 2"):
        RoutersWorld(**settings)


# --- planted bugs ---


def rounded_up(own, peers, endpoint, leases_max):
    return -(-leases_max // len({own, *peers}))


def rounded_down(own, peers, endpoint, leases_max):
    return max(1, leases_max // len({own, *peers}))


def nothing_for_the_last(own, peers, endpoint, leases_max):
    return leases_max - 1 if own == min(peers) else (1 if own == sorted(peers)[1] else 0)


@pytest.mark.parametrize("share", [rounded_up, rounded_down, nothing_for_the_last])
def test_shares_that_do_not_add_up_are_found(share, monkeypatch):
    monkeypatch.setattr(simulator, "lease_share", share)
    with pytest.raises(AssertionError, match=r"the shares of|may give nothing"):
        simulated(shares=True, leases_max=12)


def test_a_share_that_is_ignored_is_found(monkeypatch):
    monkeypatch.setattr(EndpointState, "leases_own_max", property(lambda state: state.leases_max))
    with pytest.raises(AssertionError, match="its share is"):
        simulated(shares=True, leases_max=12, seats=4)


def test_a_router_that_never_hears_of_a_death_is_found(monkeypatch):
    lease_share = simulator.lease_share
    everybody: set[str] = set()

    def remembered(own, peers, endpoint, leases_max):
        everybody.update(peers)
        return lease_share(own, everybody, endpoint, leases_max)

    monkeypatch.setattr(simulator, "lease_share", remembered)
    with pytest.raises(AssertionError, match="the shares of"):
        simulated(shares=True, leases_max=12, dies=True, notice_seconds=0.5)


def test_routers_with_the_same_order_are_found(monkeypatch):
    monkeypatch.setattr(policies._Calmest, "_order", lambda self, id: id.encode())
    with pytest.raises(AssertionError, match="at the same moment"):
        simulated()


def test_a_lease_that_is_kept_is_found(monkeypatch):
    end_lease = EndpointState.end_lease
    calls = 0

    def forgetful(state, sequences):
        nonlocal calls
        calls += 1
        if calls != 100:
            end_lease(state, sequences)

    monkeypatch.setattr(EndpointState, "end_lease", forgetful)
    with pytest.raises(AssertionError):
        simulated()


def test_a_request_that_is_ended_twice_is_found():
    books = RoutersBooks(RoutersWorld())
    books.end(1)
    with pytest.raises(AssertionError, match="a second time"):
        books.end(1)
