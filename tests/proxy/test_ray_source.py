"""Tests the source of endpoints that asks Ray. The process that asks Ray is replaced by a process that writes the lines
of the test.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.dispatch import Dispatch
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command
from trioserve.proxy.discovery.ray import FIRST_SECONDS_MAX, RaySource, check_ray_is_installed
from trioserve.proxy.fleet import EndpointSpec, Fleet
from trioserve.router.policies import POLICIES
from trioserve.router.settings import RouterSettings

A, B, C = "http://10.0.0.1:4001", "http://10.0.0.2:4002", "http://10.0.0.1:4003"


def template(url: str) -> EndpointSpec:
    return EndpointSpec(url=url, api_key="secret")


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(Dispatch(RouterSettings(), POLICIES["least_loaded"]))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that depends on processes and has no event. Only the test run has a time limit."""
    while not condition():
        await trio.lowlevel.checkpoint()


class Teller:
    """Replacement for the process that asks Ray. It writes the lines that `say` gets, until `end` is called."""

    def __init__(self, tmp_path: Path) -> None:
        self._path = tmp_path / "lines"
        self._ids = tmp_path / "ids"
        os.mkfifo(self._path)
        self.command = ["sh", "-c", 'echo $$ >> "$1"; exec cat "$0"', str(self._path), str(self._ids)]
        self._pipe: int | None = None

    async def say(self, *urls: str, line: str | None = None) -> None:
        if self._pipe is None:
            self._pipe = await trio.to_thread.run_sync(os.open, self._path, os.O_WRONLY)
        os.write(self._pipe, (line or json.dumps({"urls": urls})).encode() + b"\n")

    def end(self) -> None:
        assert self._pipe is not None
        os.close(self._pipe)
        self._pipe = None

    def processes(self) -> list[int]:
        return [int(line) for line in self._ids.read_text().split()] if self._ids.exists() else []


def lives(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def teller(tmp_path: Path) -> Teller:
    return Teller(tmp_path)


async def test_report_of_ray_replaces_all_endpoints_of_the_source(fleet, teller, nursery, mock_clock):
    nursery.start_soon(RaySource("llm", template=template, command=teller.command).run, fleet)
    await teller.say(A, B)
    await until(lambda: set(fleet.specs()) == {A, B})
    assert all(spec.api_key == "secret" for spec in fleet.specs().values())
    await teller.say(B)
    await until(lambda: set(fleet.specs()) == {B})
    await teller.say(B, C)
    await until(lambda: set(fleet.specs()) == {B, C})
    await teller.say()
    await until(lambda: not fleet.specs())


async def test_endpoints_are_kept_while_ray_fails_and_ray_is_asked_again(fleet, teller, nursery, mock_clock, caplog):
    nursery.start_soon(RaySource("llm", template=template, command=teller.command).run, fleet)
    await teller.say(A)
    await until(lambda: set(fleet.specs()) == {A})
    for line, why in [
        ('{"failure": "there is no Ray at this machine"}', "no Ray at this machine"),
        ("GCS is gone", "is invalid"),
        (None, "the process that asks Ray has ended"),
    ]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            teller.end() if line is None else await teller.say(line=line)
            await until(lambda: "endpoints kept source=ray:llm" in caplog.text)
        assert why in caplog.text
        assert set(fleet.specs()) == {A}
        if line is not None:
            teller.end()
        await wait_all_tasks_blocked()
        mock_clock.jump(1)
        await teller.say(A)
        await wait_all_tasks_blocked()
    assert len(teller.processes()) == 4
    await teller.say(B)
    await until(lambda: set(fleet.specs()) == {B})


async def test_last_line_of_ray_is_logged(fleet, nursery, mock_clock, caplog):
    command = ["sh", "-c", "echo starting >&2; echo 'Failed to connect to GCS' >&2; exit 1"]
    with caplog.at_level(logging.WARNING):
        nursery.start_soon(RaySource("llm", template=template, command=command).run, fleet)
        await until(lambda: "endpoints kept" in caplog.text)
    assert "has ended: Failed to connect to GCS" in caplog.text


async def test_silent_process_that_asks_ray_is_killed_and_replaced(fleet, teller, nursery, mock_clock, caplog):
    nursery.start_soon(RaySource("llm", template=template, command=teller.command).run, fleet)
    await until(lambda: len(teller.processes()) == 1)
    with caplog.at_level(logging.WARNING):
        while "Ray does not answer" not in caplog.text:
            # The process may write its id before the source begins to read.
            mock_clock.jump(FIRST_SECONDS_MAX)
            await wait_all_tasks_blocked()
    await until(lambda: not lives(teller.processes()[0]))
    await wait_all_tasks_blocked()
    mock_clock.jump(1)
    await teller.say(A)
    await until(lambda: set(fleet.specs()) == {A})


async def test_cancel_ends_the_process_that_asks_ray(fleet, teller, mock_clock):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(RaySource("llm", template=template, command=teller.command).run, fleet)
        await teller.say(A)
        await until(lambda: set(fleet.specs()) == {A})
        nursery.cancel_scope.cancel()
    [process] = teller.processes()
    assert not lives(process)


async def test_endpoint_drained_by_an_operator_stays_drained_while_nothing_changes(fleet, teller, nursery, mock_clock):
    nursery.start_soon(RaySource("llm", template=template, command=teller.command).run, fleet)
    await teller.say(A, B)
    await until(lambda: set(fleet.specs()) == {A, B})
    fleet.drain(EndpointId(A))
    await teller.say(A, B)
    # The source reads this line after the line that repeats the last report.
    await teller.say(line='{"failure": "seen"}')
    await until(lambda: not lives(teller.processes()[0]))
    assert set(fleet.specs()) == {B}


def test_missing_ray_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError) as refusal:
        check_ray_is_installed()
    assert install_command("ray") in str(refusal.value)
