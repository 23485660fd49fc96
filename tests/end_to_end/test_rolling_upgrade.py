"""Tests a rolling upgrade: servers are stopped one after the other, and their long streams move to the other server.

Each stream must have the same text as without an upgrade.
"""

from __future__ import annotations

import json
import signal
import urllib.request

import pytest

from .test_router import Asker, get, wait_until

PROMPTS = [f"Story number {index}:" for index in range(4)]
TOKENS = 120


def text_of(asker) -> str:
    assert asker.is_done, (asker.error, asker.events[-1:])
    assert not any("error" in event for event in asker.events)
    return "".join(choice["text"] for event in asker.events for choice in event["choices"])


def endpoints_of(router) -> dict[str, dict]:
    return {each["id"]: each for each in get(f"{router.url}/endpoints")["data"]}


def json_request(url: str, fields: dict[str, str]) -> urllib.request.Request:
    # The server refuses operations with a content type that web forms can send.
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(url, json.dumps(fields).encode(), headers, method="POST")


def moves_of(router) -> float:
    with urllib.request.urlopen(f"{router.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("trioserve_router:stream_moves_total"))


def streams_of(url: str) -> list[Asker]:
    askers = [Asker(url, prompt, TOKENS) for prompt in PROMPTS]
    wait_until(lambda: all(len(asker.events) > 5 for asker in askers))
    return askers


def texts_at_end(askers: list[Asker]) -> list[str]:
    for asker in askers:
        asker.join(120)
        assert not asker.is_alive(), "a client hangs"
    return [text_of(asker) for asker in askers]


@pytest.fixture
def fleet(start_server):
    """Give two servers, by endpoint id, and the router before them."""
    options = ("--max-num-seqs", "8", "--threads", "1", "--dtype", "float32", "--drain-timeout", "60")
    servers = {id: start_server(*options) for id in "ab"}
    endpoints = [f"--endpoint={id}={server.url}" for id, server in servers.items()]
    router = start_server(*endpoints, "--health-interval=0.5", "--load-interval=0.2", command="route")
    wait_until(lambda: all(each["health"] == "healthy" for each in endpoints_of(router).values()))
    return servers, router


@pytest.mark.slow
def test_streams_keep_their_text_while_both_servers_are_stopped_in_turn(fleet):
    servers, router = fleet
    undisturbed = texts_at_end(streams_of(router.url))

    askers = streams_of(router.url)
    assert {asker.endpoint for asker in askers} == {"a", "b"}
    with urllib.request.urlopen(
        json_request(f"{router.url}/endpoints/a/drain?move=true&seconds=60", {}), timeout=30
    ) as response:
        assert json.load(response)["moving"] is True
    wait_until(lambda: list(endpoints_of(router)) == ["b"])
    assert any(asker.is_alive() for asker in askers), "the endpoint was emptied, and not waited for"
    assert texts_at_end(askers) == undisturbed
    moved = moves_of(router)
    assert moved >= 1

    spec = {"id": "a", "url": servers["a"].url}
    with urllib.request.urlopen(json_request(f"{router.url}/endpoints", spec), timeout=30) as response:
        assert response.status == 201
    wait_until(lambda: endpoints_of(router)["a"]["health"] == "healthy")
    askers = streams_of(router.url)
    wait_until(lambda: all(each["in_flight"] > 0 for each in endpoints_of(router).values()))
    servers["b"].process.send_signal(signal.SIGTERM)
    assert servers["b"].process.wait(30) == 0
    assert any(asker.is_alive() for asker in askers), "the server went with its streams gone, not ended"
    assert texts_at_end(askers) == undisturbed
    assert moves_of(router) > moved
    wait_until(lambda: servers["a"].metric('trioserve:kv_blocks{state="used"}') == 0)
    assert router.stop() == 0
