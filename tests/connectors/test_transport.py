"""Tests both sides of the stream transport over streams in memory: malicious peers, and failures at any moment."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import UnionType

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair

from trioserve.connectors.settings import StreamOptions
from trioserve.connectors.stream import frames
from trioserve.connectors.stream.frames import (
    Abort,
    BadFrame,
    Chunk,
    Kind,
    Notice,
    NoticeReply,
    Proof,
    Read,
    frame,
    head_of,
)
from trioserve.connectors.stream.holder import GREETINGS_MAX, GREETINGS_OF_ADDRESS_MAX, Holder
from trioserve.connectors.stream.peer_connection import (
    BROKEN,
    Identity,
    MayNot,
    PeerConnection,
    Refused,
    StreamWire,
    Wire,
    greet_holder,
    greet_reader,
    is_proof,
    make_greeting,
    make_proof,
    receive_head,
)
from trioserve.connectors.stream.policy import StreamPolicy, proof_of
from trioserve.connectors.stream.reader import BROKE_OFF, Reader
from trioserve.connectors.stream.signature import Source
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import ConnectorSetup, HoldKind, Loaded, LoadFailed, Released, StillRead
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT, MemoryPages

KEY = b"0123456789abcdef"
GREETING = msgspec.msgpack.encode(make_greeting("e", SMALL_LAYOUT))
BLOCKS_THERE, BLOCKS_HERE = (6, 1, 4), (0, 5, 2)
TOKENS = 11
PROOF = proof_of(None, range(TOKENS))


def request(name: str, params: KVTransferParams | None) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(range(TOKENS + 1)),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=3,
        stop_token_ids=frozenset(),
        seed=0,
        kv_transfer=params,
    )


def table(blocks: tuple[int, ...]) -> list[BlockIndex]:
    return [BlockIndex(block) for block in blocks]


class WatchedPages(MemoryPages):
    """Cache that records accesses to blocks of other requests.

    Attributes:
        touched: Blocks that were accessed although they now belong to another request.
    """

    def __init__(self, block_count: int) -> None:
        super().__init__(block_count)
        self.foreign: tuple[int, ...] = ()
        self.touched: list[int] = []

    def view(self, layer: int, block: BlockIndex) -> memoryview | None:
        self._note(block)
        return super().view(layer, block)

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        self._note(block)
        return super().read(layer, block)

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        self._note(block)
        super().write(layer, block, start, content)

    def _note(self, block: BlockIndex) -> None:
        if block in self.foreign:
            self.touched.append(block)


class Side:
    """One engine's records and transport, without sockets.

    Attributes:
        reports: All events that the core received.
    """

    def __init__(
        self,
        name: str,
        open_wire: Callable[[Source], Awaitable[Wire]] | None = None,
        key: bytes = KEY,
        **options: object,
    ) -> None:
        self.pages = WatchedPages(8)
        self.nursery: trio.Nursery | None = None
        self.troubles: list[str] = []
        self.reports: list[object] = []
        self.woken = trio.Event()
        setup = ConnectorSetup(engine_id=name, role="both", pages=self.pages, options={}, wake=self._wake)
        given = msgspec.convert({"chunk_bytes": 40, **options}, StreamOptions)
        self.policy = StreamPolicy(setup, given, self._work, key=b"of all sides")
        self.policy.address = ("127.0.0.1", 7000)
        self.identity = Identity(name, self.pages.layout, key)
        self.holder = Holder(self.policy, self.identity, lambda peer, trouble: self.troubles.append(trouble), None)
        self.reader = Reader(
            self.policy, self.identity, lambda peer, trouble: self.troubles.append(trouble), open_wire or self._nowhere
        )

    async def _nowhere(self, source: Source) -> Wire:
        raise ConnectionRefusedError("nobody listens there")

    def _wake(self) -> None:
        self.woken.set()

    def _work(self) -> None:
        if self.nursery is None:
            return
        for load in self.policy.loads.pop_new():
            self.nursery.start_soon(self.reader.fetch, load)
        for source in self.policy.loads.pop_urgent():
            self.reader.notify_now(source, self.nursery)

    async def until(self, kind: type | UnionType) -> object:
        """Return the first report of this kind."""
        while True:
            self.woken = trio.Event()
            self.reports += self.policy.progress()
            for report in self.reports:
                if isinstance(report, kind):
                    return report
            await self.woken.wait()

    def hold(self, name: str = "held") -> KVTransferParams:
        self.pages.fill(BLOCKS_THERE, seed=1)
        assert self.policy.request_finished(
            request(name, KVTransferParams(do_remote_decode=True)),
            table(BLOCKS_THERE),
            list(range(TOKENS)),
            FinishReason.LENGTH,
        )
        params = self.policy.transfer_params(RequestId(name))
        assert params is not None
        return params

    def load(self, params: KVTransferParams, name: str = "load", start: int = 0) -> None:
        self.policy.start_load(request(name, params), table(BLOCKS_HERE), start, TOKENS - start)


class Between(trio.abc.Stream):
    """One end of a connection, at which a test can cause faults.

    Attributes:
        cut_after: Number of bytes after which the connection breaks.
        stuck_after: Number of bytes after which nothing more is sent.
        held: Event before which nothing more is sent.
        damage: Index of a sent byte that is changed.
    """

    def __init__(self, stream: trio.StapledStream) -> None:
        self.stream = stream
        self.cut_after: int | None = None
        self.stuck_after: int | None = None
        self.damage: int | None = None
        self.held: trio.Event | None = None
        self.sent = bytearray()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.held is not None:
            await self.held.wait()
        content = bytearray(data)
        if self.damage is not None and len(self.sent) <= self.damage < len(self.sent) + len(content):
            content[self.damage - len(self.sent)] ^= 1
        if self.cut_after is not None and len(self.sent) + len(content) > self.cut_after:
            rest = content[: max(0, self.cut_after - len(self.sent))]
            if rest:
                await self.stream.send_all(rest)
            self.close()
            raise trio.BrokenResourceError
        stuck = self.stuck_after is not None and len(self.sent) + len(content) > self.stuck_after
        if stuck:
            content = content[: max(0, (self.stuck_after or 0) - len(self.sent))]
        self.sent += content
        await self.stream.send_all(content)
        if stuck:
            await trio.sleep_forever()

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(max_bytes))

    def close(self) -> None:
        self.stream.send_stream.close()  # type: ignore[attr-defined]
        self.stream.receive_stream.close()  # type: ignore[attr-defined]

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()


class Pair:
    """A holder and a reader that can connect to it.

    Attributes:
        connections: The holder's ends, in the order of opening. `prepare` may change each before it is opened.
    """

    def __init__(self, nursery: trio.Nursery, **options: object) -> None:
        self.nursery = nursery
        self.connections: list[Between] = []
        self.prepare: Callable[[int, Between], None] = lambda index, connection: None
        self.there = Side("there")
        self.here = Side("here", self._open, **options)
        self.here.nursery = nursery

    async def _open(self, source: Source) -> Wire:
        ours, theirs = memory_stream_pair()
        connection = Between(theirs)
        self.prepare(len(self.connections), connection)
        self.connections.append(connection)
        self.nursery.start_soon(self.there.holder.serve, self._accept(connection), "reader")
        end = Between(ours)
        return StreamWire(end, 5.0, end.close)

    def _accept(self, connection: Between) -> Callable[[], Awaitable[Wire]]:
        async def accept() -> Wire:
            return StreamWire(connection, 5.0, connection.close)

        return accept

    def is_equal(self, start: int = 0) -> bool:
        token_bytes = SMALL_LAYOUT.token_bytes
        for layer in range(SMALL_LAYOUT.layer_count):
            for position in range(start, TOKENS):
                index, offset = divmod(position, SMALL_LAYOUT.block_size)
                span = slice(offset * token_bytes, (offset + 1) * token_bytes)
                there = self.there.pages.read(layer, BlockIndex(BLOCKS_THERE[index]))[span]
                here = self.here.pages.read(layer, BlockIndex(BLOCKS_HERE[index]))[span]
                if bytes(there) != bytes(here):
                    return False
        return True


@asynccontextmanager
async def pair(**options: object) -> AsyncIterator[Pair]:
    async with trio.open_nursery() as nursery:
        both = Pair(nursery, **options)
        yield both
        both.here.nursery = None
        nursery.cancel_scope.cancel()


# --- transfers without faults ---


@pytest.mark.parametrize("start", [0, 4, 10])
@pytest.mark.parametrize("has_views", [True, False])
async def test_transfer_copies_every_byte_and_notifies_both_sides(autojump_clock, start, has_views):
    async with pair() as both:
        both.here.pages.has_views = both.there.pages.has_views = has_views
        before = both.here.pages.content(5)
        both.here.load(both.there.hold(), start=start)
        assert await both.here.until(Loaded) == Loaded(RequestId("load"), TOKENS - start)
        assert both.is_equal(start)
        assert start != 10 or both.here.pages.content(5) == before
        assert await both.there.until(Released) == Released(RequestId("held"))
        counts, there = both.here.policy.counts(), both.there.policy.counts()
        byte_count = (TOKENS - start) * 2 * SMALL_LAYOUT.token_bytes
        assert counts["bytes_received_total"] == there["bytes_sent_total"] == byte_count
        assert counts["blocks_received_total"] == there["blocks_sent_total"] == 3 - start // 4
        assert counts["loads_completed_total"] == there["sends_completed_total"] == 1


async def test_connections_are_reused_and_closed_when_idle(autojump_clock):
    async with pair() as both:
        for name in "abc":
            both.here.load(both.there.hold(name), name)
            await both.here.until(Loaded)
            both.here.reports.clear()
        assert len(both.connections) == 2  # One connection is for data, and one is for reports.
        assert both.here.reader.has_idle
        both.here.reader.close_idle(trio.current_time() + 29)
        assert both.here.reader.has_idle
        both.here.reader.close_idle(trio.current_time() + 31)
        assert not both.here.reader.has_idle


async def test_many_loads_use_few_connections_and_waiting_loads_send_heartbeats(autojump_clock):
    async with pair() as both:
        params = [both.there.hold(f"h{index}") for index in range(12)]
        for index, each in enumerate(params):
            both.here.load(each, f"l{index}")
        while len([report for report in both.here.reports if isinstance(report, Loaded)]) < 12:
            both.here.reports += both.here.policy.progress()
            both.here.woken = trio.Event()
            with trio.move_on_after(1):
                await both.here.woken.wait()
        assert len(both.connections) <= 5


async def test_slow_holder_gets_heartbeats_of_its_waiting_reader(autojump_clock):
    """Check that heartbeats are sent over a separate connection while the holder sends no data."""
    async with pair() as both:
        stuck = trio.Event()
        params = both.there.hold()
        original = both.there.holder._send_chunk

        async def stand_still(*arguments: object) -> None:
            await stuck.wait()
            await original(*arguments)  # type: ignore[arg-type]

        both.there.holder._send_chunk = stand_still  # type: ignore[method-assign]
        both.here.load(params)
        signs = 0
        for _ in range(3):
            await trio.sleep(1.2)
            signs += sum(isinstance(report, StillRead) for report in both.there.policy.progress())
        assert signs >= 2
        stuck.set()
        assert await both.here.until(Loaded)
        assert both.is_equal()


# --- broken connections ---


@pytest.mark.parametrize("cut_after", range(0, 900, 23))
async def test_load_resumes_after_a_connection_breaks_anywhere(autojump_clock, cut_after):
    async with pair() as both:

        def prepare(index: int, connection: Between) -> None:
            if index < 2:  # The first two connections are for data and for reports.
                connection.cut_after = cut_after

        both.prepare = prepare
        both.here.load(both.there.hold())
        await both.here.until(Loaded)
        assert both.is_equal()
        await both.there.until(Released)
        total = TOKENS * 2 * SMALL_LAYOUT.token_bytes
        sent = both.there.policy.counts()["bytes_sent_total"]
        assert total <= sent <= total + 40  # Received data is not sent again.


async def test_load_fails_if_its_connections_always_break(autojump_clock):
    async with pair() as both:

        def prepare(index: int, connection: Between) -> None:
            connection.cut_after = 300

        both.prepare = prepare
        both.here.load(both.there.hold())
        failed = await both.here.until(LoadFailed)
        assert failed == LoadFailed(RequestId("load"), f"127.0.0.1:7000: {BROKE_OFF}")
        assert any("the connection" in trouble or "closed" in trouble for trouble in both.here.troubles)
        assert both.here.policy.counts()["transfers_resumed_total"] > 0


async def test_load_from_an_unreachable_holder_soon_fails(autojump_clock):
    async with trio.open_nursery() as nursery:
        here = Side("here")
        here.nursery = nursery
        begun = trio.current_time()
        here.load(Side("there").hold())
        failed = await here.until(LoadFailed)
        assert failed == LoadFailed(RequestId("load"), f"127.0.0.1:7000: {BROKE_OFF}")
        assert trio.current_time() - begun < 1
        here.nursery = None
        nursery.cancel_scope.cancel()


async def test_load_from_a_silent_holder_fails_within_the_duration_of_a_hold(autojump_clock):
    async with pair() as both:

        def prepare(index: int, connection: Between) -> None:
            connection.held = trio.Event()

        both.prepare = prepare
        begun = trio.current_time()
        both.here.load(both.there.hold())
        failed = await both.here.until(LoadFailed)
        assert BROKE_OFF in failed.message  # type: ignore[attr-defined]
        assert any("nothing came for too long" in trouble for trouble in both.here.troubles)
        assert trio.current_time() - begun < 10.5


@pytest.mark.parametrize("place", [*range(0, 280, 31), *range(280, 420), *range(420, 800, 17)])
async def test_changed_byte_is_detected_and_never_loaded(autojump_clock, place):
    """`place` is a position in the holder's bytes, including the handshake."""
    async with pair() as both:

        def prepare(index: int, connection: Between) -> None:
            if index < 2:
                connection.damage = place

        both.prepare = prepare
        both.here.load(both.there.hold())
        with trio.move_on_after(60):
            while not any(isinstance(report, Loaded | LoadFailed) for report in both.here.reports):
                both.here.reports += both.here.policy.progress()
                await trio.sleep(0.1)
        assert any(isinstance(report, Loaded | LoadFailed) for report in both.here.reports)
        assert LoadFailed in map(type, both.here.reports) or both.is_equal()


