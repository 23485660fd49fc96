"""Runs a server and stops it in several phases, for any front end and any worker.

When the service gets the first command to stop, /ready answers 503, and new and queued requests are refused with 503.
Running requests may finish, and the server listens until they have finished. After SIGTERM, the server also listens for
a minimum time, so that clients can see why it refuses requests. At the deadline, running requests end with an error.
Then every task is cancelled. A second command shortens the wait.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from trioserve.contracts.deadlines import StoppingSettings

__all__ = ["FrontEnd", "Service", "Worker"]

logger = logging.getLogger(__name__)


class FrontEnd(Protocol):
    """The part of a server that handles HTTP."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until the front end is drained and its last exchange has ended. The caller may cancel this at any time.

        Args:
            task_status: Reports that the front end listens.
        """

    def announce_drain(self) -> None:
        """Continue to answer, but close each connection after its response. Never waits."""

    async def wait_until_answered(self) -> None:
        """Wait until every exchange that was open at `announce_drain` has ended."""

    def drain(self) -> None:
        """Accept no new connections. Running exchanges continue. Never waits."""

    def reload(self) -> None:
        """Read certificates and keys again, for new connections. Never raises: a failure is logged."""


class Worker(Protocol):
    """The part of a server that answers requests: an engine or a router."""

    def drain(self) -> None:
        """Accept no new requests, and refuse waiting requests. Running requests continue. Never waits."""

    def abort_all(self, message: str) -> None:
        """End the running requests.

        Args:
            message: Explanation for the clients of these requests.
        """


async def _nothing() -> None:
    await trio.lowlevel.checkpoint()


class Service:
    """A server: a worker and its front end, from the start to the stop.

    Args:
        worker: Answers the requests.
        front_end: Handles HTTP.
        settings: Time limits of the phases of stopping.
        wait_for_rest: Waits until answered requests hold no resources any more, such as blocks that are held for
            another engine.
    """

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
        self._is_over = trio.Event()  # set when the front end has ended and `wait_for_rest` has returned

    async def run(
        self,
        orders: trio.MemoryReceiveChannel[object],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until the first command to stop, then drain. A second command ends the drain, and a third command ends
        the grace period.

        This returns when no request is served any more.

        Args:
            orders: Signals from the operator. signal.SIGHUP reloads certificates at any time. Every other signal is a
                command to stop. SIGINT skips the minimum time of the drain.
            task_status: Reports that the front end listens.

        Raises:
            Exception: an error of the front end.
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
            await nursery.start(self._serve_until_over)
            task_status.started()
            await _first_of(self._is_over.wait, next_order)  # The front end may also end without a command to stop.
            logger.info("draining seconds_max=%g", settings.drain_seconds_max)
            delay = 0.0 if last_order == signal.SIGINT else settings.drain_delay_seconds
            self._worker.drain()
            self._front_end.announce_drain()
            is_answered = False

            async def finish_requests() -> None:
                nonlocal is_answered
                delay_ends_at = trio.current_time() + delay
                await self._front_end.wait_until_answered()
                await self._wait_for_rest()
                await trio.sleep_until(delay_ends_at)
                is_answered = True
                self._front_end.drain()
                await self._is_over.wait()

            with trio.move_on_after(settings.drain_seconds_max):
                await _first_of(self._is_over.wait, finish_requests, next_order)
            if not self._is_over.is_set():
                if not is_answered:
                    self._front_end.drain()
                self._worker.abort_all("the server is shutting down")
                with trio.move_on_after(settings.grace_seconds_max):
                    await _first_of(self._is_over.wait, next_order)
            nursery.cancel_scope.cancel()

    async def _serve_until_over(self, task_status: trio.TaskStatus[None]) -> None:
        await self._front_end.serve(task_status=task_status)
        await self._wait_for_rest()
        self._is_over.set()

    async def pass_on_fault(self) -> None:
        """Drain the front end and wait until every client has received the worker's fault. Call this when the fault has
        ended all requests.
        """
        self._front_end.drain()
        await self._is_over.wait()


async def _first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    async def wait(function: Callable[[], Awaitable[object]]) -> None:
        await function()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for function in waits:
            nursery.start_soon(wait, function)
