"""A connector for an engine without weights: a test says what becomes of each transfer, and when."""

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
    """For open_fake_engine(connector=ScriptedConnector). It holds what is asked to be held of whole responses, and
    could load all of a prompt that is said to be elsewhere; nothing of that goes on by itself. It happens with
    `release_all`, `load_all`, `fail_loads`, or transfer by transfer with `report(lambda: connector.released(id))` and
    its like.

    totals: what it counts, by the names of the catalogue without "kv_transfer_".
    """

    def __init__(self, executor: FakeExecutor, wake: Callable[[], None]) -> None:
        super().__init__(executor, matched_count=_matched_count, holds=_holds)
        self.totals: dict[str, float] = {}
        self._wake = wake
        self._reports: list[Callable[[], TransferEvent]] = []
        self._error: Exception | None = None
        self._is_broken = trio.Event()

    # --- the script's side ---

    def report(self, happen: Callable[[], TransferEvent]) -> None:
        """Let this happen, and the engine learn of it, in its next turn."""
        self._reports.append(happen)
        self._wake()

    def release_all(self) -> None:
        """Whoever reads has read, or never will."""
        for request_id in list(self.sends):
            self.report(partial(self.released, request_id))

    def load_all(self) -> None:
        """All that is being loaded has come."""
        for request_id in list(self.loads):
            self.report(partial(self.loaded, request_id))

    def fail_loads(self) -> None:
        """Nothing of it comes."""
        for request_id in list(self.loads):
            self.report(partial(self.load_failed, request_id))

    def break_down(self, error: Exception) -> None:
        """Its task raises: a fault of the engine."""
        self._error = error
        self._is_broken.set()

    # --- the engine's side ---

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