# --- holds and loads that end during a transfer ---


async def act_at_each_moment(act: Callable[[Pair], None]) -> int:
    """Call `act` after each number of scheduler turns, up to the end of the load.

    Returns:
        Number of moments at which the load failed.
    """
    failures = 0
    for moment in range(200):
        async with pair() as both:
            both.here.load(both.there.hold())
            for _ in range(moment):
                await trio.lowlevel.checkpoint()
            both.here.reports += both.here.policy.progress()
            if any(isinstance(report, Loaded) for report in both.here.reports):
                return failures
            act(both)
            with trio.fail_after(1):  # The reader is notified, so it ends soon.
                await both.here.until(Loaded | LoadFailed)
            await trio.sleep(30)
            both.here.reports += both.here.policy.progress()
            assert both.there.pages.touched == []
            both.there.pages.foreign = ()
            kinds = [type(report) for report in both.here.reports]
            assert kinds in ([Loaded], [LoadFailed])
            if kinds == [Loaded]:
                both.there.pages.fill(BLOCKS_THERE, seed=1)  # This is the content of the held blocks.
                assert both.is_equal()
            failures += Loaded not in kinds
    raise AssertionError("the load never ended")


@pytest.mark.slow
async def test_hold_that_expires_at_any_moment_sends_no_foreign_bytes(autojump_clock):
    def expire(both: Pair) -> None:
        both.there.policy.hold_expired(RequestId("held"), HoldKind.SEND)
        both.there.pages.fill(BLOCKS_THERE, seed=2)  # The blocks now belong to another request.
        both.there.pages.foreign = BLOCKS_THERE

    failures = await act_at_each_moment(expire)
    assert failures > 10


