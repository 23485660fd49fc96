"""The process and the Trio run that an object belongs to. A call from another process or run raises WrongLoop."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

from trioserve.contracts.errors import AlreadyEnded, WrongLoop
from trioserve.trio_tools.interrupts import uninterrupted_context

__all__ = ["OpenedOnce", "OwnProcess", "OwnRun", "check_is_in_trio", "opened_once"]

P = ParamSpec("P")
T = TypeVar("T")


class OwnProcess:
    """The process in which this object was created."""

    def __init__(self) -> None:
        self.process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Return True if the current process created this object."""
        return os.getpid() == self.process_id

    def check(self, what: str) -> None:
        """Check that the current process created this object.

        Args:
            what: Name of the called function, for the error message.

        Raises:
            WrongLoop: This is a forked child. It has a copy of the engine's memory, but none of its threads.
        """
        process_id = os.getpid()
        if process_id != self.process_id:
            raise WrongLoop(
                f"{what} was called in process {process_id}, and the engine was opened in process {self.process_id}: "
                "a forked process cannot use the engine of its parent, so open one here"
            )


class OwnRun:
    """The Trio run and the process in which this object was created."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._process = OwnProcess()

    def check_process(self, what: str) -> None:
        """Check only the process, for methods that any thread may call. See OwnProcess.check.

        Args:
            what: Name of the called function, for the error message.
        """
        self._process.check(what)

    def check(self, what: str) -> None:
        """Check that the current Trio run created this object.

        Args:
            what: Name of the called function, for the error message.

        Raises:
            WrongLoop: This is another process, thread or run, or no run.
        """
        is_here = self._process.process_id == os.getpid() and trio.lowlevel.in_trio_run()
        if is_here and trio.lowlevel.current_trio_token() is self._token:
            return
        self._process.check(what)
        check_is_in_trio(what)
        raise WrongLoop(
            f"{what} was called in another Trio run than the one that opened the engine: call it there, with "
            "trio.from_thread.run and the trio_token of that run, or open an engine here"
        )


def check_is_in_trio(what: str) -> None:
    """Check that a Trio loop runs in this thread.

    Args:
        what: Name of the called function, for the error message.

    Raises:
        WrongLoop: no Trio loop runs in this thread.
    """
    if trio.lowlevel.in_trio_run():
        return
    if _runs_asyncio():
        opening = what.removeprefix("trioserve.") if what.startswith("trioserve.open_") else "open_engine"
        raise WrongLoop(
            f"{what} was called in an asyncio program, and this engine is one for Trio: open it with "
            f"`async with trioserve.asyncio.{opening}(...)`, which has the same methods"
        )
    raise WrongLoop(
        f"{what} was called where no Trio loop runs: call it inside of an async function that `trio.run(...)` runs; in "
        "another thread, with trio.from_thread.run and the trio_token of the engine's run"
    )


def _runs_asyncio() -> bool:
    module = sys.modules.get("asyncio")  # A program that runs asyncio has imported this module.
    if module is None:
        return False
    try:
        module.get_running_loop()
    except RuntimeError:
        return False
    return True


class OpenedOnce(AbstractAsyncContextManager[T], Generic[T]):
    """A scope that can be entered and exited only once, in the process that created it.

    A second entry, a second exit, and an exit before the entry raise AlreadyEnded. An exit in a forked child raises
    WrongLoop. These errors change nothing.

    Args:
        scope: The scope to protect.
        what: Name of the function that created the scope, for error messages.
    """

    def __init__(self, scope: AbstractAsyncContextManager[T], what: str) -> None:
        self._scope = scope
        self._what = what
        self._process = OwnProcess()
        self._is_entered = self._is_left = False

    @enable_ki_protection
    async def __aenter__(self) -> T:
        self._process.check(f"entering {self._what}")
        if self._is_entered:
            raise AlreadyEnded(f"{self._what} was entered before: call it again for another scope")
        self._is_entered = True
        try:
            return await self._scope.__aenter__()
        except BaseException:
            self._is_left = True
            raise

    @enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._process.check(f"leaving {self._what}")
        if self._is_left or not self._is_entered:
            raise AlreadyEnded(f"{self._what} {'was left before' if self._is_left else 'is left, and was not entered'}")
        self._is_left = True
        return await self._scope.__aexit__(kind, error, traceback)


def opened_once(function: Callable[P, AsyncIterator[T]]) -> Callable[P, OpenedOnce[T]]:
    """Turn an async generator function into a scope that can be entered once. See OpenedOnce and uninterrupted_context.

    Args:
        function: Async generator function with one yield.
    """
    open_scope = uninterrupted_context(function)

    @functools.wraps(function)
    def open_once(*args: P.args, **kwargs: P.kwargs) -> OpenedOnce[T]:
        return OpenedOnce(open_scope(*args, **kwargs), function.__name__)

    return open_once
