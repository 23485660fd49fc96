"""Tests of hidden states that stages send over sockets, of lost peers, and of unknown clients that also connect."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from trioserve.contracts.errors import StartupError
from trioserve.ranks import stage_sockets
from trioserve.ranks.stage_sockets import KEY_BYTES, StageListener, StageSockets, connect_stage


@pytest.fixture
def stages() -> Iterator[tuple[StageSockets, StageSockets]]:
    first, second = socket.socketpair()
    stages = StageSockets(None, first), StageSockets(second, None)
    yield stages
    for stage in stages:
        stage.close()


def test_hidden_states_of_any_size_reach_the_next_stage_in_order(stages: tuple[StageSockets, StageSockets]) -> None:
    rng = np.random.default_rng(0)
    steps = [rng.standard_normal((rows, 64), dtype=np.float32) for rows in (1, 9000, 3)]
    sent = [steps[0], None, *steps[1:], None]

    def send() -> None:
        for hidden in sent:
            stages[0].send(hidden)

    sender = threading.Thread(target=send)
    sender.start()
    for hidden in sent:
        found = stages[1].receive(0 if hidden is None else len(hidden), 64)
        assert (found is None) == (hidden is None)
        assert hidden is None or np.array_equal(hidden, found)  # type: ignore[arg-type]
    sender.join()


def test_stage_raises_an_error_if_a_neighbouring_stage_is_lost(
    stages: tuple[StageSockets, StageSockets], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_sockets, "LOST_SECONDS", 0.0)
    stages[0].close()
    with pytest.raises(ConnectionError, match="the rank of the previous stage is lost"):
        stages[1].receive(1, 64)
    stages[1].close()
    first, second = socket.socketpair()
    second.close()
    with pytest.raises(ConnectionError, match="the rank of the next stage is lost"):
        StageSockets(None, first).send(None)
    first.close()


@pytest.mark.parametrize("stranger", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(KEY_BYTES)], ids=["", "http", "key"])
def test_unknown_client_without_the_key_does_not_replace_the_neighbouring_stage(stranger: bytes) -> None:
    listener, key = StageListener(), secrets.token_bytes(KEY_BYTES)
    port = listener.port
    with socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(stranger)
        other.shutdown(socket.SHUT_WR)
        found: list[socket.socket] = []
        waiting = threading.Thread(target=lambda: found.append(listener.wait(key)))
        waiting.start()
        with connect_stage("127.0.0.1", port, key) as own:
            waiting.join()
            assert other.recv(1) == b""
            own.sendall(b"hidden")
            assert found[0].recv(6) == b"hidden"
            found[0].close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("count", [3, 3 * stage_sockets.STRANGERS_MAX])
def test_silent_unknown_clients_do_not_block_the_previous_stage(count: int) -> None:
    listener, key = StageListener(), secrets.token_bytes(KEY_BYTES)
    port = listener.port
    found: list[socket.socket] = []
    waiting = threading.Thread(target=lambda: found.append(listener.wait(key)))
    waiting.start()
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for stranger in strangers[::2]:
        with contextlib.suppress(OSError):
            stranger.sendall(key[:-1])
    with connect_stage("127.0.0.1", port, key) as own:
        waiting.join(timeout=30)
        own.sendall(b"hidden")
        assert found[0].recv(6) == b"hidden"
        found[0].close()
    for stranger in strangers:
        stranger.close()


def test_stage_raises_an_error_if_the_previous_stage_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_sockets, "MEETING_SECONDS_MAX", 0.01)
    with pytest.raises(StartupError, match=r"previous stage has not connected to port \d+ within 0\.01 s"):
        StageListener().wait(b"key")


def test_stage_raises_an_error_if_the_next_stage_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(StartupError, match=f"the next stage cannot be reached at 127.0.0.1:{port}"):
        connect_stage("127.0.0.1", port, b"key")
