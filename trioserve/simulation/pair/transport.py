"""A transport without tasks for the policy of a stream connector (connectors.stream.policy).

It replaces holder.py and reader.py. It handles one message after another, over a network that the simulation controls.
The real policy makes all decisions: which blocks are held, which blocks may be read or written, which engine is
notified, and how often a load is retried.

A message stays on its connection until the simulation delivers, loses or duplicates it. A connection keeps the order of
the messages in each direction. A dead connection delivers no messages, and neither end is notified. So an end that
waits for a message sets a time at which it gives up. A stopped host receives its messages after it continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from trioserve.connectors.settings import StreamOptions
from trioserve.connectors.stream.frames import Chunks, Notice
from trioserve.connectors.stream.policy import Load, Send, StreamPolicy
from trioserve.connectors.stream.signature import Source
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import ConnectorSetup, KVLayout
from trioserve.testing.fake_executor import FakeExecutor

__all__ = ["PORTS", "Connection", "End", "Network", "PairTransport", "Serving", "Timers"]


class End(Protocol):
    """One end of a connection. The network does not call an end after the connection was closed or has broken."""

    def take(self, connection: Connection, message: msgspec.Struct) -> None: ...

    def broke(self, connection: Connection, why: str) -> None: ...


class Connection:
    """A connection between two parties.

    Args:
        ends: the two ends, by the names of their parties. The names differ.

    Attributes:
        ways: messages in each direction, by the receiving party.
        patience: time at which an end gives up, by its party.
        is_open: True if neither party has closed the connection.
        is_dead: True if all messages are lost without notice.
    """

    def __init__(self, ends: dict[str, End]) -> None:
        self.ends = ends
        self.ways: dict[str, deque[msgspec.Struct]] = {party: deque() for party in ends}
        self.patience: dict[str, float] = {}
        self.is_open = True
        self.is_dead = False

    def send(self, party: str, message: msgspec.Struct) -> None:
        """Send a message to the other party. A closed or dead connection loses the message.

        Args:
            party: the sender.
        """
        if self.is_open and not self.is_dead:
            self.ways[self.other(party)].append(message)

    def other(self, party: str) -> str:
        return next(name for name in self.ends if name != party)


class Network:
    """All connections of a simulated pair.

    Args:
        runs: returns whether a party can receive a message now.
        exists: returns whether a party can receive a message now or after it continues.

    Attributes:
        broken_count: number of connections that have broken.
    """

    def __init__(self, runs: Callable[[str], bool], exists: Callable[[str], bool]) -> None:
        self._runs = runs
        self._exists = exists
        self.connections: list[Connection] = []
        self.broken_count = 0

    def open(self, ends: dict[str, End]) -> Connection:
        connection = Connection(ends)
        self.connections.append(connection)
        return connection

    def deliverable(self) -> list[tuple[Connection, str]]:
        """Return the directions in which a message could arrive now.

        Returns:
            Pairs of the connection and the receiving party.
        """
        return [
            (connection, party)
            for connection in self.connections
            for party, way in connection.ways.items()
            if way and not connection.is_dead and self._runs(party)
        ]

    def deliver(self, connection: Connection, party: str) -> None:
        message = connection.ways[party].popleft()
        if isinstance(message, Closed):
            self._forget(connection)
            connection.ends[party].broke(connection, "the other side has left")
        else:
            connection.ends[party].take(connection, message)

    def close(self, connection: Connection, party: str) -> None:
        """Close a connection.

        The other party is notified after it has received the messages that were sent before. If the connection is dead,
        it is not notified.

        Args:
            party: the party that closes the connection.
        """
        if not connection.is_open:
            return
        connection.is_open = False
        other = connection.other(party)
        connection.ways[party].clear()
        connection.patience.clear()
        if connection.is_dead or not self._exists(other):
            self._forget(connection)
        else:
            connection.ways[other].append(Closed())

    def cut(self, connection: Connection, why: str) -> None:
        """Break a connection.

        Each party that has not closed the connection is notified. A stopped party is notified when it continues.

        Args:
            why: the reason.
        """
        was_open, connection.is_open = connection.is_open, False
        self._forget(connection)
        if not was_open:
            return
        self.broken_count += 1
        for party, end in connection.ends.items():
            if self._runs(party):
                end.broke(connection, why)
            elif self._exists(party):
                connection.ways[party].append(Closed())
                self.connections.append(connection)

    def abandon(self, connection: Connection, party: str) -> None:
        """End a connection on which a party has waited for too long.

        Args:
            party: the party that gives up.
        """
        self.broken_count += 1
        self.close(connection, party)
        connection.ends[party].broke(connection, "the other side was silent for too long")

    def impatient(self, now: float) -> tuple[Connection, str] | None:
        due = [
            (moment, index, party)
            for index, connection in enumerate(self.connections)
            for party, moment in connection.patience.items()
            if moment <= now and self._runs(party)
        ]
        if not due:
            return None
        _moment, index, party = min(due)
        return self.connections[index], party

    def next_impatience(self) -> float | None:
        moments = [
            moment
            for connection in self.connections
            for party, moment in connection.patience.items()
            if self._runs(party)
        ]
        return min(moments, default=None)

    def _forget(self, connection: Connection) -> None:
        connection.patience.clear()
        for way in connection.ways.values():
            way.clear()
        if connection in self.connections:
            self.connections.remove(connection)


class Closed(msgspec.Struct, frozen=True):
    """Message: the other party has closed the connection."""


class Timers:
    """Timers of one party. The timers of a stopped party expire after it continues."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], Any]]] = []
        self._count = 0

    def at(self, moment: float, call: Callable[[], Any]) -> None:
        self._count += 1
        self._due.append((moment, self._count, call))
        self._due.sort(key=lambda entry: entry[:2])

    @property
    def next_moment(self) -> float | None:
        return self._due[0][0] if self._due else None

    def ring(self, now: float) -> bool:
        """Call the function of the first timer that has expired.

        Args:
            now: the current time.

        Returns:
            False if no timer has expired.
        """
        if not self._due or self._due[0][0] > now:
            return False
        self._due.pop(0)[2]()
        return True


