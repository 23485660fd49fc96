"""Calls functions in separate threads, which continue to run if the caller is cancelled.

Use these threads only for calls that cannot be interrupted, hold no resource that other code needs, and may take
minutes. For all other calls, use WorkerThread, whose thread always ends with its scope.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio
from trio.lowlevel import enable_ki_protection

__all__ = ["call_abandonable"]

T = TypeVar("T")


@enable_ki_protection
async def call_abandonable(function: Callable[..., T], *arguments: Any, thread_name: str) -> T:
    """Call a function in a new daemon thread. If the caller is cancelled, it returns at once.

    An abandoned thread runs until the function returns. Its result or error is discarded.

    Args:
        function: Function to call.
        arguments: Arguments of the function.
        thread_name: Name of the thread.
    """
    task = trio.lowlevel.current_task()
    token = trio.lowlevel.current_trio_token()
    is_abandoned = False

    def work() -> None:
        result = outcome.capture(function, *arguments)
        with contextlib.suppress(trio.RunFinishedError):  # the call was abandoned, and the Trio run has ended
            token.run_sync_soon(deliver, result)

    def deliver(result: outcome.Outcome[T]) -> None:
        if not is_abandoned:
            thread.join()  # this returns at once, because the thread has no work left
            trio.lowlevel.reschedule(task, result)

    def leave(_raise_cancel: object) -> trio.lowlevel.Abort:
        nonlocal is_abandoned
        is_abandoned = True
        return trio.lowlevel.Abort.SUCCEEDED

    thread = threading.Thread(target=work, name=thread_name, daemon=True)
    thread.start()
    returned: T = await trio.lowlevel.wait_task_rescheduled(leave)
    return returned
