"""Which connector an engine gets: what --kv-transfer-config and --role say together, and what they cannot say."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from trioserve.config import make_config
from trioserve.connectors import registry
from trioserve.connectors.registry import find_connector
from trioserve.connectors.settings import connector_settings
from trioserve.contracts.errors import StartupError


def settings_of(role: str = "both", **fields: object):
    return connector_settings(json.dumps(fields), role)


def test_without_a_word_there_is_no_connector():
    assert connector_settings(None, "both") is None
    assert settings_of(kv_connector="none") is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_alone_takes_tcp(role):
    settings = connector_settings(None, role)
    assert (settings.connector, settings.role, settings.shown_role) == ("tcp", role, role)
    assert settings.options == {}


@pytest.mark.parametrize(
    ("given", "role"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")]
)
def test_the_roles_of_vllm_are_understood(given, role):
    assert settings_of(kv_connector="tcp", kv_role=given).role == role


def test_a_configuration_made_for_vllm_is_understood():
    settings = settings_of(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        kv_buffer_device="cuda",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"backends": ["UCX"]},
    )
    assert (settings.connector, settings.load_failure_policy) == ("nixl", "fail")
    assert settings.options == {"backends": ["UCX"]}
    assert settings.ignored == ("kv_buffer_device",)


def test_an_object_will_do_as_well_as_its_json():
    assert connector_settings({"kv_connector": "tcp"}, "decode").role == "decode"


def test_a_connector_that_stays_at_home_has_no_role_to_show():
    assert settings_of(kv_connector="host").shown_role is None
    assert settings_of(kv_connector="mine").shown_role == "both"


@pytest.mark.parametrize(
    ("role", "given", "says"),
    [
        ("both", "{", "is no JSON"),
        ("both", "[]", "must be an object"),
        ("both", "{}", 'has no "kv_connector"'),
        ("both", {"kv_connector": 7}, 'has no "kv_connector"'),
        ("both", {"kv_connector": "tcp", "kv_role": "both"}, "kv_producer, kv_consumer, kv_both"),
        ("decode", {"kv_connector": "tcp", "kv_role": "kv_producer"}, "leave one of them out"),
        ("decode", {"kv_connector": "none"}, "take tcp or nixl"),
        ("prefill", {"kv_connector": "host"}, "take tcp or nixl"),
        ("both", {"kv_connector": "tcp", "kv_load_failure_policy": "retry"}, "recompute, fail"),
        ("both", {"kv_connector": "tcp", "kv_connector_extra_config": [1]}, "must be an object"),
        ("both", {"kv_connector": "none", "kv_connector_extra_config": {"port": 1}}, "takes no options"),
        ("both", {"kv_connector": "tcp", "kv_roles": "kv_both"}, "'kv_roles', which is no key"),
        ("both", {"kv_connector": "tcp", "kv_connector_module_path": "a.b"}, "entry point"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence_before_a_model_is_loaded(role, given, says):
    with pytest.raises(StartupError, match=says):
        connector_settings(given, role)
    with pytest.raises(StartupError, match=says):
        make_config(kv_transfer_config=given, role=role)


def test_a_name_that_nobody_registered_is_refused_with_those_that_are_there():
    with pytest.raises(StartupError, match='no connector "carrier-pigeon"; there are: none, host, loopback, nixl, tcp'):
        find_connector("carrier-pigeon")


def test_an_installation_registers_what_a_source_tree_has():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["trioserve.connectors"] == registry.OWN_CONNECTORS


def test_a_connector_of_ones_own_is_an_entry_point(monkeypatch):
    entry = EntryPoint(name="mine", value="trioserve.connectors.none:NoConnector", group="trioserve.connectors")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "trioserve.connectors" else [])
    assert find_connector("mine").__name__ == "NoConnector"


def test_an_entry_point_does_not_take_the_place_of_an_own_one(monkeypatch):
    entry = EntryPoint(name="tcp", value="trioserve.connectors.none:NoConnector", group="trioserve.connectors")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    monkeypatch.setattr(registry, "OWN_CONNECTORS", {"tcp": "trioserve.connectors.registry:find_connector"})
    assert find_connector("tcp") is find_connector


@pytest.mark.parametrize(
    ("name", "place", "says"),
    [
        ("nixl", "no_such_package_of_ours:make", r"pip install 'trioserve\[nixl\]'"),
        ("mine", "no_such_package_of_ours:make", "cannot be imported"),
        ("mine", "trioserve.connectors.none:make_nothing", "which does not exist"),
    ],
)
def test_a_connector_that_cannot_be_imported_says_what_to_do(monkeypatch, name, place, says):
    monkeypatch.setattr(registry, "OWN_CONNECTORS", {name: place})
    with pytest.raises(StartupError, match=says):
        find_connector(name)
