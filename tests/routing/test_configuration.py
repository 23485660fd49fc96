"""What cannot be routed is said in a sentence before anything is served."""

from __future__ import annotations

import argparse
from importlib.metadata import EntryPoint

import pytest
import trio

from trioserve import route
from trioserve.config import RouteConfig, add_arguments, config_from
from trioserve.contracts.errors import StartupError
from trioserve.route import serve_router
from trioserve.router.policies import RoundRobin

ENDPOINT = ["--endpoint", "http://127.0.0.1:9"]


async def refused(*flags: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser, RouteConfig)
    sender, orders = trio.open_memory_channel[object](1)
    with sender, pytest.raises(StartupError) as refusal:
        await serve_router(config_from(parser.parse_args(["--port", "0", *flags]), {}, kind=RouteConfig), orders)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["no endpoint", "--endpoint"]),
        ([*ENDPOINT, "--policy", "random"], ['"random"', "least_loaded"]),
        ([*ENDPOINT, "--policy", "kv_aware"], ["kv_aware", "--tokenizer MODEL", "--kv-events"]),
        ([*ENDPOINT, "--policy", "kv_aware", "--tokenizer", "/nowhere"], ["/nowhere", "not found"]),
        ([*ENDPOINT, "--tokenizer", "smollm2"], ["least_loaded", "leave --tokenizer out"]),
        ([*ENDPOINT, *ENDPOINT], ["2 endpoints", "127.0.0.1:9"]),
        (["--endpoint", "a=http://127.0.0.1:9", "a=http://127.0.0.1:8"], ['"a"']),
        (["--endpoint", "127.0.0.1:9"], ["127.0.0.1:9", "no URL"]),
        (["--endpoint", "ftp://host"], ["ftp://host", "http://"]),
        (["--endpoint", "http://host:99999"], ["99999"]),
        ([*ENDPOINT, "--endpoint-max-requests", "0"], ["--endpoint-max-requests", "'0'"]),
        ([*ENDPOINT, "--max-queue-wait", "0"], ["--max-queue-wait", "'0'"]),
        ([*ENDPOINT, "--lease-until", "end", "--model-alias", "x"], ["--model-alias", "NAME=MODEL"]),
        (["--endpoints-file", "/nowhere.toml"], ["/nowhere.toml"]),
        (["--endpoints-dns", "name:port"], ["--endpoints-dns", "NAME:PORT"]),
        (["--endpoints-kubernetes", "llm"], ["no pod"]),
        ([*ENDPOINT, "--endpoint-ca-certs", "/nowhere.pem"], ["/nowhere.pem"]),
    ],
)
async def test_bad_configuration_stops_the_start_with_a_sentence(flags, words, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    sentence = await refused(*flags)
    for word in words:
        assert word in sentence


async def test_a_policy_of_ones_own_is_found_by_its_entry_point(monkeypatch):
    entry = EntryPoint(name="mine", value="trioserve.router.policies:RoundRobin", group="trioserve.policies")
    monkeypatch.setattr(route, "entry_points", lambda group: [entry] if group == "trioserve.policies" else [])
    assert route._policy("mine") is RoundRobin
