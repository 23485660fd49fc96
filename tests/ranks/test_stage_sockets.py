"""Tests of hidden states that stages send over sockets, and of lost peers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from trioserve.ranks import stage_sockets
from trioserve.ranks.stage_sockets import StageSockets


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