HERE = "127.0.0.1"
PORTS = {"prefill": 1, "decode": 2}
SILENCE_SECONDS = 4.0
HEARTBEAT_SECONDS = 2.5
NOTICE_FAILURES_MAX = 3

Slots = tuple[tuple[int, str | None] | None, ...]


class Asked(msgspec.Struct, frozen=True):
    """Message: a reader requests the KV of `count` positions from `start` on.

    Attributes:
        first: index of the first chunk that the reader still needs.
    """

    engine_id: str
    request_id: str
    start: int
    count: int
    first: int
    proof: bytes


class Piece(msgspec.Struct, frozen=True):
    index: int
    content: Slots


class AllSent(msgspec.Struct, frozen=True):
    """Message: all chunks were sent, and the blocks were still held when the last chunk was read."""


class Aborted(msgspec.Struct, frozen=True):
    """Message: the engine cannot send the requested KV, or cannot send more of it.

    Attributes:
        message: the reason.
        is_another: True if the engine at this address is not the requested engine.
    """

    message: str
    is_another: bool = False


class HolderNotice(msgspec.Struct, frozen=True):
    """Message: a reader notifies an engine which of its held blocks are still needed, and which may be released.

    Attributes:
        engine_id: id of the engine that holds the blocks.
        notice: the notice.
    """

    engine_id: str
    notice: Notice


class Gone(msgspec.Struct, frozen=True):
    """Message: the requests of a notice for which the engine holds no blocks."""

    request_ids: tuple[str, ...]


class NoPages:
    """KV pages without blocks, for a policy that uses only their layout."""

    block_count = 0

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout

    def view(self, layer: int, block: BlockIndex) -> memoryview | None:
        raise AssertionError("the policy must not touch a block")

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        raise AssertionError("the policy must not touch a block")

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        raise AssertionError("the policy must not touch a block")


