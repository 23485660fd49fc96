"""Tests that the measurement of the front end counts the events of its clients. They do not check costs."""

from __future__ import annotations

import argparse
import json
import socket
import threading

import pytest

from trioserve.bench.inside import frontend_cost, frontend_load
from trioserve.bench.inside.frontend_load import ACK, DATA, END_STREAM, PING, SETTINGS


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 1, 2), (2, 1, 1)])
def test_event_of_a_stream_has_a_measured_cost(shape):
    cost = frontend_cost.event_cost(*shape, tokens=(2, 6), rounds=1)
    assert (cost.connection_count, cost.stream_count, cost.http) == shape
    assert cost.engine_us != 0
    assert cost.response_us != 0


@pytest.mark.slow
def test_every_front_end_cost_is_in_the_table_and_in_the_json(capsys, monkeypatch):
    monkeypatch.setattr(frontend_cost, "SHAPES", ((1, 2, 2),))
    monkeypatch.setattr(frontend_cost, "TOKENS", (1, 3))
    monkeypatch.setattr(frontend_cost, "SMALL_REQUESTS", 64)
    monkeypatch.setattr(frontend_cost, "prepare_interpreter", lambda: None)
    assert frontend_cost.run(argparse.Namespace(rounds=1)) == 0
    *table, line = capsys.readouterr().out.splitlines()
    costs = json.loads(line)["costs"]
    assert [cost["what"] for cost in costs] == ["event", "small request", "small request"]
    assert len(table) == len(costs) + 1


def test_the_http2_client_answers_a_ping():
    answers: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(10)
        with connection:
            connection.sendall(
                frontend_load._frame(SETTINGS, 0, 0, b"") + frontend_load._frame(PING, 0, 0, b"12345678")
            )
            received = b""
            while (ping := frontend_load._frame(PING, ACK, 0, b"12345678")) not in received:
                received += connection.recv(65_536) or pytest.fail("the client left")
            answers.append(ping)
            connection.sendall(frontend_load._frame(DATA, END_STREAM, 1, b"data: {}\n\n"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        assert frontend_load._http2(listener.getsockname()[1], 1, b"{}", 1) == 1
        server.join()
    assert len(answers) == 1