@pytest.mark.parametrize("has_views", [True, False])
async def test_load_that_expires_at_any_moment_writes_nothing_afterwards(autojump_clock, has_views):
    written = []

    for moment in range(200):
        async with pair() as both:
            both.here.pages.has_views = has_views
            both.here.load(both.there.hold())
            for _ in range(moment):
                await trio.lowlevel.checkpoint()
            if any(isinstance(report, Loaded) for report in both.here.policy.progress()):
                break
            both.here.policy.load_abandoned(RequestId("load"))
            both.here.policy.hold_expired(RequestId("load"), HoldKind.LOAD)
            both.here.pages.fill(BLOCKS_HERE, seed=3)
            both.here.pages.foreign = BLOCKS_HERE
            before = [both.here.pages.content(block) for block in BLOCKS_HERE]
            await trio.sleep(30)
            assert both.here.pages.touched == []
            assert [both.here.pages.content(block) for block in BLOCKS_HERE] == before
            assert list(both.here.policy.progress()) == []
            written.append(moment)
            assert Released(RequestId("held")) in both.there.policy.progress()
    assert len(written) > 10


@pytest.mark.parametrize("end", ["expired", "aborted"])
async def test_hold_that_ends_during_a_stall_ends_the_read_at_once(autojump_clock, end):
    """In the middle of a chunk, the holder cannot send a frame about the end. So it closes the connection."""
    async with pair(chunk_bytes=10_000) as both:

        def prepare(index: int, connection: Between) -> None:
            connection.stuck_after = 400 if index < 2 else None

        both.prepare = prepare
        both.here.load(both.there.hold())
        await trio.sleep(1)
        assert max(len(connection.sent) for connection in both.connections) == 400
        both.there.pages.foreign = BLOCKS_THERE
        if end == "expired":
            both.there.policy.hold_expired(RequestId("held"), HoldKind.SEND)
        else:
            both.there.policy.request_aborted_after_finish(RequestId("held"))
        with trio.fail_after(0.5):
            await both.here.until(LoadFailed)
        assert both.there.pages.touched == []


