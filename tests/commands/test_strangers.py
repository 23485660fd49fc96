"""Tests of server options that decide what callers without a key may do."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.commands.serving import access_rules, announce_serving, check_front, strangers_warning
from trioserve.config import Config, make_config
from trioserve.contracts.errors import StartupError
from trioserve.options.router import RouterOptions

OTHERS_REACH = ("0.0.0.0", "::", "10.0.0.7", "gpubox", "[::]")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_server_on_loopback_allows_operator_requests_without_a_key(host):
    config = make_config(host=host)
    assert access_rules(config).operates_without_key
    assert strangers_warning(config) is None


@pytest.mark.parametrize("host", OTHERS_REACH)
def test_public_server_refuses_operator_requests_without_a_key_by_default(host):
    config = make_config(host=host)
    assert not access_rules(config).operates_without_key
    warning = strangers_warning(config)
    assert warning is not None
    assert "--api-key" in warning
    assert "is off (--allow-operator-without-key)" in warning
    allowed = make_config(host=host, allow_operator_without_key=True)
    assert access_rules(allowed).operates_without_key
    assert "load weights" in str(strangers_warning(allowed))


@pytest.mark.parametrize("keys", [{"api_key": ("a",)}, {"gateway_api_key": ("a",)}, {"uds": "/run/x"}])
def test_server_start_does_not_warn_if_keys_or_file_permissions_exclude_strangers(keys: dict[str, Any]):
    assert strangers_warning(make_config(host="0.0.0.0", **keys)) is None


def test_server_accepts_loopback_and_configured_names_as_host(monkeypatch):
    assert access_rules(make_config()).host_names == ()
    assert not access_rules(make_config()).has_network_names
    monkeypatch.setattr("socket.gethostname", lambda: "Box7.lab.example")
    rules = access_rules(make_config(host="GPUbox", allowed_host=("LLM.example.org",)))
    assert rules.host_names == ("gpubox", "box7.lab.example", "llm.example.org")
    assert rules.has_network_names, "the host name, and the names that containers and Services use"
    assert access_rules(make_config(uds="/run/x")).host_names is None
    with pytest.raises(StartupError, match="--allowed-host is 'http://x'"):
        check_front(make_config(allowed_host=("http://x",)))


@pytest.mark.parametrize("kind", [Config, RouterOptions])
def test_warning_about_strangers_follows_the_announced_address(kind, capsys):
    for host, is_told in (("0.0.0.0", True), ("127.0.0.1", False)):
        announce_serving("x", [f"http://{host}:8000"], kind(host=host))
        told = capsys.readouterr().err
        assert ("warning: there is no --api-key, and other machines may reach" in told) is is_told
