"""Tests which connection ends when a new connection needs its slot, failing accepts, and the limit of open files."""

from __future__ import annotations

import errno
import logging
import re
import resource
import socket
from pathlib import Path

import pytest
import trio
import trio.testing

import trioserve
from trioserve.trio_tools.connection_limit import ConnectionLimit, Place, remote_address
from trioserve.trio_tools.interpreter import OWN_FILES, connections_within, raise_file_limit


class Connections:
    """The connections of a server that uses ConnectionLimit. Each connection leaves as soon as its `end` is called."""

    def __init__(self, **bounds: int) -> None:
        connections_max = bounds.get("connections_max", 4)
        bounds = {"connections_max": 4, "strangers_max": connections_max, "per_address_max": connections_max} | bounds
        self.crowded_count = self.shortage_count = 0
        self.places = ConnectionLimit(**bounds, on_crowded=self._crowded, on_shortage=self._short)
        self.ended: list[str] = []
        self.open: dict[str, Place] = {}

    def _crowded(self) -> None:
        self.crowded_count += 1

    def _short(self) -> None:
        self.shortage_count += 1

    def come(self, name: str, address: str | None = None, *, may_end_at: float | None = 0.0) -> Place | None:
        place = self.places.enter(address)
        if place is None:
            return None
        place.may_end_at = lambda: may_end_at
        place.end = lambda: self._end(name)
        self.open[name] = place
        return place

    def _end(self, name: str) -> None:
        self.ended.append(name)
        self.places.leave(self.open.pop(name))


class Listener:
    """A listener whose accept raises the given errors, then returns connection_count connections, then waits."""

    def __init__(self, *errors: int, connection_count: int = 1000) -> None:
        self.socket, self._other = socket.socketpair()
        self._other.send(b"x")  # This makes the listener readable, as a new connection does.
        self._errors = list(errors)
        self.left = connection_count

    async def accept(self) -> object:
        await trio.lowlevel.checkpoint()
        if self._errors:
            raise OSError(self._errors.pop(0), "accept failed")
        if not self.left:
            await trio.sleep_forever()
        self.left -= 1
        return object()

    def close(self) -> None:
        self.socket.close()
        self._other.close()


@pytest.fixture
def listener():
    made = Listener()
    yield made
    made.close()


async def test_connection_that_has_been_unused_longest_ends_first(autojump_clock, listener):
    connections = Connections()
    await trio.sleep(10)
    for name, may_end_at in (("busy", None), ("idle", 3.0), ("half a head", 2.0), ("young", 1000.0)):
        connections.come(name, may_end_at=may_end_at)
    await connections.places.accept(listener)
    connections.come("new", may_end_at=None)
    assert connections.ended == ["half a head"]
    await connections.places.accept(listener)
    assert (connections.ended, connections.crowded_count) == (["half a head", "idle"], 2)


async def test_new_connection_waits_while_all_other_connections_are_in_use(autojump_clock, listener, nursery):
    connections = Connections(connections_max=1)
    connections.come("busy", may_end_at=None)
    accepted = trio.Event()

    async def accept() -> None:
        await connections.places.accept(listener)
        accepted.set()

    nursery.start_soon(accept)
    await trio.sleep(60)
    assert not accepted.is_set()
    connections._end("busy")
    await trio.testing.wait_all_tasks_blocked()
    assert accepted.is_set()


async def test_address_with_most_connections_loses_its_oldest_connection_first(autojump_clock, listener):
    connections = Connections()
    connections.come("honest", "192.0.2.1", may_end_at=0.0)
    for name in "abc":
        connections.come(name, "192.0.2.2", may_end_at=1.0)
    await trio.sleep(10)
    await connections.places.accept(listener)
    assert connections.ended == ["a"]


