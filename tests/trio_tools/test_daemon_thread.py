"""Tests of calls in daemon threads, which continue if their caller is cancelled."""

from __future__ import annotations

import sys
import threading
import types

import pytest
import trio

from trioserve import assemble
from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.default_model import DOWNLOAD_THREAD
from trioserve.trio_tools.worker_thread import call_abandonable

GIVE_UP_SECONDS = 20  # This limit ends the download if a caller wrongly waits for it.


class Download:
    """A replacement for snapshot_download. It ends when the test releases it."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.released = threading.Event()
        self.error: Exception | None = None

    def __call__(self, name: str, **options: object) -> str:
        self.begun.set()
        self.released.wait(GIVE_UP_SECONDS)
        if self.error is not None:
            raise self.error
        return "/nowhere/downloaded"


@pytest.fixture
def download(monkeypatch):
    """Return a download that is released at the end of the test. The fixture then waits for the download's threads."""
    stand_in = Download()
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    yield stand_in
    stand_in.released.set()
    for thread in download_threads():
        thread.join()


def download_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == DOWNLOAD_THREAD]


async def test_cancelling_open_engine_returns_although_the_download_still_runs(download):
    async with trio.open_nursery() as nursery:

        async def load() -> None:
            async with assemble.open_engine("org/model"):
                raise AssertionError("opened")

        nursery.start_soon(load)
        await trio.to_thread.run_sync(download.begun.wait)
        nursery.cancel_scope.cancel()
    assert not download.released.is_set()  # The download is still running.
    assert [thread.daemon for thread in download_threads()] == [True]
    assert not [thread for thread in threading.enumerate() if thread.name in ("trioserve-text", "trioserve-compute")]


async def test_late_error_of_an_abandoned_thread_call_is_discarded(download):
    with trio.CancelScope() as scope:
        scope.cancel()
        await call_abandonable(download, "org/model", thread_name=DOWNLOAD_THREAD)
    assert scope.cancelled_caught
    [thread] = download_threads()
    download.error = ValueError("discarded")
    download.released.set()
    await trio.to_thread.run_sync(thread.join)
    await trio.testing.wait_all_tasks_blocked()


def test_abandoned_thread_call_may_end_after_its_trio_run(download, monkeypatch):
    broken: list[object] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)

    async def main() -> None:
        with trio.move_on_after(0):
            await call_abandonable(download, "org/model", thread_name=DOWNLOAD_THREAD)

    trio.run(main)
    [thread] = download_threads()
    download.released.set()
    thread.join()
    assert broken == []


async def test_open_engine_waits_for_the_download(download):
    download.released.set()
    with pytest.raises(ModelLoadError, match="/nowhere/downloaded"):
        async with assemble.open_engine("org/model"):
            raise AssertionError("opened")
    assert download_threads() == []


async def test_daemon_thread_call_returns_the_result_or_raises_the_error():
    assert await call_abandonable(int, "7", thread_name="t") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await call_abandonable(int, "seven", thread_name="t")