class DirectWire:
    """Wire that accepts sent frames at once, without running other tasks, and then calls `after` with all frames.

    A reader has asked for all held blocks, and sends nothing more.
    """

    silence_seconds = 5.0

    def __init__(self, after: Callable[[list[Kind]], None]) -> None:
        self.kinds: list[Kind] = []
        self._after = after
        self._received = b""
        self._greeted = False

    async def send(self, pieces, may=lambda: True) -> None:
        if not may():
            raise MayNot(has_begun=False)
        head = head_of(bytes(pieces[0])[: frames.HEAD_BYTES])
        self.kinds.append(head.kind)
        if head.kind is Kind.CHALLENGE:
            challenge = bytes(pieces[0])[frames.HEAD_BYTES :]
            self._received += frame(Kind.PROOF, Proof(make_proof(KEY, "reader", GREETING, challenge)))
            self._received += frame(Kind.READ, Read("held", 0, TOKENS, PROOF, 40))
        self._after(self.kinds)

    async def receive(self, byte_count: int) -> bytes:
        if not self._greeted:
            self._received = frame(Kind.HELLO, GREETING)
            self._greeted = True
        if len(self._received) < byte_count:
            raise trio.BrokenResourceError("the other side has closed the connection")
        content, self._received = self._received[:byte_count], self._received[byte_count:]
        return content

    def close(self) -> None:
        pass


