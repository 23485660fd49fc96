"""Tests how ranks are placed and removed. A fake replaces Ray and gives its answers."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import pytest

from trioserve.commands.ray_place import LOOKS_UNREPORTED, keep_placed
from trioserve.contracts.errors import StartupError
from trioserve.ranks.placed import RankDoor, RankNode, RanksUpdate

DOOR = RankDoor("10.0.0.1", 4711, "secret")
NODES = (RankNode("a", "10.0.0.1", 1), RankNode("b", "10.0.0.2", 2))


class FakePlaces:
    """Fakes the calls to Ray. The server ends after `looks_max` checks, or after a reported failure.

    Args:
        room_after: Number of checks until the cluster has enough resources.
        started_after: Number of checks until the ranks have started.
        lost: Failure of a rank. Empty if there is none.
        looks_max: Number of checks after which the server leaves.
    """

    def __init__(self, *, room_after: int = 0, started_after: int = 0, lost: str = "", looks_max: int = 99) -> None:
        self.doors: queue.SimpleQueue[RankDoor | None] = queue.SimpleQueue()
        self.calls: list[str] = []
        self.told: list[RanksUpdate] = []
        self._room_after, self._started_after, self._lost = room_after, started_after, lost
        self._looks_left = looks_max

    def keep(self) -> list[str]:
        """Run the placement, and return its calls to Ray except calls that only check a state."""
        keep_placed(self, self.doors, self._tell)
        return self.calls

    def _tell(self, told: RanksUpdate) -> None:
        self.told.append(told)
        if told.nodes:
            self.doors.put(DOOR)
        if told.failure is not None:
            assert "remove" not in self.calls, "the other ranks stay until the server leaves"
            self.doors.put(None)

    def _look(self) -> None:
        self._looks_left -= 1
        if self._looks_left == 0:
            self.doors.put(None)

    def reserve(self) -> None:
        self.calls.append("reserve")

    def has_room(self, seconds_max: float) -> bool:
        self._look()
        self._room_after -= 1
        return self._room_after < 0

    def shortage(self) -> str:
        return "waiting for room"

    def start(self) -> None:
        self.calls.append("start")

    def nodes(self, seconds_max: float) -> Sequence[RankNode] | None:
        self._look()
        self._started_after -= 1
        if self._lost == "starting":
            raise StartupError("the actor of rank 1 is gone")
        return NODES if self._started_after < 0 else None

    def send(self, door: RankDoor) -> None:
        assert door == DOOR
        self.calls.append("send")

    def watch(self, seconds_max: float) -> None:
        self._look()
        if self._lost == "kept":
            raise StartupError("the actor of rank 1 is gone")
        if self._lost == "bug":
            raise ZeroDivisionError

    def remove(self) -> None:
        self.calls.append("remove")


def test_ranks_are_placed_get_the_address_and_are_removed_with_the_server():
    places = FakePlaces(looks_max=6)
    assert places.keep() == ["reserve", "start", "send", "remove"]
    assert places.told == [RanksUpdate(nodes=NODES)]


def test_missing_cluster_resources_are_reported_once_and_ranks_are_placed_later():
    places = FakePlaces(room_after=3 * LOOKS_UNREPORTED)
    assert places.keep() == ["reserve", "start", "send", "remove"]
    assert places.told == [RanksUpdate(waits="waiting for room"), RanksUpdate(nodes=NODES)]


@pytest.mark.parametrize(
    ("places", "expect"),
    [
        (FakePlaces(room_after=99, looks_max=5), ["reserve", "remove"]),
        (FakePlaces(started_after=99, looks_max=5), ["reserve", "start", "remove"]),
    ],
)
def test_server_that_leaves_during_placement_leaves_no_ranks(places, expect):
    assert places.keep() == expect
    assert places.told == []


@pytest.mark.parametrize(("lost", "sent"), [("starting", []), ("kept", ["send"])])
def test_lost_rank_is_reported_and_other_ranks_stay_until_the_server_leaves(lost, sent):
    places = FakePlaces(lost=lost)
    assert places.keep() == ["reserve", "start", *sent, "remove"]
    assert places.told[-1] == RanksUpdate(failure="the actor of rank 1 is gone")


def test_unexpected_error_during_placement_leaves_no_ranks():
    places = FakePlaces(lost="bug")
    with pytest.raises(ZeroDivisionError):
        places.keep()
    assert places.calls[-1] == "remove"
