"""Tests how --kv-transfer-config and --role set the connector and role of an engine, and refused combinations."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from trioserve.config import make_config
from trioserve.connectors import settings as connector_module
from trioserve.connectors.settings import connector_settings, find_connector
from trioserve.contracts.errors import StartupError

NO_CONNECTOR = "trioserve.testing.scripted_connector:NoConnector"


def settings_of(role: str = "both", **fields: object):
    return connector_settings(json.dumps(fields), role)


def test_engine_has_no_connector_by_default():
    assert connector_settings(None, "both") is None
    assert settings_of(kv_connector="none") is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_role_without_connector_selects_tcp(role):
    settings = connector_settings(None, role)
    assert (settings.connector, settings.role, settings.shown_role) == ("tcp", role, role)
    assert settings.options == {}


@pytest.mark.parametrize(
    ("given", "role"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")]
)
def test_kv_roles_of_vllm_are_accepted(given, role):
    assert settings_of(kv_connector="tcp", kv_role=given).role == role


def test_kv_transfer_configuration_for_vllm_is_accepted():
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


def test_kv_transfer_configuration_can_be_an_object_or_json():
    assert connector_settings({"kv_connector": "tcp"}, "decode").role == "decode"


def test_connector_within_one_engine_shows_no_role():
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
def test_invalid_kv_transfer_configuration_is_refused_before_a_model_is_loaded(role, given, says):
    with pytest.raises(StartupError, match=says):
        connector_settings(given, role)
    with pytest.raises(StartupError, match=says):
        make_config(kv_transfer_config=given, role=role)


def test_unknown_connector_is_refused_with_a_list_of_connectors():
    with pytest.raises(StartupError, match='no connector "carrier-pigeon"; there are: none, host, loopback, nixl, tcp'):
        find_connector("carrier-pigeon")


def test_entry_points_match_the_connectors_of_the_source_tree():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["trioserve.connectors"] == connector_module.OWN_CONNECTORS


def test_connector_of_another_package_is_found_by_its_entry_point(monkeypatch):
    entry = EntryPoint(name="mine", value=NO_CONNECTOR, group="trioserve.connectors")
    monkeypatch.setattr(
        connector_module, "entry_points", lambda group: [entry] if group == "trioserve.connectors" else []
    )
    assert find_connector("mine").__name__ == "NoConnector"


def test_entry_point_does_not_replace_an_included_connector(monkeypatch):
    entry = EntryPoint(name="tcp", value=NO_CONNECTOR, group="trioserve.connectors")
    monkeypatch.setattr(connector_module, "entry_points", lambda group: [entry])
    monkeypatch.setattr(connector_module, "OWN_CONNECTORS", {"tcp": "trioserve.connectors.settings:find_connector"})
    assert find_connector("tcp") is find_connector


@pytest.mark.parametrize(
    ("name", "place", "says"),
    [
        ("nixl", "no_such_package_of_ours:make", r"pip install .*\[nixl\]'"),
        ("mine", "no_such_package_of_ours:make", "cannot be imported"),
        ("mine", "trioserve.testing.scripted_connector:make_nothing", "which does not exist"),
    ],
)
def test_connector_that_cannot_be_imported_is_refused_with_advice(monkeypatch, name, place, says):
    monkeypatch.setattr(connector_module, "OWN_CONNECTORS", {name: place})
    with pytest.raises(StartupError, match=says):
        find_connector(name)