@pytest.mark.parametrize("data_count", range(1, 13))
async def test_end_of_a_read_is_not_confirmed_if_the_hold_ended_with_the_last_byte(autojump_clock, data_count):
    """Check this for any order of frames, with a wire that never lets other tasks run between two frames."""
    there = Side("there")
    there.hold()

    def expire(kinds: list[Kind]) -> None:
        if kinds.count(Kind.DATA) == data_count:
            there.policy.hold_expired(RequestId("held"), HoldKind.SEND)
            there.pages.foreign = BLOCKS_THERE

    wire = DirectWire(expire)

    async def accept() -> Wire:
        return wire

    await there.holder.serve(accept, "reader")
    assert wire.kinds[2:] == [Kind.DATA] * data_count + [Kind.ABORT]
    assert there.pages.touched == []


async def test_received_bytes_are_not_written_to_blocks_of_an_ended_load():
    here = Side("here")
    here.load(Side("there").hold())
    (load,) = here.policy.loads.pop_new()
    chunk = Chunk(0, 0, 2)
    here.reader.put(load, chunk, memoryview(bytes(32)), "float32", None)
    here.policy.load_abandoned(RequestId("load"))
    here.pages.foreign = BLOCKS_HERE
    with pytest.raises(MayNot):
        here.reader.put(load, chunk, memoryview(bytes(32)), "float32", None)
    assert here.pages.touched == []


# --- clients without the key ---


async def meet(send: bytes, *, key: bytes = KEY, ends: bool = False) -> tuple[Side, bytes]:
    """Let a client that does not know the key send bytes to a holder.

    Returns:
        The holder, and all bytes that it sends before it ends the connection.
    """
    side = Side("there", key=key)
    ours, theirs = memory_stream_pair()
    received = b""
    async with trio.open_nursery() as nursery:

        async def accept() -> Wire:
            return StreamWire(Between(theirs), 5.0, Between(theirs).close)

        nursery.start_soon(side.holder.serve, accept, "stranger")
        await ours.send_all(send)
        if ends:
            await ours.send_eof()
        with trio.move_on_after(120):
            while content := await ours.receive_some():
                received += content
            return side, received
    raise AssertionError("the connection stays open")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: there\r\n\r\n",
        b"\0" * 100,
        b"TK",
        frame(Kind.NOTICE, Notice(release=("held",))),
        frame(Kind.READ, Read("held", 0, 11, PROOF, 40)),
        frame(Kind.HELLO, b"\xff" * 20),
        frame(Kind.HELLO, GREETING[:-3]),
        frame(Kind.HELLO, b"\x91" * 3_000),
        frames._HEAD.pack(b"TK", Kind.HELLO, 2**32 - 1, 0, 0, 0, 0, 0),
        frames._HEAD.pack(b"TK", 99, 0, 0, 0, 0, 0, 0),
        frame(Kind.HELLO, GREETING) + frame(Kind.PROOF, Proof(b"\0" * 32)),
        frame(Kind.HELLO, GREETING) + frame(Kind.PROOF, Proof(b"")),
        frame(Kind.HELLO, GREETING) + frame(Kind.READ, Read("held", 0, 11, PROOF, 40)),
        frame(Kind.HELLO, msgspec.structs.replace(make_greeting("e", SMALL_LAYOUT), version=2)),
        frame(Kind.HELLO, msgspec.structs.replace(make_greeting("e", SMALL_LAYOUT), nonce=b"")),
        frame(Kind.HELLO, msgspec.structs.replace(make_greeting("e", SMALL_LAYOUT), engine_id="")),
    ],
    ids=lambda content: f"{len(content)}_bytes",
)
@pytest.mark.parametrize("ends", [False, True])
async def test_client_without_the_key_gets_nothing_and_is_counted(autojump_clock, content, ends):
    side, received = await meet(content, ends=ends)
    assert side.policy.counts()["peers_refused_total"] == 1
    assert len(side.troubles) == 1
    assert len(received) < 400
    assert Kind.WELCOME not in {head.kind for head in heads(received)}


def heads(content: bytes) -> list[frames.Head]:
    found = []
    while content:
        head = head_of(content[: frames.HEAD_BYTES])
        found.append(head)
        content = content[frames.HEAD_BYTES + head.body_bytes :]
    return found


async def test_silent_clients_without_the_key_are_disconnected_by_timeout_or_for_newer_clients(autojump_clock):
    side = Side("there")
    count = GREETINGS_OF_ADDRESS_MAX + 3
    async with trio.open_nursery() as nursery:
        ends = []
        for _ in range(count):
            ours, theirs = memory_stream_pair()
            between = Between(theirs)

            async def accept(between: Between = between) -> Wire:
                return StreamWire(between, 5.0, between.close)

            nursery.start_soon(side.holder.serve, accept, "stranger")
            ends.append(ours)
        await trio.sleep(0.1)
        assert side.policy.counts()["peers_refused_total"] == 3
        for end in ends[:3]:
            assert await end.receive_some() == b"", "the oldest connections were closed"
        await trio.sleep(6)
        assert side.policy.counts()["peers_refused_total"] == count
        for end in ends:
            assert await end.receive_some() == b""
        assert side.holder.strangers.count == 0


