"""Tests the connector `tcp` over sockets of this machine, with and without TLS."""

from __future__ import annotations

import itertools
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
import trustme

from trioserve.connectors.stream import policy
from trioserve.connectors.stream.frames import Kind, Notice, frame
from trioserve.connectors.stream.peer_connection import Identity, MayNot, SocketWire, greet_holder
from trioserve.connectors.stream.reader import BROKE_OFF
from trioserve.connectors.stream.signature import signed
from trioserve.connectors.stream.transport import TcpConnector, dual_listener, make_connector
from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import ConnectorSetup, KVLayout, Loaded, LoadFailed, Released
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT, MemoryPages
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

EIGHT_BITS = msgspec.structs.replace(SMALL_LAYOUT, kv_head_count=3, head_dim=48, dtype="int8")
WIDE = msgspec.structs.replace(SMALL_LAYOUT, layer_count=3, block_size=16, kv_head_count=8, head_dim=64)
KEY = "a key that nobody knows"


class Engine:
    """One engine of a transfer, as the core of the engine sees it."""

    def __init__(self, name: str, options: Mapping[str, Any], layout: KVLayout = SMALL_LAYOUT) -> None:
        self.pages = MemoryPages(40, layout)
        self.woken = trio.Event()
        self.reports: list[Loaded | LoadFailed | Released] = []
        self.connector: TcpConnector = make_connector(
            ConnectorSetup(engine_id=name, role="both", pages=self.pages, options=options, wake=self._wake)
        )

    def _wake(self) -> None:
        self.woken.set()

    async def next_report(self) -> object:
        with trio.fail_after(60):
            while not self.reports:
                await self.woken.wait()
                self.woken = trio.Event()
                reports = self.connector.progress()
                self.reports += [report for report in reports if isinstance(report, Loaded | LoadFailed | Released)]
            return self.reports.pop(0)


@asynccontextmanager
async def engines(
    there: Mapping[str, Any], here: Mapping[str, Any], layout=SMALL_LAYOUT
) -> AsyncIterator[list[Engine]]:
    sides = [Engine("there", there, layout), Engine("here", here, layout)]
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            for side in sides:
                await nursery.start(partial(_run, side.connector))
            yield sides
            nursery.cancel_scope.cancel()


async def _run(connector: TcpConnector, *, task_status: trio.TaskStatus[None]) -> None:
    await connector.run(task_status=task_status)


def request(name: str, token_count: int, params: KVTransferParams) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(range(token_count + 1)),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=3,
        stop_token_ids=frozenset(),
        seed=0,
        kv_transfer=params,
    )


def begin(there: Engine, here: Engine, name: str = "r", **change: object) -> None:
    """Hold half of the blocks of one engine, and load them into the other half of the second engine, reordered."""
    count = 20 * there.pages.layout.block_size
    blocks = [BlockIndex(index) for index in range(20)]
    there.pages.fill(blocks, seed=5)
    held = request(name, count, KVTransferParams(do_remote_decode=True))
    assert there.connector.request_finished(held, blocks, range(count), FinishReason.LENGTH)
    params = there.connector.transfer_params(held.id)
    assert params is not None
    params = signed(msgspec.structs.replace(params, **change), here.connector.key)
    here.connector.start_load(request(name, count, params), [BlockIndex(39 - b) for b in blocks], 0, count)


def is_equal(there: Engine, here: Engine) -> bool:
    return all(there.pages.content(block) == here.pages.content(39 - block) for block in range(20))


@pytest.fixture(autouse=True)
def _retries_at_once(monkeypatch):
    monkeypatch.setattr(policy, "RETRY_SECONDS", (0.0,) * 5)  # Only test_policy.py tests the delays of retries.


@pytest.fixture
def certificates(tmp_path):
    authority = trustme.CA()
    paths = {}
    for name, issuer in (("here", authority), ("there", authority), ("stranger", trustme.CA())):
        certificate = issuer.issue_cert("127.0.0.1")
        chain, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        certificate.cert_chain_pems[0].write_to_path(str(chain))
        certificate.private_key_pem.write_to_path(str(key))
        issuer.cert_pem.write_to_path(str(tmp_path / f"{name}-ca.pem"))
        paths[name] = {"certfile": str(chain), "keyfile": str(key), "ca_certs": str(tmp_path / f"{name}-ca.pem")}
    return paths


@pytest.mark.parametrize("layout", [SMALL_LAYOUT, WIDE, EIGHT_BITS])
@pytest.mark.parametrize("kind", ["plain", "key", "tls"])
async def test_kv_is_transferred_over_sockets(certificates, kind, layout):
    options = {
        "plain": ({}, {}),
        "key": ({"key": KEY}, {"key": KEY}),
        "tls": (certificates["there"], certificates["here"]),
    }
    async with engines(*options[kind], layout=layout) as (there, here):
        begin(there, here)
        assert await here.next_report() == Loaded(RequestId("r"), 20 * layout.block_size)
        assert is_equal(there, here)
        assert await there.next_report() == Released(RequestId("r"))
        assert (
            here.connector.counts()["bytes_received_total"]
            == 20 * layout.block_size * layout.token_bytes * layout.layer_count
        )


