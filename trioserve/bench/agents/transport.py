"""Compares what a turn costs over HTTP and over a websocket, and measures the cost of idle websockets.

The server runs a fake model whose steps take no time. What remains is the cost of the transport: bytes, time, and CPU
time of the server. The ways are measured in turn, round by round, so that other work on the machine affects all.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence
from contextlib import aclosing
from random import Random
from statistics import median
from typing import Any

import msgspec
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Message,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)

from trioserve.bench.agents.traces import ChatConversation, Conversation, Reply, ResponsesConversation
from trioserve.bench.client import RECEIVE_BYTES, OpenStream, stream_opener
from trioserve.bench.load import WORDS
from trioserve.bench.report import Machine, measured_at
from trioserve.bench.runner import (
    EXIT_REQUESTS_FAILED,
    CannotMeasure,
    ServerProcess,
    cpu_seconds,
    http1_client,
    memory_bytes,
)
from trioserve.bench.server_settings import AgentBenchSettings
from trioserve.bench.settings import Target

__all__ = [
    "Dialog",
    "IdleFigures",
    "TransportReport",
    "WayFigures",
    "WebSocketConversation",
    "measure_transport",
    "measured_idle",
    "measured_ways",
    "transport_text",
]

PATH = "/v1/responses"
MODEL = "scripted"
READY_SECONDS_MAX = 60.0
IDLE_SECONDS = 30.0  # longer than the server's interval between two pings
SETTLE_SECONDS = 2.0
PER_ADDRESS = 500  # The server limits the websockets of one address.
OPENING = 50  # websockets that open at the same time
ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})


class Dialog(msgspec.Struct, frozen=True):
    """Lengths of a measured session.

    Attributes:
        turns: number of turns. The default is a task, and the results of 20 tool calls.
        system_words: words of the system message.
        input_words: words of each input.
        output_tokens: tokens of each response.
    """

    turns: int = 21
    system_words: int = 1_000
    input_words: int = 150
    output_tokens: int = 16


DEFAULT_DIALOG = Dialog()


class WayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one way to send turns. Means and medians are over the turns of all rounds.

    Attributes:
        way: "chat", "responses" or "websocket".
        turns: measured turns.
        turn_ms: median time of a turn, from its request to its last event.
        ttft_ms: median time to the first text.
        sent_bytes: mean bytes that the client sends for a turn.
        received_bytes: mean bytes that it receives.
        cpu_ms: CPU time of the server for a turn. None: the system does not report it.
    """

    way: str
    turns: int
    turn_ms: float
    ttft_ms: float
    sent_bytes: float
    received_bytes: float
    cpu_ms: float | None


class IdleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of idle websockets.

    Attributes:
        sessions: open websockets, each with a session.
        session_bytes: resident memory of the server for each of them. None: the system does not report it.
        cpu_share: CPU time of the server while all of them are idle, in cores. None: the system does not report it.
        idle_seconds: duration of that time.
    """

    sessions: int
    session_bytes: float | None
    cpu_share: float | None
    idle_seconds: float


class TransportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result. Either its ways or its idle figures are missing.

    Attributes:
        settings: settings of the measurement.
        date: end of the measurement, ISO 8601.
        machine: the machine.
        ways: figures of each way.
        idle: figures of idle websockets.
    """

    settings: AgentBenchSettings
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    ways: list[WayFigures] = []
    idle: IdleFigures | None = None


def transport_text(report: TransportReport) -> str:
    """Return the figures as a table or as sentences.

    Args:
        report: figures of turns or of idle websockets.
    """
    lines = []
    if report.ways:
        lines += [
            "| way | turns | sent, bytes | received, bytes | server CPU, ms | turn p50, ms | first text p50, ms |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {one.way} | {one.turns} | {one.sent_bytes:,.0f} | {one.received_bytes:,.0f} | "
            f"{'' if one.cpu_ms is None else format(one.cpu_ms, '.2f')} | {one.turn_ms:.2f} | {one.ttft_ms:.2f} |"
            for one in report.ways
        ]
        lines += [
            "",
            f"Sessions of {DEFAULT_DIALOG.turns} turns, {report.settings.rounds} rounds in turn, no weights.",
        ]
    idle = report.idle
    if idle is not None:
        memory = "unknown" if idle.session_bytes is None else f"{idle.session_bytes / 1024:.1f} KiB"
        cpu = "unknown" if idle.cpu_share is None else f"{idle.cpu_share:.1%} of a core"
        lines.append(f"{idle.sessions} idle websockets: memory of each {memory}; CPU time {cpu}.")
    lines.append(f"{report.machine}, {report.date}{': ' + report.settings.label if report.settings.label else ''}.")
    return "\n".join(lines) + "\n"


