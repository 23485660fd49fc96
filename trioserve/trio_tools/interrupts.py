"""Prevents Ctrl-C from interrupting our own code in the middle of a change.

Trio raises KeyboardInterrupt at an arbitrary bytecode of the main thread, unless the running code is protected
(`trio.lowlevel.enable_ki_protection`). If the code is protected, Trio raises KeyboardInterrupt at the next checkpoint
of the main task. Three kinds of code need protection, because an incomplete change breaks other code: code that
registers a task to be rescheduled later, code that opens or closes its resources, and tasks that keep the state of an
engine.
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
    """Protect every method and property of a class, and the functions that these call. A class decorator.

    Args:
        owner: The class.
    """
    for member in vars(owner).values():
        functions = (member.fget, member.fset) if isinstance(member, property) else (inspect.unwrap(member),)
        for function in functions:
            if isinstance(function, FunctionType):
                enable_ki_protection(function)
    return owner


def uninterrupted_context(
    function: Callable[P, AsyncIterator[T]],
) -> Callable[P, AbstractAsyncContextManager[T]]:
    """Create a context manager as `asynccontextmanager` does, but its entry and its exit are never interrupted.

    The code inside of the caller's `async with` stays interruptible.

    Args:
        function: Async generator function with one yield.
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