async def test_several_kv_transfers_run_concurrently():
    async with engines({}, {"reads_max": 3, "chunk_bytes": 50}) as (there, here):
        for index in range(10):
            begin(there, here, f"r{index}")
        assert {type(await here.next_report()) for _ in range(10)} == {Loaded}
        assert is_equal(there, here)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"key": KEY}, {"key": "another key of theirs"}),
        ({"key": KEY}, {}),
        ({}, {"key": KEY}),
        ("tls", {}),
        ({}, "tls"),
    ],
)
async def test_peer_without_the_key_gets_nothing(certificates, there, here):
    options = [certificates[name] if side == "tls" else side for name, side in (("there", there), ("here", here))]
    async with engines(*options) as sides:
        begin(*sides)
        before = sides[1].pages.content(30)
        report = await sides[1].next_report()
        assert isinstance(report, LoadFailed)
        assert sides[1].pages.content(30) == before
        assert sides[0].connector.counts()["peers_refused_total"] > 0
        assert sides[0].connector.counts()["bytes_sent_total"] == 0


async def test_untrusted_certificate_of_a_holder_is_refused(certificates):
    for there, here in (("stranger", "here"), ("there", "stranger")):
        async with engines(certificates[there], certificates[here]) as sides:
            begin(*sides)
            assert isinstance(await sides[1].next_report(), LoadFailed)


async def test_restarted_holder_is_not_read():
    async with engines({}, {}) as (there, here):
        begin(there, here, remote_engine_id="before")
        report = await here.next_report()
        assert isinstance(report, LoadFailed)
        assert "it was restarted" in report.message


async def test_load_from_a_closed_port_fails():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with engines({}, {}) as (there, here):
        begin(there, here, remote_port=port)
        assert await here.next_report() == LoadFailed(RequestId("r"), f"127.0.0.1:{port}: {BROKE_OFF}")


async def test_port_in_use_by_another_program_is_reported_in_one_sentence():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(StartupError, match=r"127\.0\.0\.1:\d+ cannot be listened on"),
    ):
        async with engines({"port": taken.getsockname()[1]}, {}):
            raise AssertionError("it started")


