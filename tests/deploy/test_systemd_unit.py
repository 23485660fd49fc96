"""Tests of deploy/trioserve.service: it matches the server, and systemd accepts it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from trioserve import cli
from trioserve.config import Config, config_from
from trioserve.model.loading.default_model import models_folder
from trioserve_kernels import build

UNIT = Path(__file__).parents[2] / "deploy" / "trioserve.service"
SUPERVISOR_SECONDS = 5  # This time exceeds --drain-timeout, as docs/guides/operations.md requires.
# Limit in tenths for the exposure that systemd-analyze computes, from 0 to 10. Below 5, it prints "OK".
EXPOSURE_MAX = 25
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")


def settings() -> dict[str, list[str]]:
    """Return the values of each setting of the unit in order."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in settings()["Environment"] for pair in shlex.split(line))


def config() -> Config:
    [command] = settings()["ExecStart"]
    program, *arguments = shlex.split(command)
    assert PurePosixPath(program).name == "trioserve"
    return config_from(cli._parser()[0].parse_args(arguments), environment(), kind=Config)


def test_unit_stops_with_sigterm_and_waits_for_the_drain():
    assert settings()["KillSignal"] == ["SIGTERM"]
    assert settings()["KillMode"] == ["mixed"]  # A second SIGTERM would end the drain early.
    assert int(settings()["TimeoutStopSec"][0]) >= config().drain_timeout + SUPERVISOR_SECONDS


def test_unit_writes_files_only_in_the_cache_directory(monkeypatch: pytest.MonkeyPatch):
    folder = PurePosixPath("/var/cache") / settings()["CacheDirectory"][0]
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
        if name != "XDG_CACHE_HOME":
            assert PurePosixPath(value).is_relative_to(folder), name
    assert models_folder().is_relative_to(folder)
    assert build._cache_folder().is_relative_to(folder)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Return the unit with the path of an existing program, because systemd checks that the program exists."""
    path = tmp_path / UNIT.name
    path.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.MULTILINE))
    return path


@pytest.mark.slow
@needs_systemd
def test_systemd_accepts_the_unit(unit: Path):
    ran = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    complaints = [line for line in ran.stderr.splitlines() if unit.name in line]
    assert complaints == []


@pytest.mark.slow
@needs_systemd
def test_systemd_rates_the_exposure_low(unit: Path):
    words = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", unit]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if "unrecognized option" in ran.stderr:
        pytest.skip("this systemd-analyze knows no --offline")
    assert ran.returncode == 0, ran.stdout + ran.stderr
