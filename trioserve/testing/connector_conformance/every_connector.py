"""Conformance tests for every connector, also for a connector that transfers nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import trio
from trio.testing import MockClock

from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.kv_transfer import ConnectorFactory, ConnectorSetup, KVConnector, KVLayout
from trioserve.contracts.request import KVTransferParams
from trioserve.testing.connector_conformance.side import (
    ABORT,
    SMALL_LAYOUT,
    TOKENS,
    MemoryPages,
    Side,
    Stage,
    make_request,
)
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

__all__ = ["ConnectorConformance"]


class ConnectorConformance:
    """Tests for every connector.

    Attributes:
        factory: creates a connector, as an engine does.
        real_time: must be True if the connector uses threads, sockets or processes.
        patience_seconds: longest wait for an event that the connector must report.
        settle_seconds: time to wait for events that the connector must not report, if `real_time` is True.
        layout: layout of the engines' KV caches.
    """

    factory: ClassVar[ConnectorFactory | Callable[[ConnectorSetup], KVConnector]]
    real_time: bool = False
    patience_seconds: float = 30.0
    settle_seconds: float = 0.05
    layout: KVLayout = SMALL_LAYOUT

    def options(self, side: str) -> Mapping[str, Any]:
        """Return kv_connector_extra_config of an engine. Override this method to set options.

        Args:
            side: "sender" or "reader".
        """
        return {}

    # --- helpers that run a test ---

    def sides(self, *, reader_layout: KVLayout | None = None, has_views: bool = True) -> tuple[Side, Side]:
        reader = Side("reader", reader_layout or self.layout, has_views=has_views)
        return Side("sender", self.layout, has_views=has_views), reader

    def play(self, script: Callable[[Stage], Coroutine[Any, Any, None]], **how: Any) -> None:
        async def main() -> None:
            async with self._opened(**how) as stage:
                await script(stage)
                await stage.settle()
                open_holds = [f"{side.name}: {name}" for side in stage.sides for name in (*side.sends, *side.loads)]
                assert not open_holds, f"no report ended {', '.join(open_holds)}"
            stage.check()

        with errors_unwrapped():
            if self.real_time:
                trio.run(main)
            else:
                trio.run(main, clock=MockClock(autojump_threshold=0))

    @asynccontextmanager
    async def _opened(self, *, window_tokens: int | None = None, **how: Any) -> AsyncIterator[Stage]:
        stage = Stage(self, *self.sides(**how))
        for side in stage.sides:
            side.window_tokens = window_tokens
            side.connect(type(self).factory, dict(self.options(side.name)), f"engine-of-{side.name}")
        task_count = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            for side in stage.sides:
                if hasattr(side.connector, "run"):  # A connector need not have a task.
                    stage.scopes[side.name] = await nursery.start(_run_scoped, side.connector.run)
            yield stage
            nursery.cancel_scope.cancel()
        left = trio.lowlevel.current_statistics().tasks_living - task_count
        assert left == 0, f"{left} tasks are left after the connectors have ended"

    # --- tests ---

    def test_request_without_transfer_params_matches_no_tokens(self) -> None:
        async def script(stage: Stage) -> None:
            side = stage.sender
            for reason in FinishReason:
                request = make_request(stage.name(), TOKENS)
                assert side.connector.num_matched_tokens(request, 0) == 0
                assert side.connector.num_matched_tokens(request, side.pages.layout.block_size) == 0
                assert side.finish(request, side.take(len(TOKENS)), TOKENS, reason) is None
            for name in list(side.sends):
                await stage.until_released(name)

        self.play(script)

    def test_connector_accepts_the_end_of_requests_that_it_never_saw(self) -> None:
        """Check that a connector accepts the end of requests that it has never seen, with any parameters."""

        async def script(stage: Stage) -> None:
            for side in stage.sides:
                for params in (None, *_WANTED):
                    for token_count in (0, 1, len(TOKENS)):
                        request = make_request(stage.name(), TOKENS, params)
                        side.finish(request, side.take(token_count), TOKENS[:token_count], ABORT)
                        side.abort_after_finish(request.id)
                for name in list(side.sends):
                    await stage.until_released(name, side)

        self.play(script)

    def test_load_from_an_unknown_engine_fails_in_time(self) -> None:
        async def script(stage: Stage) -> None:
            reader = stage.reader
            for params in _WANTED:
                request = make_request(stage.name(), TOKENS, params)
                count = reader.connector.num_matched_tokens(request, 0)
                assert isinstance(count, int), f"{count!r} tokens match"
                assert count >= 0, f"{count} tokens match"
                if count > 0:
                    load = reader.start_load(request, 0, min(count, len(TOKENS) - 1))
                    await stage.until_load_ends(load)
                reader.finish(request, (), (), ABORT)
            assert not reader.loaded, "KV was loaded from an engine that does not exist"

        self.play(script)

    def test_progress_returns_each_event_once(self) -> None:
        """Check that `progress` returns each event only once."""

        async def script(stage: Stage) -> None:
            for side in stage.sides:
                assert list(side.connector.progress()) == []

        self.play(script)

    def test_connector_counts_are_not_negative(self) -> None:
        async def script(stage: Stage) -> None:
            for side in stage.sides:
                counts = side.connector.counts() if hasattr(side.connector, "counts") else {}
                assert all(isinstance(name, str) and value >= 0 for name, value in counts.items()), counts

        self.play(script)

    def test_unknown_option_of_a_connector_is_refused(self) -> None:
        """Check that the factory of a connector refuses an unknown option with StartupError."""
        setup = ConnectorSetup(
            engine_id="e",
            role="both",
            pages=MemoryPages(8, self.layout),
            options={**self.options("sender"), "an option that nobody has": 1},
            wake=lambda: None,
        )
        try:
            type(self).factory(setup)
        except StartupError:
            return
        raise AssertionError("an unknown option was accepted")


async def _run_scoped(
    run: Callable[..., Coroutine[Any, Any, None]], *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    """Start a connector's task in its own cancel scope, and report the scope when the connector is ready."""

    class Status:
        def started(self, value: Any = None) -> None:
            task_status.started(scope)

    with trio.CancelScope() as scope:
        await run(task_status=Status())


_WANTED = (
    KVTransferParams(do_remote_decode=True),
    KVTransferParams(do_remote_prefill=True),
    KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id="nobody",
        remote_request_id="nothing",
        remote_block_ids=(0, 1, 2),
        remote_host="127.0.0.1",
        remote_port=9,  # No server listens at this port, which belongs to the discard protocol.
        remote_block_size=4,
        remote_num_tokens=12,
    ),
    KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id="",
        remote_request_id="",
        remote_block_ids=((-1, 10**9), ()),
        remote_host="",
        remote_port=-1,
        remote_block_size=0,
        remote_num_tokens=10**9,
        tp_size=0,
    ),
    KVTransferParams(do_remote_prefill=True, do_remote_decode=True, remote_engine_id="x", remote_num_tokens=-5),
)