@pytest.mark.parametrize("address_count", [1, 5, 100])
async def test_silent_clients_without_the_key_do_not_block_readers(autojump_clock, address_count):
    side = Side("there")
    side.hold()
    async with trio.open_nursery() as nursery:
        for number in range(3 * GREETINGS_MAX):
            ours, theirs = memory_stream_pair()
            nursery.start_soon(side.holder.serve, opening(Between(theirs)), f"192.0.2.{number % address_count}")
            if number % 7 == 0:
                await ours.send_all(frame(Kind.HELLO, GREETING))
        await trio.testing.wait_all_tasks_blocked()
        assert side.holder.strangers.count <= GREETINGS_MAX
        _, wire = await greeted(side, nursery)
        await wire.send([frame(Kind.NOTICE, Notice(keep=("held",)))])
        assert (await receive_head(wire)).kind is Kind.NOTICE_REPLY
        wire.close()
        nursery.cancel_scope.cancel()
    assert side.holder.strangers.count == 0


async def test_clients_without_the_key_cannot_use_connection_slots_of_readers(autojump_clock):
    side = Side("there")
    async with trio.open_nursery() as nursery:
        wires = [(await greeted(side, nursery))[1] for _ in range(GREETINGS_OF_ADDRESS_MAX + 4)]
        assert side.holder.strangers.count == 0
        for wire in wires:
            await wire.send([frame(Kind.NOTICE, Notice())])
            assert (await receive_head(wire)).kind is Kind.NOTICE_REPLY
            wire.close()


def opening(between: Between) -> Callable[[], Awaitable[Wire]]:
    async def open_wire() -> Wire:
        return StreamWire(between, 5.0, between.close)

    return open_wire


CONVERSATIONS = [
    frame(Kind.HELLO, GREETING) + frame(Kind.PROOF, Proof(b"\0" * 32)),
    frame(Kind.HELLO, GREETING) + frame(Kind.READ, Read("held", 0, 11, PROOF, 40)),
    frame(Kind.HELLO, b"\x91" * 3_000),
    frame(Kind.ABORT, Abort("no")),
    frame(Kind.HELLO, msgspec.msgpack.encode({"version": 2**64 - 1, "engine_id": "e", "nonce": [[[]]], "layout": -1})),
]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    conversation=st.sampled_from(CONVERSATIONS),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=8)), max_size=4),
    length=st.floats(0, 1),
    hangs_up=st.booleans(),
)
def test_bytes_of_a_client_without_the_key_cause_no_error(conversation, changes, length, hangs_up):
    content = bytearray(conversation)
    for where, new in changes:
        start = int(where * len(content))
        content[start : start + len(new)] = new
    sides: list[Side] = []

    async def talk() -> None:
        side = Side("there")
        sides.append(side)
        ours, theirs = memory_stream_pair()
        between = Between(theirs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side.holder.serve, opening(between), "stranger")
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await ours.send_all(bytes(content[: int(length * len(content))]))
                if hangs_up:
                    await ours.aclose()
                while await ours.receive_some():
                    pass
            await ours.aclose()

    trio.run(talk, clock=MockClock(autojump_threshold=0))
    assert sides[0].policy.counts()["peers_refused_total"] == 1
    assert sides[0].holder.strangers.count == 0


async def greeted(there: Side, nursery: trio.Nursery) -> tuple[PeerConnection, Wire]:
    """Connect a reader that has proved that it knows the key."""
    ours, theirs = memory_stream_pair()
    between, end = Between(theirs), Between(ours)

    async def accept() -> Wire:
        return StreamWire(between, 5.0, between.close)

    nursery.start_soon(there.holder.serve, accept, "reader")
    wire = StreamWire(end, 5.0, end.close)
    return await greet_holder(wire, Identity("r", SMALL_LAYOUT, KEY)), wire


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 28,
        frame(Kind.WELCOME, Proof(b"")),
        frame(Kind.READ, b"nonsense"),
        frame(Kind.READ, Read("held", 0, 11, PROOF, 0)),
        frame(Kind.READ, Read("held", 0, 11, PROOF, 2**31)),
        frame(Kind.READ, Read("held", 0, 11, PROOF, 40, first_chunk=-1)),
        frame(Kind.READ, Read("held", 0, 11, PROOF, 40, first_chunk=2**31)),
        frame(Kind.NOTICE, Notice(keep=tuple(map(str, range(101))))),
        frames._HEAD.pack(b"TK", Kind.NOTICE, frames.BODY_BYTES_MAX + 1, 0, 0, 0, 0, 0),
        frame(Kind.PLACES_ASKED, b""),
    ],
    ids=lambda content: f"{len(content)}_bytes",
)
async def test_reader_with_invalid_frames_loses_only_its_connection(autojump_clock, content):
    there = Side("there")
    there.hold()
    async with trio.open_nursery() as nursery:
        _, wire = await greeted(there, nursery)
        await wire.send([content])
        with pytest.raises(trio.BrokenResourceError):
            await wire.receive(1)
        assert len(there.troubles) == there.policy.counts()["peers_refused_total"] == 1
        assert there.policy.sends.get("held") is not None
        _, wire = await greeted(there, nursery)
        await wire.send([frame(Kind.NOTICE, Notice(keep=("held", "other")))])
        head = await receive_head(wire)
        assert frames.body_of(NoticeReply, await wire.receive(head.body_bytes)) == NoticeReply(("other",))
        wire.close()


