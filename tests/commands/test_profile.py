"""Tests that a signal writes the profile of the latest steps to a file."""

from __future__ import annotations

import json
import os
import signal

import pytest
import trio

from trioserve.commands.serve import check_profile_directory, profiling
from trioserve.contracts.errors import StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import open_fake_engine


async def test_each_profile_signal_writes_a_file(tmp_path):
    async with open_fake_engine() as fake:
        async with fake.generate("p", SamplingParams(max_tokens=3)) as stream:
            async for _ in stream:
                pass
        async with profiling(tmp_path, fake.step_times):
            os.kill(os.getpid(), signal.SIGUSR2)
            with trio.fail_after(20):
                while not list(tmp_path.glob("steps-*.json")):
                    await trio.lowlevel.checkpoint()
    (path,) = tmp_path.iterdir()
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("forward") == 3


async def test_failed_write_of_a_profile_does_not_end_the_server(tmp_path, caplog):
    directory = tmp_path / "gone"
    directory.mkdir()
    async with open_fake_engine() as fake, profiling(directory, fake.step_times):
        directory.rmdir()
        os.kill(os.getpid(), signal.SIGUSR2)
        with trio.fail_after(20):
            while "not written" not in caplog.text:
                await trio.lowlevel.checkpoint()


def test_invalid_profile_directory_is_refused(tmp_path):
    with pytest.raises(StartupError, match="--profile"):
        check_profile_directory(str(tmp_path / "none"))
    assert check_profile_directory(None) is None
    assert check_profile_directory(str(tmp_path)) == tmp_path