async def test_garbage_on_one_socket_does_not_affect_others():
    async with engines({"key": KEY}, {"key": KEY}) as (there, here):
        assert there.connector.address is not None
        stranger = await trio.open_tcp_stream(*there.connector.address)
        await stranger.send_all(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with pytest.raises(trio.BrokenResourceError):
            if await stranger.receive_some() == b"":
                raise trio.BrokenResourceError
        await stranger.aclose()
        assert there.connector.counts()["peers_refused_total"] == 1
        begin(there, here)
        assert isinstance(await here.next_report(), Loaded)


async def test_ended_connector_does_not_listen_and_holds_nothing():
    async with engines({}, {}) as (there, here):
        begin(there, here)
        address = there.connector.address
    assert address is not None
    with pytest.raises(OSError, match="attempts to connect"):
        await trio.open_tcp_stream(*address)
    assert Released(RequestId("r")) in there.connector.progress()
    assert {type(report) for report in here.connector.progress()} <= {Loaded, LoadFailed}
    assert there.connector.transfer_params(RequestId("r")) is None


# --- the wire ---


async def wires() -> tuple[SocketWire, SocketWire]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        theirs = await trio.open_tcp_stream(*listener.socket.getsockname())
        return SocketWire(await listener.accept(), 5.0), SocketWire(theirs, 5.0)


async def test_frames_divided_at_any_byte_arrive_in_order():
    sender, receiver = await wires()
    content = bytes(range(256)) * 20_000
    cuts = [0, 1, 1, 5_000, 70_000, 70_001, 3_000_000, len(content)]
    pieces = [memoryview(content)[a:b] for a, b in itertools.pairwise(cuts)]
    many = [
        memoryview(content)[at : at + 100] for at in range(0, 120_000, 100)
    ]  # One system call accepts fewer pieces.
    target = bytearray(len(content))
    second = bytearray(120_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.send, pieces)
        await receiver.receive_into([memoryview(target)[a : a + 999_999] for a in range(0, len(target), 999_999)])
        nursery.start_soon(sender.send, many)
        await receiver.receive_into([memoryview(second)[a : a + 77] for a in range(0, len(second), 77)])
    assert target == content
    assert second == content[: len(second)]
    sender.close()
    with pytest.raises(trio.BrokenResourceError, match="closed"):
        await receiver.receive(1)
    receiver.close()
    receiver.close()


async def test_empty_pieces_of_a_frame_are_sent_and_received():
    sender, receiver = await wires()
    assert await receiver.receive(0) == b""
    await sender.send([b"", b"ab", memoryview(b"")])
    target = bytearray(2)
    await receiver.receive_into([memoryview(b""), memoryview(target), memoryview(b"")])
    assert target == b"ab"
    sender.close()
    receiver.close()


async def test_waiting_bytes_are_not_read_into_forbidden_memory():
    sender, receiver = await wires()
    target = bytearray(8)
    await sender.send([b"12345678"])
    with pytest.raises(MayNot) as stopped:
        await receiver.receive_into([memoryview(target)], lambda: False)
    assert not stopped.value.has_begun
    assert target == bytes(8)
    sender.close()
    receiver.close()


async def test_transfer_stops_when_its_memory_is_withdrawn():
    sender, receiver = await wires()
    may_write = may_read = True
    target = bytearray(100)
    async with trio.open_nursery() as nursery:
        stopped = []

        async def receive() -> None:
            with pytest.raises(MayNot) as caught:
                await receiver.receive_into([memoryview(target)], lambda: may_write)
            stopped.append(caught.value.has_begun)

        async def send() -> None:
            with pytest.raises(MayNot) as caught:
                await sender.send([bytes(50_000_000)], lambda: may_read)
            stopped.append(caught.value.has_begun)

        await sender.send([b"x" * 40])
        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        may_write = False
        await sender.send([b"y" * 60])
        await trio.testing.wait_all_tasks_blocked()
        assert stopped == [True]
        assert target == b"x" * 40 + bytes(60)
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        may_read = False
        await receiver.receive(60)
        received = 0
        with trio.move_on_after(60) as scope:
            while len(stopped) < 2:
                received += len(await receiver.receive(65_536))
                await trio.testing.wait_all_tasks_blocked()
        assert not scope.cancelled_caught
        assert received < 50_000_000
    assert stopped == [True, True]
    sender.close()
    receiver.close()


@pytest.mark.parametrize("direction", ["send", "receive"])
async def test_wait_for_bytes_of_a_silent_peer_times_out(autojump_clock, direction):
    sender, receiver = await wires()
    with pytest.raises(trio.TooSlowError):
        await (sender.send([bytes(50_000_000)]) if direction == "send" else receiver.receive(1))
    assert trio.current_time() >= 5
    sender.close()
    receiver.close()


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
async def test_invalid_host_name_fails_only_its_load(host):
    options = {"key": KEY, "peers": ["*"]}
    async with engines(options, options) as (there, here):
        begin(there, here, remote_host=host)
        assert "cannot be looked up" in (await here.next_report()).message
        begin(there, here, name="next")
        assert isinstance(await here.next_report(), Loaded)


async def test_reports_to_unreachable_holders_do_not_block_others():
    async with engines({}, {}) as (there, here):
        nobody = KVTransferParams(
            do_remote_prefill=True, remote_request_id="x", remote_host="127.0.0.1", remote_port=1, remote_num_tokens=80
        )
        for index in range(64):
            params = signed(msgspec.structs.replace(nobody, remote_engine_id=f"e{index}"), here.connector.key)
            blocks = [BlockIndex(block) for block in range(20)]
            here.connector.start_load(request(f"f{index}", 80, params), blocks, 0, 80)
        for _ in range(64):
            assert isinstance(await here.next_report(), LoadFailed)
        begin(there, here)
        assert isinstance(await here.next_report(), Loaded)
        assert isinstance(await there.next_report(), Released)  # The hold ends before its deadline.


async def test_peer_that_asks_without_pause_does_not_block_other_tasks():
    questions, turns = 100, 0
    async with engines({}, {}) as (there, _here), trio.open_nursery() as nursery:
        stream = await trio.open_tcp_stream(*there.connector.address)
        connection = await greet_holder(SocketWire(stream, 5.0), Identity("asker", SMALL_LAYOUT, b""))

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        nursery.start_soon(take_turns)
        while not turns:  # The other task must have begun.
            await trio.lowlevel.checkpoint()
        try:
            await connection.wire.send([frame(Kind.NOTICE, Notice(("x",), ())) * questions])
            turns = 0
            while there.connector.counts()["heartbeats_received_total"] < questions:
                await trio.lowlevel.checkpoint()
            assert turns >= questions - 1, "other tasks run between two responses"
        finally:
            connection.wire.close()
            nursery.cancel_scope.cancel()


async def test_listening_on_all_ipv6_addresses_includes_ipv4():
    try:
        listener = dual_listener(0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    port = listener.socket.getsockname()[1]
    async with listener:
        for host in ("127.0.0.1", "::1"):
            async with await trio.open_tcp_stream(host, port), await listener.accept():
                pass