async def measure_transport(settings: AgentBenchSettings) -> TransportReport:
    """Start a server with a fake model, and measure ways or idle websockets, as the settings say.

    Args:
        settings: settings of the measurement.

    Raises:
        CannotMeasure: the server did not start, or refused a turn or a websocket.
    """
    # Each websocket needs an open file in this process and in the server, which inherits the limit.
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = str(settings.connections + 16)
    limits = ("--max-connections", "--max-connections-per-address", "--max-websockets")
    words = ["scripted", *(word for limit in limits for word in (limit, count))]
    with ServerProcess("scripted", [*words, *settings.server_flags]) as server:
        await server.wait_until_ready(READY_SECONDS_MAX)
        target = Target.from_url(server.url)
        if settings.mode == "idle":
            return TransportReport(
                settings=settings, idle=await measured_idle(target, server.pid, settings.connections)
            )
        ways = await measured_ways(
            target,
            stream_opener(target, 1),
            rounds=settings.rounds,
            seconds_max=settings.timeout_seconds,
            pid=server.pid,
        )
        return TransportReport(settings=settings, ways=ways)


# --- Turns ---


class _CountedStream(trio.abc.Stream):
    """A stream that counts its bytes."""

    def __init__(self, stream: trio.abc.Stream, counts: list[int]) -> None:
        self._stream = stream
        self._counts = counts

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._counts[0] += len(data)
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._stream.receive_some(max_bytes)
        self._counts[1] += len(data)
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


class WebSocketConversation:
    """Sends only the new input of each turn, over one websocket that keeps the responses.

    Args:
        socket: the open websocket.
        model: name of the model.
        system: text of the system message.
        timeout_seconds: seconds after which a request has failed.
    """

    def __init__(self, socket: _WebSocket, model: str, system: str, timeout_seconds: float) -> None:
        self._socket = socket
        self._model = model
        self._input = [{"role": "system", "content": system}]
        self._previous: str | None = None
        self._timeout_seconds = timeout_seconds

    async def ask(self, text: str, output_tokens: int) -> Reply:
        body: dict[str, Any] = {
            "type": "response.create",
            "model": self._model,
            "input": [*self._input, {"role": "user", "content": text}],
            "max_output_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "store": False,
        }
        if self._previous is not None:
            body["previous_response_id"] = self._previous
        reply = Reply(trio.current_time())
        reply.head(200)
        with trio.move_on_after(self._timeout_seconds) as scope:
            await self._socket.send(msgspec.json.encode(body).decode())
            kind = ""
            while kind not in ENDS:
                text = await self._socket.receive()
                kind = reply.note(text, trio.current_time())
        reply.end(f"no whole response within {self._timeout_seconds:g} s" if scope.cancelled_caught else None)
        self._input, self._previous = [], reply.response_id
        return reply


class _WebSocket:
    """A client's end of a websocket.

    Args:
        stream: the connection.
        authority: value of the Host header.
    """

    def __init__(self, stream: trio.abc.Stream, authority: str) -> None:
        self._stream = stream
        self._authority = authority
        self._protocol = WSConnection(ConnectionType.CLIENT)

    async def open(self) -> None:
        await self._stream.send_all(self._protocol.send(Request(host=self._authority, target=PATH)))
        event = await self._next_event()
        if not isinstance(event, AcceptConnection):
            status = event.status_code if isinstance(event, RejectConnection) else event
            raise CannotMeasure(f"the server refused a websocket: {status}", EXIT_REQUESTS_FAILED)

    async def send(self, text: str) -> None:
        await self._stream.send_all(self._protocol.send(Message(data=text)))

    async def receive(self) -> str:
        """Receive one message. Pings are answered meanwhile.

        Raises:
            CannotMeasure: the server closed the websocket.
        """
        parts: list[str] = []
        while True:
            event = await self._next_event()
            if isinstance(event, TextMessage):
                parts.append(event.data)
                if event.message_finished:
                    return "".join(parts)
            elif isinstance(event, Ping):
                await self._stream.send_all(self._protocol.send(event.response()))
            elif isinstance(event, CloseConnection):
                raise CannotMeasure(f"the server closed a websocket: {event.code} {event.reason}", EXIT_REQUESTS_FAILED)

    async def _next_event(self) -> Event:
        while True:
            for event in self._protocol.events():
                return event
            data = await self._stream.receive_some(RECEIVE_BYTES)
            if not data:
                raise CannotMeasure("the server disconnected a websocket", EXIT_REQUESTS_FAILED)
            self._protocol.receive_data(bytes(data))