class PairTransport:
    """The transport of one engine.

    Args:
        name: the engine's name.
        engine_id: the engine's id.
        executor: the engine's executor.
        chunk_tokens: number of tokens per chunk.
        network: connects both engines, and loses or delays messages.
        timers: timers of the engine.
        clock: returns the simulated time.
        listener_at: returns the listener of an engine, or None if the engine does not listen.

    Attributes:
        policy: the connector's policy, which the core uses as its connector.
        servings: incomplete transfers that other engines have requested.
    """

    def __init__(
        self,
        name: str,
        engine_id: str,
        executor: FakeExecutor,
        chunk_tokens: int,
        network: Network,
        timers: Timers,
        clock: Callable[[], float],
        listener_at: Callable[[str], Holding | None],
    ) -> None:
        self.name = name
        self.engine_id = engine_id
        self.executor = executor
        self.network = network
        self.timers = timers
        self.now = clock
        self.listener_at = listener_at
        self.listener = Holding(self)
        self.layout = KVLayout(
            model="fake", layer_count=1, block_size=executor.block_size, kv_head_count=1, head_dim=1, dtype="float32"
        )
        self.chunk_bytes = chunk_tokens * self.layout.token_bytes
        setup = ConnectorSetup(
            engine_id=engine_id, role="both", pages=NoPages(self.layout), options={}, wake=lambda: None
        )
        self.policy = StreamPolicy(setup, StreamOptions(), lambda: None, key=b"of the pair")
        self.policy.address = (HERE, PORTS[name])
        self.servings: list[Serving] = []
        self._notifiers: dict[Source, Notifier] = {}

    def work(self) -> None:
        """Begin the pending work of the policy. A real transport's task does this whenever it is woken."""
        for load in self.policy.loads.pop_new():
            self.policy.loads.begun(load, self.now())
            self.fetch(load)
        for source in self.policy.loads.pop_urgent():
            notifier = self._notifiers.get(source)
            if notifier is None:
                notifier = self._notifiers[source] = Notifier(self, source)
            notifier.notify_now()

    def fetch(self, load: Load) -> None:
        """Make one attempt to load the missing chunks of a load."""
        if not load.is_alive:
            return
        far = self.open(load.origin.source, fetching := Fetching(self, load))
        if far is None:
            self.broken(load, "no engine listens at this address", is_deaf=True)
        else:
            fetching.ask(far)

    def open(self, source: Source, end: End) -> Connection | None:
        """Connect to the listener at an address.

        Args:
            source: the address.
            end: this engine's end of the connection.

        Returns:
            None if there is no listener.
        """
        far = next((name for name, port in PORTS.items() if (HERE, port) == (source.host, source.port)), None)
        listener = None if far is None else self.listener_at(far)
        if far is None or listener is None:
            return None
        return self.network.open({self.name: end, far: listener})

    def broken(self, load: Load, why: str, *, is_deaf: bool = False) -> None:
        seconds = self.policy.loads.broken(load, why, self.now(), is_deaf=is_deaf)
        if seconds is not None:
            self.timers.at(self.now() + seconds, partial(self.fetch, load))

    def accept(self, connection: Connection, message: msgspec.Struct) -> None:
        """Handle a message from another engine.

        Args:
            connection: the connection of the message.
        """
        if isinstance(message, Asked):
            self._serve(connection, message)
        else:
            assert isinstance(message, HolderNotice)
            if message.engine_id != self.engine_id:
                connection.send(self.name, Aborted("another engine listens at this address", is_another=True))
                return
            sends = self.policy.sends
            sends.released(message.notice.release)
            connection.send(self.name, Gone(sends.note_still_read(message.notice.keep, self.now())))

    def forget(self, source: Source) -> None:
        self._notifiers.pop(source, None)

    def _serve(self, connection: Connection, asked: Asked) -> None:
        if asked.engine_id != self.engine_id:
            connection.send(self.name, Aborted("another engine listens at this address", is_another=True))
            return
        send = self.policy.sends.asked(asked.request_id, asked.start, asked.count, asked.proof, self.now())
        if isinstance(send, str):
            connection.send(self.name, Aborted(send))
        else:
            Serving(self, connection, send, asked)


class Holding:
    """The end of a connection at the engine that holds blocks. It passes all messages to the transport."""

    def __init__(self, transport: PairTransport) -> None:
        self._transport = transport

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        self._transport.accept(connection, message)

    def broke(self, connection: Connection, why: str) -> None:
        for serving in [one for one in self._transport.servings if one.connection is connection]:
            serving.end()


class Serving:
    """A transfer of KV that one reader has requested.

    Args:
        transport: the transport of the engine that holds the blocks.
        connection: the reader's connection.
        send: the held blocks.
        asked: the reader's message.
    """

    def __init__(self, transport: PairTransport, connection: Connection, send: Send, asked: Asked) -> None:
        self.connection = connection
        self._transport = transport
        self._send = send
        self._chunks = Chunks(transport.layout, asked.start, asked.count, transport.chunk_bytes)
        self._next = asked.first
        send.stops[self] = self._stop
        transport.servings.append(self)

    def proceed(self) -> None:
        """Read the next chunk and send it, or report that all chunks were sent."""
        name, send = self._transport.name, self._send
        if not send.is_alive:
            self._stop()
        elif self._next < len(self._chunks):
            chunk = self._chunks[self._next]
            content = self._transport.executor.get_slots(send.block_table, chunk.token_start, chunk.token_count)
            self.connection.send(name, Piece(self._next, content))
            self._next += 1
            self._transport.policy.sends.sign_of_life(send, self._transport.now())
        else:
            send.was_read = True
            self.connection.send(name, AllSent())
            self.end()

    def end(self) -> None:
        self._send.stops.pop(self, None)
        if self in self._transport.servings:
            self._transport.servings.remove(self)

    def _stop(self) -> None:
        self.connection.send(self._transport.name, Aborted("the hold has ended while it was read"))
        self.end()


