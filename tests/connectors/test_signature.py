"""Tests of the keys with which engines sign the location of held KV."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from trioserve.connectors.settings import StreamOptions
from trioserve.connectors.stream.signature import is_signed, machine_key, signed, signing_key
from trioserve.contracts.request import KVTransferParams

PLACE = KVTransferParams(
    do_remote_prefill=True, remote_engine_id="e", remote_request_id="r", remote_host="127.0.0.1", remote_port=7
)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("TRIOSERVE_KV_KEY_DIRECTORY")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trioserve" / "kv-key"


def test_engines_of_one_user_on_one_machine_share_a_private_key(place):
    first = machine_key()
    assert len(first) == 32
    assert machine_key() == first
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert os.listdir(place.parent) == ["kv-key"], "no temporary file is left"
    assert is_signed(signed(PLACE, signing_key(StreamOptions())), signing_key(StreamOptions()))


def test_directory_of_the_kv_key_can_be_chosen(place, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIOSERVE_KV_KEY_DIRECTORY", str(tmp_path / "chosen"))
    assert machine_key() == machine_key() == (tmp_path / "chosen" / "kv-key").read_bytes()
    assert not place.exists()


def test_tests_write_no_kv_key_into_the_users_cache():
    directory = Path(os.environ["TRIOSERVE_KV_KEY_DIRECTORY"])
    machine_key()
    assert (directory / "kv-key").exists()
    assert Path.home() not in directory.parents


def test_configured_key_overrides_the_key_of_the_machine(place):
    one, other = (signing_key(StreamOptions(key=letter * 16)) for letter in "ab")
    assert not place.exists()
    assert is_signed(signed(PLACE, one), signing_key(StreamOptions(key="a" * 16)))
    assert not is_signed(signed(PLACE, one), other)


@pytest.mark.parametrize("wrong", ["mode", "short", "long", "link", "directory", "pipe"])
def test_key_file_that_others_can_write_is_refused(place, wrong, caplog):
    place.parent.mkdir()
    if wrong == "directory":
        place.mkdir()
    elif wrong == "pipe":
        os.mkfifo(place, 0o600)
    else:
        target = place.with_name("elsewhere") if wrong == "link" else place
        target.write_bytes(bytes({"short": 31, "long": 33}.get(wrong, 32)))
        target.chmod(0o644 if wrong == "mode" else 0o600)
        if wrong == "link":
            place.symlink_to(target)
    keys = {machine_key(), machine_key()}
    assert len(keys) == 2
    assert bytes(32) not in keys
    assert "give all engines a key or key_file" in caplog.text


def test_engine_without_a_writable_directory_has_its_own_key(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    assert len(machine_key({"XDG_CACHE_HOME": str(tmp_path / "file")})) == 32
    assert "kv of other engines is not read" in caplog.text