async def test_slots_are_reserved_for_connections_with_a_key(autojump_clock, listener):
    connections = Connections(connections_max=4, strangers_max=3)
    known = connections.come("known", may_end_at=0.0)
    connections.places.know(known)
    connections.places.know(known)
    for name in "abc":
        connections.come(name, may_end_at=5.0)
    await trio.sleep(10)
    for _ in range(5):
        await connections.places.accept(listener)
        connections.come(f"new {len(connections.ended)}", may_end_at=6.0)
    assert "known" not in connections.ended
    assert (connections.places.count, connections.places.known_count) == (4, 1)
    connections._end("known")
    assert connections.places.known_count == 0


async def test_idle_connections_with_a_key_end_beyond_their_share(autojump_clock, listener):
    connections = Connections(connections_max=3, strangers_max=2)
    for name in "abc":
        connections.places.know(connections.come(name, may_end_at=1.0))
    await trio.sleep(10)
    await connections.places.accept(listener)
    assert connections.ended == ["a"]


def test_address_at_its_limit_loses_its_oldest_connection():
    connections = Connections(per_address_max=2)
    connections.come("other", "192.0.2.1")
    connections.come("first", "192.0.2.2", may_end_at=100.0)
    connections.come("second", "192.0.2.2", may_end_at=101.0)
    assert connections.come("third", "192.0.2.2") is not None
    assert connections.ended == ["first"]


def test_address_whose_connections_are_all_in_use_gets_no_further_connection(caplog):
    async def main() -> None:
        connections = Connections(per_address_max=2)
        for name in "ab":
            connections.come(name, "192.0.2.2", may_end_at=None)
        for _ in range(10):
            assert connections.come("c", "192.0.2.2") is None
        assert connections.come("d", "192.0.2.3") is not None
        assert connections.come("e", None) is not None
        connections._end("a")
        assert connections.come("f", "192.0.2.2", may_end_at=None) is not None
        connections.places.know(connections.open["b"])  # A connection with a key no longer counts for its address.
        assert connections.come("g", "192.0.2.2", may_end_at=None) is not None

    trio.run(main)
    assert len([record for record in caplog.records if "address=192.0.2.2 max=2" in record.getMessage()]) == 1


def test_ending_connection_frees_its_slot_for_only_one_connection_of_its_address():
    async def main() -> None:
        connections = Connections(connections_max=100, per_address_max=3)
        for name in "ab":
            connections.come(name, "192.0.2.2", may_end_at=None)
        idle = connections.come("idle", "192.0.2.2")
        assert idle is not None
        idle.end = lambda: None  # This connection does not end immediately.
        admitted = [name for name in "cdefgh" if connections.come(name, "192.0.2.2", may_end_at=None) is not None]
        assert admitted == ["c"]
        connections.places.leave(idle)
        assert connections.come("i", "192.0.2.2", may_end_at=None) is None

    trio.run(main)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
async def test_shortage_of_files_ends_an_idle_connection_and_is_logged_once(autojump_clock, caplog, number):
    made = Listener(*[number] * 50)
    connections = Connections(connections_max=1000)
    for index in range(100):
        # This connection may be ended only if no other connection may be ended.
        connections.come(f"idle {index}", may_end_at=1e9)
    with caplog.at_level(logging.ERROR):
        await connections.places.accept(made)
    assert connections.ended[0] == "idle 0"
    assert connections.shortage_count == 50
    assert len(caplog.records) == 1
    assert errno.errorcode[number] in caplog.text
    made.close()


async def test_shortage_of_files_without_an_idle_connection_does_not_busy_loop(autojump_clock):
    made = Listener(*[errno.EMFILE] * 50)
    connections = Connections(connections_max=1000)
    connections.come("busy", may_end_at=None)
    began_at = trio.current_time()
    await connections.places.accept(made)
    assert trio.current_time() - began_at >= 50 * 0.099
    made.close()


async def test_one_search_for_idle_connections_frees_slots_for_many_connections(autojump_clock, listener):
    """With 6,400 places, one search through all connections ends a hundred of them."""
    connections = Connections(connections_max=6400, strangers_max=6400, per_address_max=6400)
    looks = 0

    def may_end_at() -> float:
        nonlocal looks
        looks += 1
        return 0.0

    for number in range(6400):
        connections.come(str(number)).may_end_at = may_end_at
    for _ in range(100):
        await connections.places.accept(listener)
        connections.come("new", may_end_at=None)
    assert looks <= 6400


