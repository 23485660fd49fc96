"""Tests of the socket clients: responses are read to their end and checked, and a wrong one ends the measurement."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from trioserve.bench.router.fake_endpoint import FakeEndpoints, FakeEndpointSettings
from trioserve.bench.router.socket_load import (
    LoadFailed,
    Planned,
    Response,
    WireRequest,
    ask,
    at_a_time,
    at_moments,
    opened,
)

PATH = "/v1/completions"
BODY = {"model": "fake", "max_tokens": 3}
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: {}\n\r\n0\r\n\r\n"
REFUSED = b"HTTP/1.1 429 No\r\nX-Trioserve-Reason: queue_full\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
def start() -> Iterator[object]:
    """Function start(settings) that starts fake endpoints in a thread and returns their addresses."""
    stops = []

    def started(**settings: object) -> list[tuple[str, int]]:
        ours, theirs = socket.socketpair()
        endpoints = FakeEndpoints(FakeEndpointSettings(**settings))
        thread = threading.Thread(target=endpoints.serve, args=(theirs,))
        thread.start()
        stops.append((ours, theirs, endpoints, thread))
        return [("127.0.0.1", port) for port in endpoints.ports]

    yield started
    for ours, theirs, endpoints, thread in stops:
        ours.close()
        thread.join()
        theirs.close()
        endpoints.close()


@pytest.mark.parametrize("data", [WHOLE, CHUNKED, REFUSED])
def test_response_ends_with_its_last_byte_for_any_division(data):
    response = Response()
    assert [response.feed(data[index : index + 1]) for index in range(len(data))] == [False] * (len(data) - 1) + [True]


def test_refused_socket_request_has_its_reason():
    response = Response()
    response.feed(REFUSED)
    assert (response.reason, response.closes) == ("429 queue_full", True)


def test_response_without_a_length_is_refused():
    with pytest.raises(LoadFailed, match="no length"):
        Response().feed(b"HTTP/1.1 200 OK\r\n\r\n")


def test_every_socket_request_has_its_duration(start):
    [address] = start()
    with opened(address, 3) as connections:
        seconds = at_a_time(connections, WireRequest(PATH, BODY), requests=10)
    assert len(seconds) == 10
    assert all(each > 0 for each in seconds)


@pytest.mark.parametrize("at_once", [True, False])
def test_streamed_response_has_one_event_per_requested_token(start, at_once):
    [address] = start(event_seconds=0.001)
    body = {**BODY, "stream": True, "at_once": at_once}
    with opened(address, 2) as connections:
        assert len(at_a_time(connections, WireRequest(PATH, body, events=3), requests=4)) == 4
        with pytest.raises(LoadFailed, match="3 events, not 200 and 4"):
            at_a_time(connections, WireRequest(PATH, body, events=4), requests=1)


def test_wrong_status_ends_the_measurement(start):
    [address] = start()
    with opened(address, 1) as connections, pytest.raises(LoadFailed, match="status 404"):
        at_a_time(connections, WireRequest("/nothing", {}), requests=1)


def test_slots_limit_running_requests_and_metrics_count_waiting_ones(start):
    here, there = start(endpoints=2, slots_max=1, service_seconds=60.0)
    request = WireRequest(PATH, BODY)
    with opened(here, 4) as connections:
        for connection in connections[:3]:
            connection.sendall(request.data)
        page = ask(connections[3], WireRequest("/metrics")).body
        assert b"num_requests_running" in page
        while b'waiting{model_name="fake"} 2.0' not in page:  # This loop waits until all three requests have arrived.
            page = ask(connections[3], WireRequest("/metrics")).body
        assert b'running{model_name="fake"} 1.0' in page
        assert b'"depth_max":2' in ask(connections[3], WireRequest("/measured")).body
        connections[1].close()
        while b'waiting{model_name="fake"} 1.0' not in ask(connections[3], WireRequest("/metrics")).body:
            pass
    with opened(there, 1) as connections:
        assert b'"depth_max":0' in ask(connections[0], WireRequest("/measured")).body


def test_requests_are_sent_at_their_planned_times(start):
    [address] = start(slots_max=2, service_seconds=0.05)
    request = WireRequest(PATH, BODY)
    asked = at_moments(address, [Planned(0.02 * index, index, request) for index in (3, 0, 2, 1)])
    assert {each.key for each in asked} == {0, 1, 2, 3}
    assert all(each.outcome == "" and each.seconds >= 0.05 for each in asked)
    with opened(address, 1) as connections:
        assert b'"served":4' in ask(connections[0], WireRequest("/measured")).body