class Fetching:
    """The reader's end of a connection that makes one attempt at a load.

    Args:
        transport: the reader's transport.
    """

    def __init__(self, transport: PairTransport, load: Load) -> None:
        self._transport = transport
        self._load = load
        self._chunks = Chunks(transport.layout, load.start, load.token_count, transport.chunk_bytes)

    def ask(self, connection: Connection) -> None:
        transport, load = self._transport, self._load
        name, origin = transport.name, load.origin
        load.stop = partial(transport.network.close, connection, name)
        asked = Asked(
            origin.source.engine_id, origin.request_id, load.start, load.token_count, load.next_chunk, load.proof
        )
        connection.send(name, asked)
        connection.patience[name] = transport.now() + SILENCE_SECONDS

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        transport, load = self._transport, self._load
        loads, name = transport.policy.loads, transport.name
        if not load.is_alive:
            transport.network.close(connection, name)
            return
        connection.patience[name] = transport.now() + SILENCE_SECONDS
        if isinstance(message, Aborted):
            transport.network.close(connection, name)
            loads.failed(load, message.message)
        elif isinstance(message, Piece) and message.index == load.next_chunk < len(self._chunks):
            transport.executor.put_slots(load.block_table, self._chunks[message.index].token_start, message.content)
            loads.came(load, transport.now())
        elif isinstance(message, AllSent) and load.next_chunk == len(self._chunks):
            transport.network.close(connection, name)
            loads.complete(load)
        else:
            transport.network.close(connection, name)
            transport.broken(load, f"{type(message).__name__} arrived, but is not expected now")

    def broke(self, connection: Connection, why: str) -> None:
        self._transport.broken(self._load, why)


class Notifier:
    """Repeatedly notifies an engine which of its held blocks are still needed, and which may be released.

    Args:
        transport: the reader's transport.
        source: address and id of the engine that holds the blocks.
    """

    def __init__(self, transport: PairTransport, source: Source) -> None:
        self._transport = transport
        self._source = source
        self._failure_count = 0
        self._connection: Connection | None = None
        self._sent_notice: Notice | None = None
        self._is_due_again = False
        self._turn = 0

    def notify_now(self) -> None:
        if self._sent_notice is not None:
            self._is_due_again = True
            return
        self._turn += 1
        transport, source = self._transport, self._source
        notices = transport.policy.loads.notices(source)
        if not notices:
            self._leave()
            return
        if self._connection is None:
            self._connection = transport.open(source, self)
            if self._connection is None:
                self._failed(is_final=False)
                return
        self._sent_notice = notices[0]
        self._connection.send(transport.name, HolderNotice(source.engine_id, self._sent_notice))
        self._connection.patience[transport.name] = transport.now() + SILENCE_SECONDS

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        notice, self._sent_notice = self._sent_notice, None
        connection.patience.clear()
        if isinstance(message, Gone) and notice is not None:
            self._failure_count = 0
            self._transport.policy.loads.answered(self._source, notice, message.request_ids)
            self._again(0.0 if self._is_due_again else HEARTBEAT_SECONDS)
        else:
            self._close()
            self._failed(is_final=isinstance(message, Aborted))

    def broke(self, connection: Connection, why: str) -> None:
        self._connection, was_due, self._sent_notice = None, self._sent_notice, None
        if was_due is not None:
            self._failed(is_final=False)

    def _failed(self, *, is_final: bool) -> None:
        self._sent_notice = None
        self._failure_count += 1
        if is_final or self._failure_count >= NOTICE_FAILURES_MAX:
            self._transport.policy.loads.cannot_notify(self._source)
            self._again(HEARTBEAT_SECONDS)
        else:
            self._again(0.1 * self._failure_count)

    def _again(self, seconds: float) -> None:
        self._is_due_again = False
        if not self._transport.policy.loads.notices(self._source):
            self._leave()
            return
        self._transport.timers.at(self._transport.now() + seconds, partial(self._notify_again, self._turn))

    def _notify_again(self, turn: int) -> None:
        if turn == self._turn:  # If the turn has changed, a newer notice was sent meanwhile.
            self.notify_now()

    def _leave(self) -> None:
        self._close()
        self._transport.forget(self._source)

    def _close(self) -> None:
        if self._connection is not None:
            self._transport.network.close(self._connection, self._transport.name)
            self._connection = None