async def test_two_listeners_share_the_connection_slots(autojump_clock, nursery):
    connections = Connections(connections_max=10)
    listeners = [Listener(connection_count=20) for _ in range(2)]

    async def serve(own: Listener) -> None:
        while True:
            await connections.places.accept(own)
            connections.come(f"{id(own)} {own.left}", may_end_at=None)

    for each in listeners:
        nursery.start_soon(serve, each)
    await trio.sleep(10)
    assert connections.places.count == 10
    nursery.cancel_scope.cancel()
    for each in listeners:
        each.close()


@pytest.mark.parametrize(
    "family, host, expected",
    [
        (socket.AF_INET, "192.0.2.7", "192.0.2.7"),
        (socket.AF_INET6, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        (socket.AF_INET6, "fe80::1%eth0", "fe80::"),
        (socket.AF_INET6, "::ffff:192.0.2.7", "::ffff:192.0.2.7"),
        (socket.AF_UNIX, "", None),
    ],
)
def test_connections_are_counted_per_host_or_per_network_of_one_customer(family, host, expected):
    class Socket:
        def __init__(self) -> None:
            self.family = family

        def getpeername(self) -> tuple[str, int]:
            return host, 1

    class Stream:
        socket = Socket()

    assert remote_address(Stream()) == expected


def test_soft_limit_of_files_is_raised_to_the_hard_limit(monkeypatch):
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    assert raise_file_limit() == 4096
    assert limits == [(1024, 4096), (4096, 4096)]
    assert raise_file_limit() == 4096
    assert len(limits) == 2


def test_soft_limit_of_files_is_unchanged_if_it_cannot_be_raised(monkeypatch):
    def refuse(which, pair):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit() == 256


def test_max_connections_is_lowered_to_the_limit_of_files_with_a_warning(caplog):
    connections_within.cache_clear()
    assert connections_within(1024, 65536) == 1024
    assert not caplog.records
    assert connections_within(1024, 1024) == 1024 - OWN_FILES
    assert connections_within(1024, 1024) == 1024 - OWN_FILES
    (record,) = caplog.records
    assert "--max-connections is 1024" in record.getMessage()
    assert f"allows {1024 - OWN_FILES}:" in record.getMessage()
    assert connections_within(1024, 1024, files_each=2) == (1024 - OWN_FILES) // 2
    assert connections_within(1024, 20) == 10
    assert connections_within(5000, resource.RLIM_INFINITY) == 5000


LISTENERS = {
    "commands/route.py": "HTTP: a process of a router, with listeners of its parent",
    "commands/router_processes.py": "opens those listeners, but accepts no connections",
    "commands/serving.py": "HTTP: FrontendServer, or Hypercorn with hypercorn_bounds",
    "connectors/stream/transport.py": "KV: Holder.strangers",
    "http/listener.py": "makes the listeners of FrontendServer",
    "model/parallel/torch_collectives.py": "torch.distributed: in a separate network",
    "model/trainer_groups.py": "torch.distributed: in a separate network",
    "ranks/link.py": "ranks: ConnectionLimit",
    "ranks/host.py": "finds a free port, but accepts no connections",
    "ranks/stage_sockets.py": "stages: STRANGERS_MAX",
}
LISTENS = re.compile(
    r"\b(?:open_listeners|open_shared_listeners|open_unix_listener|inherited_listener|open_tcp_listeners|serve_tcp|"
    r"serve_listeners|create_server|start_server|TCPStore|HTTPServer)\(|\.listen\([A-Z]"
)


def test_every_listener_limits_connections_without_a_key():
    """Add each new listener to LISTENERS, with the code that limits connections without a key."""
    root = Path(trioserve.__file__).parent
    found = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.partition("/")[0] not in ("bench", "testing", "simulation") and LISTENS.search(path.read_text()):
            found.add(name)
    assert found == set(LISTENERS)
