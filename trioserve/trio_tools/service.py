"""The order of serving and of stopping. Who speaks HTTP and who computes was decided before.

Stopping, on the first order: readiness turns, requests in the queue are refused with 503, running ones may finish; at
the deadline they are ended and told why; then everything is cancelled. A second order shortens the wait.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from trioserve.trio_tools.settings import StoppingSettings

__all__ = ["FrontEnd", "Service", "Worker"]

logger = logging.getLogger(__name__)


class FrontEnd(Protocol):
    """Whoever speaks HTTP."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until drained, then return: when the last exchange is over. May be cancelled at any time."""

    def drain(self) -> None:
        """Take nothing new, and tell clients so; exchanges under way go on. Never waits."""


class Worker(Protocol):
    """Whoever answers the requests: an engine, or a router."""

    def drain(self) -> None:
        """Take nothing new, refuse who waits; the others go on. Never waits."""

    def abort_all(self, message: str) -> None:
        """End the others, too; their readers get the message."""


async def _nothing() -> None:
    await trio.lowlevel.checkpoint()


class Service:
    """A worker and the front end before it, from start to stop. wait_for_rest: returns when nothing is left of requests
    whose clients have their responses already (blocks that are held for another engine)."""

    def __init__(
        self,
        worker: Worker,
        front_end: FrontEnd,
        settings: StoppingSettings,
        *,
        wait_for_rest: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self._worker = worker
        self._front_end = front_end
        self._settings = settings
        self._wait_for_rest = wait_for_rest
        self._is_over = trio.Event()  # the front end serves nobody any more, and nothing is left of anybody

    async def run(
        self,
        orders: trio.MemoryReceiveChannel[object],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until the first item in `orders`, then drain; a second one ends the draining, a third the grace
        period. Returns when nobody is served any more; raises what the front end raises."""
        settings = self._settings
        async with trio.open_nursery() as nursery:
            await nursery.start(self._serve_to_the_end)
            task_status.started()
            await _first_of(self._is_over.wait, orders.receive)  # a front end may also end by itself
            logger.info("draining seconds_max=%g", settings.drain_seconds_max)
            self._worker.drain()
            self._front_end.drain()
            with trio.move_on_after(settings.drain_seconds_max):
                await _first_of(self._is_over.wait, orders.receive)
            if not self._is_over.is_set():
                self._worker.abort_all("the server is shutting down")
                with trio.move_on_after(settings.grace_seconds_max):
                    await _first_of(self._is_over.wait, orders.receive)
            nursery.cancel_scope.cancel()

    async def _serve_to_the_end(self, task_status: trio.TaskStatus[None]) -> None:
        await self._front_end.serve(task_status=task_status)
        await self._wait_for_rest()
        self._is_over.set()

    async def pass_on_fault(self) -> None:
        """To be called when every handler has a fault of the worker; returns when they have told their clients."""
        self._front_end.drain()
        await self._is_over.wait()


async def _first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    async def wait(function: Callable[[], Awaitable[object]]) -> None:
        await function()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for function in waits:
            nursery.start_soon(wait, function)
