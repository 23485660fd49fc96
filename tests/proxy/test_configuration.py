"""Tests the configuration of a router. An invalid configuration is refused with one sentence before the router accepts
requests.
"""

from __future__ import annotations

import argparse
from importlib.metadata import EntryPoint

import pytest
import trio

from trioserve.commands import route
from trioserve.commands.route import serve_router
from trioserve.config import add_arguments, config_from
from trioserve.contracts.errors import StartupError
from trioserve.options.router import RouterOptions
from trioserve.proxy.discovery.source import read_endpoints
from trioserve.router.policies import RoundRobin

ENDPOINT = ["--endpoint", "http://127.0.0.1:9"]


async def refused(*flags: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser, RouterOptions)
    sender, orders = trio.open_memory_channel[object](1)
    with sender, pytest.raises(StartupError) as refusal:
        await serve_router(config_from(parser.parse_args(["--port", "0", *flags]), {}, kind=RouterOptions), orders)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["no endpoint", "--endpoint"]),
        ([*ENDPOINT, "--policy", "random"], ['"random"', "least_loaded"]),
        ([*ENDPOINT, "--policy", "kv_aware"], ["kv_aware", "--tokenizer MODEL", "--kv-events"]),
        ([*ENDPOINT, "--policy", "kv_aware", "--tokenizer", "/nowhere"], ["/nowhere", "not found"]),
        ([*ENDPOINT, "--tokenizer", "smollm2"], ["least_loaded", "remove --tokenizer"]),
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
        (["--endpoints-kubernetes", "llm"], ["need a pod"]),
        ([*ENDPOINT, "--endpoint-ca-certs", "/nowhere.pem"], ["/nowhere.pem"]),
    ],
)
async def test_invalid_configuration_is_refused_with_one_sentence(flags, words, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    sentence = await refused(*flags)
    for word in words:
        assert word in sentence


async def test_policy_of_another_package_is_found_by_its_entry_point(monkeypatch):
    entry = EntryPoint(name="mine", value="trioserve.router.policies:RoundRobin", group="trioserve.policies")
    monkeypatch.setattr(route, "entry_points", lambda group: [entry] if group == "trioserve.policies" else [])
    assert route._policy("mine") is RoundRobin


def configured(*flags: str) -> RouterOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser, RouterOptions)
    return config_from(parser.parse_args(list(flags)), {}, kind=RouterOptions)


async def test_flags_set_the_roles_of_endpoints():
    config = configured(
        *("--endpoint", "w=http://127.0.0.1:1"),
        *("--prefill-endpoint", "p=http://127.0.0.1:2", "http://127.0.0.1:3"),
        *("--decode-endpoint", "d=http://127.0.0.1:4"),
    )
    routing = route.Routing(config)
    async with routing.running():
        roles = {id: state.role for id, state in routing.dispatch.core.endpoints.items()}
    assert roles == {"w": None, "p": "prefill", "http://127.0.0.1:3": "prefill", "d": "decode"}


async def test_router_watches_its_endpoints_file(tmp_path):
    file = tmp_path / "endpoints.toml"
    file.write_text('[[endpoints]]\nid = "a"\nurl = "http://127.0.0.1:1"\n')
    routing = route.Routing(configured("--endpoints-file", str(file)))
    with trio.fail_after(60):
        async with routing.running():
            while not list(routing.dispatch.core.endpoints):
                await trio.lowlevel.checkpoint()
            assert [id for id, _ in routing.dispatch.core.endpoints.items()] == ["a"]


async def test_flag_sets_the_prompt_length_from_which_requests_are_disaggregated():
    routing = route.Routing(configured(*ENDPOINT, "--split-min-tokens", "500"))
    assert routing.app()._services.rules.disaggregated_prompt_tokens_min == 500


async def test_flag_limits_the_state_that_the_router_keeps_for_a_stream():
    routing = route.Routing(configured(*ENDPOINT, "--max-continuation-bytes", "5000"))
    assert routing.app()._services.rules.continuation_bytes_max == 5000


def test_endpoints_file_can_set_roles(tmp_path):
    file = tmp_path / "endpoints.toml"
    file.write_text('[[endpoints]]\nurl = "http://a"\nrole = "prefill"\n[[endpoints]]\nurl = "http://b"\n')
    assert [spec.role for spec in read_endpoints(file)] == ["prefill", None]
    file.write_text('[[endpoints]]\nurl = "http://a"\nrole = "boss"\n')
    with pytest.raises(StartupError, match="boss"):
        read_endpoints(file)