class _Way:
    """Collects the figures of one way."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ttft_seconds: list[float] = []
        self.counts = [0, 0]
        self.cpu_seconds = 0.0
        self.knows_cpu = True

    def figures(self, name: str) -> WayFigures:
        turns = len(self.seconds)
        return WayFigures(
            way=name,
            turns=turns,
            turn_ms=1e3 * median(self.seconds),
            ttft_ms=1e3 * median(self.ttft_seconds),
            sent_bytes=self.counts[0] / turns,
            received_bytes=self.counts[1] / turns,
            cpu_ms=1e3 * self.cpu_seconds / turns if self.knows_cpu else None,
        )


async def measured_ways(
    target: Target,
    open_stream: OpenStream,
    *,
    rounds: int,
    seconds_max: float,
    pid: int | None = None,
    dialog: Dialog = DEFAULT_DIALOG,
) -> list[WayFigures]:
    """Send the same turns over chat completions, stored responses and a websocket.

    Args:
        target: the server.
        open_stream: opens a connection.
        rounds: sessions of each way.
        seconds_max: seconds after which a turn has failed.
        pid: process of the server. None: its CPU time is not measured.
        dialog: lengths of each session.

    Raises:
        CannotMeasure: a turn failed.
    """
    ways = {"chat": _Way(), "responses": _Way(), "websocket": _Way()}
    for number in range(rounds + 1):  # The first round is a warm-up.
        for name, way in ways.items():
            current = _Way() if number == 0 else way
            before = None if pid is None else cpu_seconds(pid)
            await _session(name, current, target, open_stream, number, seconds_max, dialog)
            after = None if pid is None else cpu_seconds(pid)
            if before is None or after is None:
                current.knows_cpu = False
            else:
                current.cpu_seconds += after - before
    return [way.figures(name) for name, way in ways.items()]


async def _session(
    name: str, way: _Way, target: Target, open_stream: OpenStream, number: int, seconds_max: float, dialog: Dialog
) -> None:
    async def counted() -> trio.abc.Stream:
        return _CountedStream(await open_stream(), way.counts)

    draw = Random(f"{name}/{number}")
    system = " ".join(draw.choices(WORDS, k=dialog.system_words))
    if name == "websocket":
        stream = await counted()
        try:
            socket = _WebSocket(stream, target.authority)
            await socket.open()
            await _turns(WebSocketConversation(socket, MODEL, system, seconds_max), way, draw, dialog)
        finally:
            await trio.aclose_forcefully(stream)
        return
    client = http1_client(target, open_stream=counted)
    async with aclosing(client):
        kind = ChatConversation if name == "chat" else ResponsesConversation
        await _turns(kind(client, target.path_prefix, MODEL, system, seconds_max), way, draw, dialog)


async def _turns(conversation: Conversation, way: _Way, draw: Random, dialog: Dialog) -> None:
    for _ in range(dialog.turns):
        text = " ".join(draw.choices(WORDS, k=dialog.input_words))
        began_at = trio.current_time()
        reply = await conversation.ask(text, dialog.output_tokens)
        if reply.failure is not None or reply.ttft_seconds is None:
            raise CannotMeasure(f"a turn failed: {reply.failure}", EXIT_REQUESTS_FAILED)
        way.seconds.append(trio.current_time() - began_at)
        way.ttft_seconds.append(reply.ttft_seconds)


# --- Idle websockets ---


async def measured_idle(target: Target, pid: int, count: int) -> IdleFigures:
    """Open websockets, and measure the server while all of them are idle.

    Args:
        target: the server, on this machine.
        pid: process of the server.
        count: number of websockets.

    Raises:
        CannotMeasure: the server refused or closed a websocket.
    """
    try:
        return await _measure_idle(target, pid, count)
    except BaseExceptionGroup as group:
        refusals, others = group.split(CannotMeasure)
        if refusals is None or others is not None:
            raise
        error: BaseException = refusals
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None  # Several websockets may fail at the same time. One reason is enough.


async def _measure_idle(target: Target, pid: int, count: int) -> IdleFigures:
    opened_count = min(OPENING, count)
    async with trio.open_nursery() as nursery:
        # The first websockets load code and fill pools, and are not counted.
        await _open_idle(target, range(opened_count), nursery)
        await trio.sleep(SETTLE_SECONDS)
        before = memory_bytes(pid)[0]
        await _open_idle(target, range(opened_count, count), nursery)
        await trio.sleep(SETTLE_SECONDS)
        after, cpu_before, began_at = memory_bytes(pid)[0], cpu_seconds(pid), trio.current_time()
        await trio.sleep(IDLE_SECONDS)
        seconds, cpu_after = trio.current_time() - began_at, cpu_seconds(pid)
        nursery.cancel_scope.cancel()
    added = None if before is None or after is None else after - before
    return IdleFigures(
        sessions=count,
        session_bytes=None if added is None or count == opened_count else added / (count - opened_count),
        cpu_share=None if cpu_before is None or cpu_after is None else (cpu_after - cpu_before) / seconds,
        idle_seconds=seconds,
    )


async def _open_idle(target: Target, numbers: Sequence[int], nursery: trio.Nursery) -> None:
    """Open websockets, which the nursery keeps open."""
    slots = trio.CapacityLimiter(OPENING)

    async def open_one(number: int, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
            await opened.bind((f"127.0.1.{1 + number // PER_ADDRESS}", 0))
            await opened.connect((target.host, target.port))
            one = _WebSocket(trio.SocketStream(opened), target.authority)
            await one.open()
            task_status.started()
            await one.receive()

    async def start_one(number: int) -> None:
        async with slots:
            await nursery.start(open_one, number)

    async with trio.open_nursery() as starting:
        for number in numbers:
            starting.start_soon(start_one, number)
