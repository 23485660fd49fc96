"""A KV connector for an engine without weights. The test decides when and how each transfer ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import trio

from trioserve.contracts.events import FinishReason
from trioserve.contracts.kv_transfer import Started, TransferEvent
from trioserve.contracts.request import EngineRequest
from trioserve.testing.fake_connector import FakeConnector
from trioserve.testing.fake_executor import FakeExecutor

__all__ = ["ScriptedConnector"]


class ScriptedConnector(FakeConnector):
    """Connector for open_fake_engine(connector=ScriptedConnector).

    It holds the blocks of a finished request with do_remote_decode, and offers all tokens of a prompt with
    do_remote_prefill. No transfer ends by itself. A test ends transfers with `release_all`, `load_all` or `fail_loads`,
    or one transfer with `report(lambda: connector.released(id))`.

    Args:
        executor: the executor with the KV blocks.
        wake: wakes the engine, which then asks for reports.

    Attributes:
        totals: counters that the connector reports, by metric name without "kv_transfer_".
    """

    def __init__(self, executor: FakeExecutor, wake: Callable[[], None]) -> None:
        super().__init__(executor, matched_count=_matched_count, holds=_holds)
        self.totals: dict[str, float] = {}
        self._wake = wake
        self._reports: list[Callable[[], TransferEvent]] = []
        self._error: Exception | None = None
        self._is_broken = trio.Event()

    # --- calls of the test ---

    def report(self, happen: Callable[[], TransferEvent]) -> None:
        """Wake the engine, and report an event when it asks for reports.

        Args:
            happen: makes the event at that moment.
        """
        self._reports.append(happen)
        self._wake()

    def release_all(self) -> None:
        """Report that all held blocks may be freed."""
        for request_id in list(self.sends):
            self.report(partial(self.released, request_id))

    def load_all(self) -> None:
        """Report that all loads have arrived whole."""
        for request_id in list(self.loads):
            self.report(partial(self.loaded, request_id))

    def fail_loads(self) -> None:
        """Report that all loads have failed."""
        for request_id in list(self.loads):
            self.report(partial(self.load_failed, request_id))

    def break_down(self, error: Exception) -> None:
        """Make the connector's task raise, which is a fault of the engine.

        Args:
            error: the exception.
        """
        self._error = error
        self._is_broken.set()

    # --- calls of the engine ---

    def progress(self) -> Iterable[TransferEvent]:
        events = [*super().progress(), *(happen() for happen in self._reports)]
        self._reports.clear()
        return events

    def counts(self) -> Mapping[str, float]:
        return self.totals

    async def run(self, *, task_status: Started) -> None:
        task_status.started("nowhere")
        await self._is_broken.wait()
        assert self._error is not None
        raise self._error


def _holds(request: EngineRequest, reason: FinishReason) -> bool:
    asked = request.kv_transfer
    return asked is not None and asked.do_remote_decode and reason in (FinishReason.STOP, FinishReason.LENGTH)


def _matched_count(request: EngineRequest, computed_count: int) -> int:
    asked = request.kv_transfer
    if asked is None or not asked.do_remote_prefill:
        return 0
    return max(0, len(request.known_token_ids) - 1 - computed_count)
