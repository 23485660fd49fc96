"""The order of serving and of stopping. Who speaks HTTP and who computes was decided before.

Stopping, on the first order: /ready answers 503, requests in the queue and new ones are refused with 503, running ones
may finish. The server still listens until they have, and after SIGTERM for a short time at least, so that others can
see why it refuses work. At the deadline running requests are ended with an error. Then everything is cancelled. A
second order shortens the wait.
"""

from __future__ import annotations

import logging
import signal
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

    def announce_drain(self) -> None:
        """Still answer, and end each connection behind its response. Never waits."""

    async def wait_until_answered(self) -> None:
        """Return when every exchange that was open at `announce_drain` has ended."""

    def drain(self) -> None:
        """Accept nothing new; running exchanges continue. Never waits."""

    def reload(self) -> None:
        """Read certificates and keys again, for connections to come. Never raises: a failure is a line in the log."""


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
        """Serve until the first order to stop, then drain. A second one ends the drain, a third the grace period.

        Args:
            orders: signal.SIGHUP reloads certificates at any time. Every other item is an order to stop. SIGINT
                skips the least time of the drain.

        Returns:
            When no request is served any more.

        Raises:
            Exception: what the front end raises.
        """
        settings = self._settings
        last_order: object = None

        async def next_order() -> None:
            nonlocal last_order
            while True:
                last_order = await orders.receive()
                if last_order != signal.SIGHUP:
                    return
                self._front_end.reload()

        async with trio.open_nursery() as nursery:
            await nursery.start(self._serve_to_the_end)
            task_status.started()
            await _first_of(self._is_over.wait, next_order)  # a front end may also end by itself
            logger.info("draining seconds_max=%g", settings.drain_seconds_max)
            delay = 0.0 if last_order == signal.SIGINT else settings.drain_delay_seconds
            self._worker.drain()
            self._front_end.announce_drain()
            is_answered = False

            async def answer_the_rest() -> None:
                nonlocal is_answered
                least = trio.current_time() + delay
                await self._front_end.wait_until_answered()
                await self._wait_for_rest()
                await trio.sleep_until(least)
                is_answered = True
                self._front_end.drain()
                await self._is_over.wait()

            with trio.move_on_after(settings.drain_seconds_max):
                await _first_of(self._is_over.wait, answer_the_rest, next_order)
            if not self._is_over.is_set():
                if not is_answered:
                    self._front_end.drain()
                self._worker.abort_all("the server is shutting down")
                with trio.move_on_after(settings.grace_seconds_max):
                    await _first_of(self._is_over.wait, next_order)
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