@pytest.mark.parametrize(("start", "count", "name"), [(0, 12, "held"), (5, 7, "held"), (-1, 3, "held"), (0, 11, "x")])
async def test_read_without_a_hold_is_refused_and_the_connection_stays_open(autojump_clock, start, count, name):
    there = Side("there")
    there.hold()
    async with trio.open_nursery() as nursery:
        _, wire = await greeted(there, nursery)
        for _ in range(2):
            ask = Read(name, start, count, proof_of(None, range(start + count)), 40)
            await wire.send([frame(Kind.READ, ask, transfer=7)])
            head = await receive_head(wire)
            assert (head.kind, head.transfer) == (Kind.ABORT, 7)
            assert "held" in frames.body_of(Abort, await wire.receive(head.body_bytes)).message
        assert there.policy.counts()["transfers_refused_total"] == 2
        wire.close()


async def test_reader_that_receives_nothing_loses_its_connection(autojump_clock):
    there = Side("there")
    there.hold()
    async with trio.open_nursery() as nursery:
        ours, theirs = memory_stream_pair()
        between, end = Between(theirs), Between(ours)

        async def accept() -> Wire:
            return StreamWire(between, 5.0, between.close)

        nursery.start_soon(there.holder.serve, accept, "reader")
        wire = StreamWire(end, 5.0, end.close)
        await greet_holder(wire, Identity("r", SMALL_LAYOUT, KEY))
        between.held = trio.Event()
        await wire.send([frame(Kind.READ, Read("held", 0, 11, PROOF, 40))])
        with pytest.raises(trio.BrokenResourceError):
            await wire.receive(1)
    assert there.policy.sends.get("held") is not None


# --- misbehaving holders ---


async def impostor(response: Callable[[Wire], Awaitable[None]], params: KVTransferParams) -> tuple[Side, LoadFailed]:
    async def open_wire(source: Source) -> Wire:
        ours, theirs = memory_stream_pair()
        end, between = Between(ours), Between(theirs)

        async def play() -> None:
            wire = StreamWire(between, 5.0, between.close)
            try:
                await response(wire)
            except (*BROKEN, Refused):
                pass
            finally:
                between.close()

        nursery.start_soon(play)
        return StreamWire(end, 5.0, end.close)

    async with trio.open_nursery() as nursery:
        here = Side("here", open_wire)
        here.nursery = nursery
        here.pages.fill(range(8), seed=9)
        untouched = [here.pages.content(block) for block in (1, 3, 4, 6, 7)]
        here.load(params)
        failed = await here.until(LoadFailed)
        assert [here.pages.content(block) for block in (1, 3, 4, 6, 7)] == untouched
        here.nursery = None
        nursery.cancel_scope.cancel()
    assert isinstance(failed, LoadFailed)
    return here, failed


def responses(*content: bytes, engine_id: str = "there", key: bytes = KEY, layout=SMALL_LAYOUT):
    """Return a holder that greets correctly and answers every request with these bytes."""

    async def play(wire: Wire) -> None:
        await greet_reader(wire, Identity(engine_id, layout, key))
        head = await receive_head(wire)
        await wire.receive(head.body_bytes)
        await wire.send(content)
        await wire.receive(1)

    return play


def data(layer: int, start: int, count: int, body: bytes, *, transfer: int = 1, checksum: int = 0) -> bytes:
    return bytes(frames.data_head(transfer, layer, start, count, len(body), checksum)) + body


@pytest.mark.parametrize(
    ("response", "expect"),
    [
        (responses(key=b"x" * 16), "the key is another one"),
        (responses(engine_id="somebody"), "another engine listens there"),
        (responses(layout=msgspec.structs.replace(SMALL_LAYOUT, model="other")), 'the model "other"'),
        (responses(layout=msgspec.structs.replace(SMALL_LAYOUT, layer_count=2**40)), "layers"),
        (responses(frame(Kind.ABORT, Abort("not for you"))), "127.0.0.1:7000: not for you"),
        (responses(frame(Kind.ABORT, Abort("one line\nlog expired\x1b" + "x" * 9_000))), "one line?log expired?xxx"),
        (responses(frame(Kind.ABORT, b"\xff")), "cannot be read"),
        (responses(b"garbage" * 10), "this is not the protocol of an engine"),
        (responses(frame(Kind.END, transfer=1)), "is due"),  # END arrives before any data.
        (responses(frame(Kind.NOTICE_REPLY, NoticeReply())), "is due"),
        (responses(data(0, 0, 2, bytes(32), transfer=2)), "of transfer 2"),
        (responses(data(1, 0, 2, bytes(32))), "is due"),
        (responses(data(0, 2, 2, bytes(32))), "is due"),
        (responses(data(0, 0, 1, bytes(16))), "is due"),
        (responses(data(0, 0, 2, bytes(31))), "is due"),
        (responses(data(0, 0, 2, bytes(32), checksum=1)), "is not what was sent"),
        (responses(bytes(frames.data_head(1, 0, 0, 2, 2**32 - 1, 0))), "is due"),
    ],
)
async def test_misbehaving_holder_fails_one_load_and_is_logged(autojump_clock, response, expect):
    params = Side("there").hold()
    here, failed = await impostor(response, params)
    said = here.troubles if BROKE_OFF in failed.message else [failed.message]
    assert any(expect in each for each in said)
    assert all(len(each) < 1_200 for each in (failed.message, *said))
    assert list(here.policy.progress()) == []


