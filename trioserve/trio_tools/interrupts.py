"""Keeps Ctrl-C from stopping our own code halfway.

Trio raises KeyboardInterrupt at an arbitrary bytecode of the main thread, unless the running code is protected
(`trio.lowlevel.enable_ki_protection`). Then the interrupt arrives at the next checkpoint of the main task. Three kinds
of code must be protected, since a half-done change breaks others: code that hands a task to somebody who will
reschedule it, code that opens or closes what it owns, and tasks that keep the state of an engine.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import FunctionType, TracebackType
from typing import ParamSpec, TypeVar

from trio.lowlevel import enable_ki_protection

__all__ = ["uninterrupted", "uninterrupted_context"]

P = ParamSpec("P")
T = TypeVar("T")
ClassT = TypeVar("ClassT", bound=type)


def uninterrupted(owner: ClassT) -> ClassT:
    """Class decorator: protect every method and property of a class, with all that they call."""
    for member in vars(owner).values():
        functions = (member.fget, member.fset) if isinstance(member, property) else (inspect.unwrap(member),)
        for function in functions:
            if isinstance(function, FunctionType):
                enable_ki_protection(function)
    return owner


def uninterrupted_context(
    function: Callable[P, AsyncIterator[T]],
) -> Callable[P, AbstractAsyncContextManager[T]]:
    """Like `asynccontextmanager`, but an interrupt never stops it while it is entered or left.

    The code inside of the caller's `async with` is as interruptible as ever.
    """
    open_context = asynccontextmanager(function)

    @functools.wraps(function)
    def open_uninterrupted(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
        return _UninterruptedContext(open_context(*args, **kwargs))

    return open_uninterrupted


class _UninterruptedContext(AbstractAsyncContextManager[T]):
    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context

    @enable_ki_protection
    async def __aenter__(self) -> T:
        return await self._context.__aenter__()

    @enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._context.__aexit__(kind, error, traceback)
