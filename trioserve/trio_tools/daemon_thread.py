"""A call in a thread of its own that nobody has to wait for: for what cannot be ended from outside, holds nothing that
others need, and may take minutes. Everything else belongs into a WorkerThread, which leaves no thread behind."""

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
    """A cancelled caller leaves at once. The thread, a daemon, then goes on until the function returns by itself, and
    what it returns or raises is lost."""
    task = trio.lowlevel.current_task()
    token = trio.lowlevel.current_trio_token()
    is_abandoned = False

    def work() -> None:
        result = outcome.capture(function, *arguments)
        with contextlib.suppress(trio.RunFinishedError):  # abandoned, and even the program around it is over
            token.run_sync_soon(hand_back, result)

    def hand_back(result: outcome.Outcome[T]) -> None:
        if not is_abandoned:
            thread.join()  # it has nothing left to do
            trio.lowlevel.reschedule(task, result)

    def leave(_raise_cancel: object) -> trio.lowlevel.Abort:
        nonlocal is_abandoned
        is_abandoned = True
        return trio.lowlevel.Abort.SUCCEEDED

    thread = threading.Thread(target=work, name=thread_name, daemon=True)
    thread.start()
    returned: T = await trio.lowlevel.wait_task_rescheduled(leave)
    return returned
