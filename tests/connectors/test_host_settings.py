"""Tests the options of the host connector, and the messages about invalid options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trioserve.connectors.host.block_files import BlockFiles
from trioserve.connectors.host.policy import HostSettings, host_settings_from
from trioserve.contracts.errors import StartupError
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT


@pytest.mark.parametrize(
    ("options", "expect"),
    [
        ({"memory_bytes": 5000}, HostSettings(memory_bytes=5000)),
        ({"memory_gib": 0.5}, HostSettings(memory_bytes=2**29)),
        ({"memory_gib": 2}, HostSettings(memory_bytes=2**31)),
        (
            {"memory_gib": 1, "directory": "/kv", "directory_gib": 10},
            HostSettings(memory_bytes=2**30, directory=Path("/kv"), directory_bytes=10 * 2**30),
        ),
        (
            {"memory_bytes": 5000, "directory": "kv", "directory_bytes": 6000},
            HostSettings(memory_bytes=5000, directory=Path("kv"), directory_bytes=6000),
        ),
    ],
)
def test_limits_of_the_host_connector_are_bytes_or_gib(options, expect):
    assert host_settings_from(options, SMALL_LAYOUT) == expect


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "give memory_gib or memory_bytes"),
        ({"memory_gib": 1, "memory_bytes": 5000}, "got memory_gib and memory_bytes: give one of them"),
        ({"memory_gib": 0}, "memory_gib of the host connector is 0: it must be a number above 0"),
        ({"memory_bytes": -1}, "memory_bytes of the host connector is -1"),
        ({"memory_gib": "8"}, "memory_gib of the host connector is '8'"),
        ({"memory_gib": True}, "memory_gib of the host connector is True"),
        ({"memory_gib": float("nan")}, "is nan"),
        ({"memory_gib": float("inf")}, "is inf"),
        ({"memory_bytes": 127}, "may use 127 bytes of memory, and one block of small needs 128"),
        ({"memory_gib": 1, "directory": "/kv"}, "give directory_gib or directory_bytes"),
        ({"memory_gib": 1, "directory_gib": 1}, "got a limit for a directory, but no directory"),
        ({"memory_gib": 1, "directory": 3, "directory_gib": 1}, "directory of the host connector is 3"),
        ({"memory_gib": 1, "directory": "", "directory_gib": 1}, "directory of the host connector is ''"),
        ({"memory_gib": 1, "directory": "a\0b", "directory_gib": 1}, "give the path of a directory"),
        ({"memory_gib": 1, "directory": "/kv", "directory_bytes": 200}, "may use 200 bytes of directory"),
        ({"memory_gib": 1, "memory_mib": 1}, "has no option 'memory_mib': it has memory_gib, memory_bytes"),
    ],
)
def test_invalid_options_are_refused_with_a_sentence(options, sentence):
    with pytest.raises(StartupError, match=re.escape(sentence)):
        host_settings_from(options, SMALL_LAYOUT)


def test_directory_limit_must_allow_one_block(tmp_path):
    needed = 0
    with pytest.raises(StartupError) as refused:
        host_settings_from({"memory_gib": 1, "directory": "/kv", "directory_bytes": 1}, SMALL_LAYOUT)
    needed = int(str(refused.value).rsplit(" ", 1)[-1])
    assert BlockFiles(tmp_path, SMALL_LAYOUT).file_bytes <= needed
