"""Tests of the comparison of turns over HTTP and over a websocket, at the real front end with a scripted model."""

from __future__ import annotations

import os
from functools import partial

import pytest
import trio

from trioserve.bench.agents.transport import (
    Dialog,
    IdleFigures,
    TransportReport,
    WayFigures,
    WebSocketConversation,
    measured_idle,
    measured_ways,
    transport_text,
)
from trioserve.bench.runner import CannotMeasure
from trioserve.bench.server_settings import AgentBenchSettings
from trioserve.bench.settings import Target
from trioserve.testing.memory_server import open_memory_server

DIALOG = Dialog(turns=4, system_words=60, input_words=10, output_tokens=3)
TARGET = Target.from_url("http://memory")
ENGINE = {"served_model_name": ("scripted",), "max_model_len": 8_000, "block_count": 4_000}


async def test_a_websocket_sends_only_new_input(autojump_clock):
    async with open_memory_server(**ENGINE, max_num_batched_tokens=4_000) as server:

        async def open_stream():
            return server.connect()

        ways = await measured_ways(TARGET, open_stream, rounds=1, seconds_max=600.0, dialog=DIALOG)
        assert [(one.way, one.turns) for one in ways] == [("chat", 4), ("responses", 4), ("websocket", 4)]
        chat, responses, websocket = ways
        assert websocket.sent_bytes < responses.sent_bytes < chat.sent_bytes
        assert chat.sent_bytes > 250  # The system message alone has about 300 bytes.
        assert all(one.received_bytes > 64 for one in ways)
        assert all(one.cpu_ms is None for one in ways)
        await trio.testing.wait_all_tasks_blocked()
        assert list(server.engine.sessions) == []


async def test_refused_websocket_is_reported_in_one_sentence(autojump_clock):
    async with open_memory_server(api_keys=("secret",), **ENGINE) as server:

        async def open_stream():
            return server.connect()

        with pytest.raises(CannotMeasure, match="401"):
            await measured_ways(TARGET, open_stream, rounds=1, seconds_max=600.0)


async def test_several_refused_idle_websockets_give_one_reason():
    async def refuse(stream):
        async with stream:
            await stream.receive_some()
            await stream.send_all(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, refuse, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(CannotMeasure, match="refused a websocket: 503"):
            await measured_idle(Target.from_url(f"http://127.0.0.1:{port}"), os.getpid(), 3)
        nursery.cancel_scope.cancel()


class ScriptedSocket:
    """A websocket that answers each message with the next list of messages."""

    def __init__(self, *answers) -> None:
        self.sent = []
        self._answers = list(answers)
        self._rest = []

    async def send(self, text: str) -> None:
        self.sent.append(text)
        self._rest = list(self._answers.pop(0))

    async def receive(self) -> str:
        return self._rest.pop(0)


async def test_websocket_conversation_stops_at_an_error():
    socket = ScriptedSocket(['{"type": "error", "error": {"message": "not now"}}'])
    reply = await WebSocketConversation(socket, "m", "system", 10.0).ask("hello", 5)
    assert reply.failure == "error in the stream: not now"


async def test_websocket_conversation_continues_its_last_response():
    usage = '{"input_tokens": 9, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 4}}'

    def answer(name):
        response = f'{{"id": "{name}", "status": "completed", "usage": {usage}}}'
        return [
            '{"type": "response.output_text.delta", "delta": "hi"}',
            f'{{"type": "response.completed", "response": {response}}}',
        ]

    socket = ScriptedSocket(answer("r1"), answer("r2"))
    conversation = WebSocketConversation(socket, "m", "system", 10.0)
    replies = [await conversation.ask(text, 5) for text in ("one", "two")]
    assert [(reply.text, reply.prompt_tokens, reply.cached_tokens) for reply in replies] == [("hi", 9, 4)] * 2
    assert "system" in socket.sent[0]
    assert "system" not in socket.sent[1]
    assert '"previous_response_id":"r1"' in socket.sent[1]


def test_text_names_bytes_times_and_idle_cost():
    way = WayFigures(
        way="chat", turns=42, turn_ms=3.25, ttft_ms=1.5, sent_bytes=12_345.6, received_bytes=99.0, cpu_ms=None
    )
    idle = IdleFigures(sessions=5_000, session_bytes=20_480.0, cpu_share=0.012, idle_seconds=30.0)
    settings = AgentBenchSettings(mode="turns")
    text = transport_text(TransportReport(settings=settings, ways=[way], idle=idle))
    assert "| chat | 42 | 12,346 | 99 |  | 3.25 | 1.50 |" in text
    assert "5000 idle websockets: memory of each 20.0 KiB; CPU time 1.2% of a core." in text
