"""Tests that the host connector obeys the contract, with blocks in memory and with blocks in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from trioserve.connectors.host.policy import host_settings_from
from trioserve.connectors.host.transport import HostConnector, make_connector
from trioserve.contracts.kv_transfer import ConnectorSetup
from trioserve.testing import connector_conformance as suite


async def at_once(work):
    """Run work without a thread, so that the clock can jump."""
    await trio.lowlevel.checkpoint()
    return work()


def without_threads(setup: ConnectorSetup) -> HostConnector:
    settings = host_settings_from(setup.options, setup.pages.layout)
    return HostConnector(settings, setup.pages, setup.wake, run_in_thread=at_once, window_tokens=setup.window_tokens)


class TestInMemory(suite.StoreConformance):
    factory = staticmethod(without_threads)

    def options(self, side: str) -> Mapping[str, Any]:
        return {"memory_bytes": 100_000}

    async def offer(
        self, stage: suite.Stage, tokens: Sequence[int] = suite.TOKENS, salt: str | None = None
    ) -> suite.Offered:
        """Offer tokens, mostly with their own salt.

        Equal tokens with equal salts must have equal KV. In the suite, their KV differs.
        """
        if salt is None and stage.sender.reports:
            salt = stage.name()
        return await super().offer(stage, tokens, salt)


class TestInFiles(TestInMemory):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path):
        self.path = tmp_path

    async def offer(
        self, stage: suite.Stage, tokens: Sequence[int] = suite.TOKENS, salt: str | None = None
    ) -> suite.Offered:
        """Offer tokens after earlier work has ended, and wait for their files.

        Most blocks leave memory soon, and files do not count while an abandoned load reads them.
        """
        await trio.testing.wait_all_tasks_blocked()
        offered = await super().offer(stage, tokens, salt)
        await trio.testing.wait_all_tasks_blocked()
        return offered

    def options(self, side: str) -> Mapping[str, Any]:
        return {"memory_bytes": 1000, "directory": str(self.path), "directory_bytes": 1_000_000}


@pytest.mark.slow
class TestWithThreads(TestInMemory):
    factory = staticmethod(make_connector)
    real_time = True
