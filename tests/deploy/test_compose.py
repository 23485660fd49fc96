"""Tests of deploy/compose.yaml: it matches the server's options, ports and paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from trioserve import cli
from trioserve.config import Config, config_from
from trioserve.options.option import options_of
from trioserve.options.router import RouterOptions

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text()
PORT = int(re.search(r"^EXPOSE (\d+)$", CONTAINERFILE, re.MULTILINE)[1])
SUPERVISOR_SECONDS = 5  # This time exceeds --drain-timeout, as docs/guides/operations.md requires.


def config_of(name: str) -> Any:
    parsed = cli._parser()[0].parse_args(SERVICES[name]["command"])
    return config_from(parsed, {}, kind=RouterOptions if parsed.command == "route" else Config)


def test_router_has_all_engines_as_endpoints():
    endpoints = [urlsplit(text.partition("=")[2]) for text in config_of("router").endpoint]
    engines = {name for name, service in SERVICES.items() if service["command"][0] == "serve"}
    assert len(engines) == 2
    assert {endpoint.hostname for endpoint in endpoints} == engines
    assert {endpoint.port for endpoint in endpoints} == {PORT}


@pytest.mark.parametrize("name", SERVICES)
def test_compose_service_has_time_to_stop_and_few_rights(name):
    service = SERVICES[name]
    assert int(service["stop_grace_period"].removesuffix("s")) >= config_of(name).drain_timeout + SUPERVISOR_SECONDS
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    build = service["build"]
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).samefile(ROOT / "deploy" / "Containerfile")


def test_only_the_router_is_reachable_and_only_from_this_machine():
    assert {name: service.get("ports") for name, service in SERVICES.items()} == {
        "router": [f"127.0.0.1:8000:{PORT}"],
        "engine-a": None,
        "engine-b": None,
    }


def test_models_are_stored_in_the_volume_of_the_image():
    volume = re.search(r"^VOLUME (\S+)$", CONTAINERFILE, re.MULTILINE)[1]
    for name in ("engine-a", "engine-b"):
        [mount] = SERVICES[name]["volumes"]
        source, _, target = mount.partition(":")
        assert (source in COMPOSE["volumes"], target) == (True, volume)


def test_every_variable_of_the_compose_file_is_an_option_of_the_program():
    names = SERVICES["router"]["environment"]
    assert {name.removeprefix("TRIOSERVE_").lower() for name in names} <= options_of(RouterOptions).keys()