# --- the key ---


async def shake(reader_key: bytes, holder_key: bytes) -> tuple[object, object]:
    ours, theirs = memory_stream_pair()
    ends = [Between(ours), Between(theirs)]
    wires = [StreamWire(end, 5.0, end.close) for end in ends]
    results: dict[str, object] = {}

    async def play(
        name: str, greet: Callable[[Wire, Identity], Awaitable[PeerConnection]], wire: Wire, key: bytes
    ) -> None:
        try:
            results[name] = await greet(wire, Identity(name, SMALL_LAYOUT, key))
        except (*BROKEN, Refused) as error:
            results[name] = error
            wire.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(play, "reader", greet_holder, wires[0], reader_key)
        nursery.start_soon(play, "holder", greet_reader, wires[1], holder_key)
    said = bytes(ends[0].sent + ends[1].sent)
    assert not reader_key or reader_key not in said
    assert not holder_key or holder_key not in said
    return results["reader"], results["holder"]


async def test_handshake_identifies_both_sides(autojump_clock):
    for key in (KEY, b""):
        reader, holder = await shake(key, key)
        assert isinstance(reader, PeerConnection)
        assert isinstance(holder, PeerConnection)
        assert (reader.engine_id, holder.engine_id) == ("holder", "reader")
        assert reader.layout == SMALL_LAYOUT


@pytest.mark.parametrize(("reader_key", "holder_key"), [(KEY, b"x" * 16), (b"", KEY), (KEY, b"")])
async def test_handshake_with_another_key_is_refused(autojump_clock, reader_key, holder_key):
    reader, holder = await shake(reader_key, holder_key)
    assert isinstance(reader, Refused)
    assert isinstance(holder, Refused)


async def test_engine_that_holds_blocks_and_lacks_the_key_is_detected(autojump_clock):
    """A false holder sends back the reader's own proof, or a proof from another connection."""
    for stolen in ("same", "overheard"):
        ours, theirs = memory_stream_pair()
        end, between = Between(ours), Between(theirs)
        wire = StreamWire(between, 5.0, between.close)

        async def pass_for_holder(wire: Wire = wire, stolen: str = stolen) -> None:
            head = await receive_head(wire)
            hello = await wire.receive(head.body_bytes)
            challenge = msgspec.msgpack.encode(make_greeting("there", SMALL_LAYOUT))
            await wire.send([frame(Kind.CHALLENGE, challenge)])
            head = await receive_head(wire)
            proof = frames.body_of(Proof, await wire.receive(head.body_bytes)).proof
            assert is_proof(proof, KEY, "reader", hello, challenge)
            if stolen == "overheard":  # This proof is valid on another connection.
                proof = make_proof(KEY, "holder", hello, GREETING)
            await wire.send([frame(Kind.WELCOME, Proof(proof))])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_for_holder)
            with pytest.raises(Refused, match="does not know the key"):
                await greet_holder(StreamWire(end, 5.0, end.close), Identity("here", SMALL_LAYOUT, KEY))


def test_proofs_are_compared_in_constant_time():
    assert "compare_digest" in inspect.getsource(is_proof)
    assert make_proof(KEY, "reader", b"ab", b"c") != make_proof(KEY, "reader", b"a", b"bc")


# --- frames ---


def test_any_bytes_are_a_frame_or_raise_bad_frame():
    import random

    source = random.Random(7)
    for _ in range(2_000):
        content = source.randbytes(frames.HEAD_BYTES)
        if source.random() < 0.5:
            content = b"TK" + content[2:]
        with suppress(BadFrame):
            head_of(content)
        for kind in (Read, Notice, NoticeReply, Proof, Abort, frames.Greeting):
            with suppress(BadFrame):
                frames.body_of(kind, source.randbytes(source.randrange(60)))


async def test_wire_sends_and_receives_no_bytes_without_permission(autojump_clock):
    ours, theirs = memory_stream_pair()
    a, b = Between(ours), Between(theirs)
    sender, receiver = StreamWire(a, 5.0, a.close), StreamWire(b, 5.0, b.close)
    with pytest.raises(MayNot):
        await sender.send([b"abc"], lambda: False)
    assert a.sent == b""
    await sender.send([b"abc", b"def"])
    target = bytearray(6)
    with pytest.raises(MayNot):
        await receiver.receive_into([memoryview(target)], lambda: False)
    assert target == bytes(6)
